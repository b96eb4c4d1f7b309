"""Who may launch grids whose CTAs wait for each other."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_async.build.runner import open_runner
from megatron_async.build.spec import EngineSpec
from megatron_async.device import waiting_grids
from megatron_async.models.parallel import ModelParallel
from megatron_async.models.served import ServedModel
from megatron_async.ranks.layout import Layout
from tests.support.engines import config_at
from tests.support.hash_model import HashModel

GPU = torch.device("cuda:0")


class Owner:
    """Stands for an engine's device."""


@pytest.fixture(autouse=True)
def no_mps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(waiting_grids, "_uses_mps", lambda index: False)
    monkeypatch.setattr(waiting_grids, "_owners", {})
    yield


def test_one_engine_a_device_until_it_is_closed() -> None:
    first, second = Owner(), Owner()
    assert waiting_grids.claim(GPU, first) is None
    assert waiting_grids.claim(GPU, first) is None, "a draft model's layers are the same engine's"
    assert "another engine of this process on cuda:0" in str(waiting_grids.claim(GPU, second))
    assert waiting_grids.claim(torch.device("cuda:1"), second) is None
    waiting_grids.release(second)
    assert "another" in str(waiting_grids.claim(GPU, second)), "it gave up its own alone"
    waiting_grids.release(first)
    assert waiting_grids.claim(GPU, second) is None


def test_an_engine_that_nobody_holds_has_no_claim() -> None:
    first, second = Owner(), Owner()
    waiting_grids.claim(GPU, first)
    del first
    gc.collect()
    assert waiting_grids.claim(GPU, second) is None


def ranks(*, is_given: bool = False, pipeline: int = 1) -> Any:
    return SimpleNamespace(is_given=is_given, layout=Layout(tensor=2, pipeline=pipeline))


@pytest.mark.parametrize(
    ("reasons", "tables", "agreed"),
    [
        ((None, None), ("a", "a"), None),
        ((None, "it is shared"), ("a", "a"), "rank 1: it is shared"),
        ((None, None), ("a", "b"), "rank 1 is not like rank 0: ('b',), ('a',)"),
    ],
)
def test_all_ranks_say_the_same(
    reasons: tuple[str | None, ...],
    tables: tuple[str, ...],
    agreed: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gather(said: list[Any], own: Any, group: Any) -> None:
        said[:] = zip(reasons, ((table,) for table in tables), strict=True)
        assert own in said

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    own = ModelParallel.__new__(ModelParallel)
    vars(own).update(layout=Layout(tensor=2), everyone=None)
    for reason, table in zip(reasons, tables, strict=True):
        assert own.agree(reason, table) == agreed


def test_not_with_other_ranks_nor_under_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        assert "other ranks" in str(waiting_grids.claim(GPU, Owner()))
        assert "other ranks" in str(waiting_grids.claim(GPU, Owner(), ranks(is_given=True)))
        assert "stages" in str(waiting_grids.claim(GPU, Owner(), ranks(pipeline=2)))
        assert waiting_grids.claim(GPU, Owner(), ranks()) is None
    monkeypatch.setattr(waiting_grids, "_uses_mps", lambda index: True)
    assert "MPS" in str(waiting_grids.claim(GPU, Owner()))
    assert "no GPU" in str(waiting_grids.claim(torch.device("cpu"), Owner()))


def test_the_batch_of_an_engine_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network is asked for each engine, and its batch knows before anything is captured. What it
    answers is of the kernels that it has when positions are reserved, which may make new ones."""

    class Claiming(HashModel):
        is_reserved = False

        def reserve_positions(self, length: int) -> None:
            self.is_reserved = True

        def claim_waiting_grids(self, owner: object) -> bool:
            assert self.is_reserved
            self.is_reserved = False
            return waiting_grids.claim(GPU, owner) is None

    config = config_at(0, max_requests=1, block_count=8)

    def opened(network: HashModel, device: Owner) -> Any:
        seen = []
        model = ServedModel(network=network)
        open_runner(
            EngineSpec.of(model, config, "cpu"),
            model,
            torch.device("cpu"),
            given=device,  # type: ignore[arg-type]
            make=lambda _, batch, *__, **___: seen.append(batch.grids_may_wait),  # type: ignore[func-returns-value]
        )
        return seen[0]

    model = Claiming()
    first, second = Owner(), Owner()
    assert opened(model, first) and not opened(model, second)
    waiting_grids.release(first)
    assert opened(model, second)
    assert not opened(HashModel(), Owner())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_that_no_mps_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not waiting_grids._uses_mps(0)
