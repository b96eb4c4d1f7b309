"""Options of the test suite."""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import gpus  # noqa: F401 - before the next one looks for GPUs
from tests.support.emulator import FOLDER
from tests.support.first_imports import begins_at_the_end, import_from_the_end
from tests.support.interpreter import INTERPRETED, mend_interpreter
from tests.support.leftovers import watch_for_leftovers
from tests.support.recorded_launches import record_into
from tests.support.selection import LONG, QUICK
from tests.support.sweeps import choose_seed, share
from tests.support.turns import listed, skipped_alike, whose_turn_it_is_not

# The same examples in every run of the CI, new ones on everybody's own machine. No verdict depends
# on speed.
settings.register_profile(
    "own", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("ci", settings.get_profile("own"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "own")

INTERPRETED_CASES = 10
"""Interpreted kernels are some hundred times as slow: a run takes one of this number of cases."""
FOLDER_OF_TESTS = Path(__file__).parent
TOKENIZERS = FOLDER_OF_TESTS / "tokenizers"

if INTERPRETED:
    mend_interpreter()
    if launches := os.environ.get("TEST_RECORDS_LAUNCHES"):
        record_into(Path(launches))

# Imports and collection leave no garbage that is worth a look at all modules, again and again.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--state-machine-examples",
        type=int,
        default=66,
        help="examples of the engine's state machine, each of up to 110 rule steps (66; in CI they "
        "are the same each time)",
    )
    parser.addoption(
        "--long-run",
        action="store_true",
        help="decode a million tokens in the long run, instead of fifty thousand",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="collect only a selection of files that covers each package; -m 'not slow' leaves out "
        "what takes long in them",
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="run all cases of the tests that are marked with sweep, not a share of them",
    )
    parser.addoption(
        "--turns",
        action="store_true",
        help="of the tests that take long, run those whose turn it is at this commit, and show one "
        "of the cases of a test that are skipped for the same reason; not with --all",
    )
    parser.addoption(
        "--ray",
        action="store_true",
        help="run the tests that start Ray too, which take minutes",
    )
    parser.addoption(
        "--tokenizers",
        action="store_true",
        help="collect the tests of real tokenizers alone, which are fetched from registries",
    )


def pytest_configure(config: pytest.Config) -> None:
    watch_for_leftovers(config)
    choose_seed(everything=config.getoption("--all"))
    config.pluginmanager.register(_Sweeps())
    # What one process builds for the emulator, the others need not.
    if FOLDER not in os.environ:
        folder, patch = tempfile.TemporaryDirectory(), pytest.MonkeyPatch()
        patch.setenv(FOLDER, folder.name)
        config.add_cleanup(patch.undo)
        config.add_cleanup(folder.cleanup)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    config = session.config
    whole = [config.invocation_params.dir / path for path in config.args] == [FOLDER_OF_TESTS]
    if whole and config.getoption("--turns") and begins_at_the_end(config):
        folders = [FOLDER_OF_TESTS / name for name in ("functional", "unit")]
        import_from_the_end(folders, FOLDER_OF_TESTS.parent)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that are not in a run are not imported either."""
    is_inside = TOKENIZERS in (collection_path, *collection_path.parents)
    if config.getoption("--tokenizers"):
        return None if is_inside or collection_path in TOKENIZERS.parents else True
    if is_inside:
        return True
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return (
        True
        if config.getoption("--quick") and is_test and collection_path.name not in QUICK
        else None
    )


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the package logs, whatever has set its logger up before."""
    logger = logging.getLogger("megatron_async")
    kept, logger.propagate = logger.propagate, True
    yield caplog
    logger.propagate = kept


@pytest.fixture(autouse=True)
def _leave_a_gpu_to_the_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """Several processes share a GPU: what PyTorch keeps for its next tensors goes back."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        import torch  # long loaded, where a test has it

        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()


MTP_LAYERS = "megatron.core.transformer.multi_token_prediction"


@pytest.fixture(autouse=True)
def _no_losses_of_other_models() -> None:
    """megatron-core adds up losses of layers that draft in one tensor of the process, which has as
    many as the first model that was trained."""
    if MTP_LAYERS in sys.modules:
        sys.modules[MTP_LAYERS].MTPLossLoggingHelper.tracker.clear()


def pytest_collection_finish() -> None:
    """Modules and tests are no garbage: each full collection would look at them again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--ray"):
        skipped = pytest.mark.skip(reason="it starts Ray, for minutes; give --ray")
        for item in items:
            if item.get_closest_marker("ray") is not None:
                item.add_marker(skipped)
    for item in items:
        if item.path.name in LONG:
            item.add_marker(pytest.mark.slow)
    take_long = {unit.partition("::")[0] for unit in listed()}
    items.sort(
        key=lambda item: (
            item.path.name not in LONG,
            item.nodeid.partition("::")[0] not in take_long,
        )
    )


class _Sweeps:
    """Behind -k and -m, so that a share is one of what they choose."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if INTERPRETED:
            for item in items:
                item.add_marker(pytest.mark.sweep(of=INTERPRETED_CASES))
        if config.getoption("--all"):
            return
        if config.getoption("--turns"):
            others = whose_turn_it_is_not(items) | skipped_alike(items)
            config.hook.pytest_deselected(items=[item for item in items if item in others])
            items[:] = [item for item in items if item not in others]
        items[:], left_out = share(items)
        config.hook.pytest_deselected(items=left_out)
