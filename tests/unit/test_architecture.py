"""The modules and the arrows between them; who holds what."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_async"

TORCHLESS = (
    "megatron_async.scheduler.scheduler",
    "megatron_async.cache.block_allocator",
    "megatron_async.cache.retire_queue",
    "megatron_async.step.plan",
    "megatron_async.step.records",
    "megatron_async.step.extras",
    "megatron_async.step.slot_fields",
    "megatron_async.grammar.spec",
    "megatron_async.config.engine_config",
    "megatron_async.request.request",
    "megatron_async.sampling_params",
)


def test_decisions_import_no_torch() -> None:
    code = (
        "import importlib, sys\n"
        f"for module in {TORCHLESS}:\n"
        "    importlib.import_module(module)\n"
        "    bad = [m for m in ('torch', 'megatron', 'triton', 'numpy') if m in sys.modules]\n"
        "    assert not bad, (module, bad)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=PATIENCE_SECONDS)


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports anywhere in it."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


# Who may not import whom: arrows point from the engine down to caches, devices and kernels.
ABOVE_STEP = tuple(
    f"megatron_async.{name}" for name in ("engine", "scheduler", "runner", "kernels", "device")
)
COMMANDS = tuple(f"megatron_async.{name}" for name in ("cli", "verify", "trace", "benchmark"))
FORBIDDEN = {
    "step": (*ABOVE_STEP, "torch", "time", "random", "threading"),
    "runner": (
        "megatron_async.engine",
        "megatron_async.scheduler",
        "megatron_async.drafting",
        "megatron_async.ranks",
    ),
    "scheduler": ("torch", "numpy", "time", "random", "threading"),
    "cache": ("torch", "numpy", "time", "random", "threading"),
    "grammar": (*ABOVE_STEP, "torch"),
    "kernels": ("megatron_async.engine", "megatron_async.scheduler", "megatron_async.runner"),
    "device": ("megatron_async.engine", "megatron_async.scheduler", "megatron_async.runner"),
    "drafting": ("megatron_async.engine", "megatron_async.scheduler"),
    "graph_audit": (
        *(name for name in ABOVE_STEP if name.rpartition(".")[2] not in ("device", "kernels")),
        "megatron_async.drafting",
        "megatron_async.models",
        "megatron_async.ranks",
        "megatron_async.weights",
    ),
    "ranks": ("megatron_async.engine", "megatron_async.scheduler", "megatron_async.drafting"),
    "models": ("megatron_async.engine", "megatron_async.scheduler", "megatron_async.runner"),
    "sampling": (
        "megatron_async.kernels",
        "megatron_async.engine",
        "megatron_async.scheduler",
        "megatron_async.runner",
    ),
    "engine": (
        "megatron_async.serving",
        "megatron_async.perfetto",
        "megatron_async.megatron_api",
    ),
    "build": (
        "megatron_async.serving",
        "megatron_async.perfetto",
        "megatron_async.megatron_api",
        *COMMANDS,
        "tests",
    ),
    "megatron_api": ("megatron_async.serving", *COMMANDS, "tests"),
    "serving": (
        "megatron_async.megatron_api",
        "megatron_async.replicas",
        *COMMANDS,
        "tests",
    ),
    "processes": (
        *ABOVE_STEP,
        "megatron_async.serving",
        "megatron_async.ranks",
        "megatron_async.replicas",
        "torch",
    ),
    "replicas": ("megatron_async.megatron_api", *COMMANDS, "tests"),
    "weights": (
        "megatron_async.drafting",
        "megatron_async.engine",
        "megatron_async.ranks",
        "megatron_async.runner",
        "megatron_async.scheduler",
        "megatron_async.serving",
    ),
    "training": (
        "megatron_async.drafting",
        "megatron_async.engine",
        "megatron_async.ranks",
        "megatron_async.scheduler",
        "megatron_async.serving",
    ),
    "checkpoint": ("megatron_async.weights.place", "megatron_async.weights.swap"),
    "perfetto": (*COMMANDS, "megatron_async.serving"),
    ".": (*COMMANDS, "tests"),
}

WITH_RAY = {f"megatron_async/replicas/{name}.py" for name in ("ray_serve", "ray_cluster")}
WITH_RAY |= {"megatron_async/contrib/trainers/verl.py"}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_arrows_point_one_way(folder: str) -> None:
    files = sorted((PACKAGE / folder).glob("*.py" if folder == "." else "**/*.py"))
    assert files
    for path in files:
        if path.name == "__main__.py":
            continue
        for name in imports_of(path):
            for forbidden in FORBIDDEN[folder]:
                assert name != forbidden and not name.startswith(forbidden + "."), (
                    f"{path.relative_to(ROOT)} imports {name}"
                )


def test_ray_is_imported_in_few_files() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(ROOT).as_posix() not in WITH_RAY:
            assert not [n for n in imports_of(path) if n.partition(".")[0] == "ray"], path


OUTSIDE = ("contrib", "integrations")
"""Folders for users of other libraries; the second one is the former address of the first."""


def test_nothing_imports_what_stands_outside() -> None:
    for path in PACKAGE.rglob("*.py"):
        if not set(path.relative_to(ROOT).parts) & set(OUTSIDE):
            modules = (f"megatron_async.{name}" for name in OUTSIDE)
            assert not [n for n in imports_of(path) if n.startswith(tuple(modules))], path


def test_stopping_and_captured_steps_import_none_of_our_other_modules() -> None:
    own = "megatron_async.contrib.transformers."
    for folder in ("stopping", "captured"):
        files = sorted((PACKAGE / "contrib" / "transformers" / folder).glob("*.py"))
        assert 3 < len(files) <= 14
        for path in files:
            ours = {n for n in imports_of(path) if n.startswith("megatron_async")}
            assert {n for n in ours if not n.startswith((own + "stopping.", own + folder))} == set()


@pytest.mark.slow
def test_asynchronous_stopping_needs_torch_and_transformers_alone() -> None:
    pytest.importorskip("transformers")
    code = (
        "import sys, megatron_async.contrib.transformers as t\n"
        "t.async_generate, t.AsyncStoppingCriteriaList\n"
        "bad = [m for m in ('megatron', 'megatron_async.engine') if m in sys.modules]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=PATIENCE_SECONDS)


def test_no_pickle_is_ever_loaded() -> None:
    """Only the restricted reader of megatron's checkpoints may touch pickle, and torch.load is
    always called with weights_only=True."""
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("torch.load"):
                keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert keywords.get("weights_only") == "True", path
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("pickle.load", "pickle.loads"), path


def test_the_step_loop_fits_on_one_screen() -> None:
    tree = ast.parse((PACKAGE / "engine" / "stepping" / "loop.py").read_text())
    (step,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "step")
    assert step.end_lineno is not None and step.end_lineno - step.lineno < 25


MOST_MODULES = 163
"""Of ours, that a dense model on a CPU imports with its engine; folders whose ``__init__`` holds a
docstring alone are none. 160 before weights and caches could be e4m3."""
UNWANTED = (
    "kernels.compile", "kernels.gemm", "kernels.mamba", "kernels.moe", "kernels.ranks", "grammar",
    "models.adapt", "models.mamba.mixer", "models.moe", "models.layers.latent_attention",
    "models.fused.coverage", "graph_audit", "drafting.mtp", "drafting.ngram", "drafting.model",
    "ranks.group", "ranks.messages", "checkpoint.families", "checkpoint.huggingface",
    "checkpoint.megatron.distributed", "contrib", "serving",
)  # fmt: skip
"""What a model or a configuration has to ask for."""


@pytest.mark.slow
def test_a_dense_model_imports_what_it_needs() -> None:
    code = (
        "import sys\n"
        "from megatron_async.config.engine_config import EngineConfig\n"
        "from megatron_async import DynamicInferenceEngine\n"
        "config = EngineConfig(device='cpu', max_requests=2, block_count=20)\n"
        "with DynamicInferenceEngine.from_pretrained('tiny', config) as engine:\n"
        "    engine.generate([[5, 6]])\n"
        "of_ours = {n: m for n, m in sys.modules.items() if n.startswith('megatron_async')}\n"
        "print(*(n for n, m in of_ours.items() if open(m.__file__).read().count('\\n') > 3))\n"
    )
    command = [sys.executable, "-c", code]
    out = subprocess.run(
        command, check=True, cwd=ROOT, timeout=PATIENCE_SECONDS, capture_output=True, text=True
    ).stdout
    modules = out.splitlines()[-1].split()
    unwanted = tuple(f"megatron_async.{name}" for name in UNWANTED)
    assert [
        m for m in modules if m in unwanted or m.startswith(tuple(f"{u}." for u in unwanted))
    ] == []
    assert len(modules) <= MOST_MODULES, len(modules)


# Objects of others, which have no protocol of ours, and what they may lack.
ASKED_OF_OTHERS = {
    ("runner/memory/cache_scales.py", "stored_cache_scales"),
    ("checkpoint/megatron/distributed.py", "model_config"),
    ("contrib/transformers/stopping/model_calls.py", "_cache"),
    ("megatron_api/engine_config.py", "config"),
    ("megatron_api/llm.py", "decoder"),
    ("megatron_api/llm.py", "max_sequence_length"),
    ("megatron_compat/specs.py", "mtp_process"),
    ("models/adapt.py", "mtp_process"),
    ("checkpoint/targets.py", "config"),
    ("weights/targets.py", "huggingface_names"),
}
WITH_PROTOCOLS = {
    "model", "network", "wrapper", "context", "batch", "controller", "draft_model", "device",
    "command",
}  # fmt: skip


def test_models_and_batches_have_what_their_protocols_say() -> None:
    """Nobody asks whether a network, a forward's batch, a device or a command has a name:
    ``models/network.py``, ``models/batch.py``, ``device/protocol.py``, ``engine/commands.py``
    say what they have."""
    asked = set()
    for path in PACKAGE.rglob("*.py"):
        for node in nodes_of(path):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "getattr":
                continue
            of, name = node.args[0], node.args[1]
            if ast.unparse(of).split(".")[-1].lstrip("_") in WITH_PROTOCOLS and len(node.args) > 2:
                assert isinstance(name, ast.Constant)
                asked.add((path.relative_to(PACKAGE).as_posix(), name.value))
    assert asked == ASKED_OF_OTHERS


# --- parts ------------------------------------------------------------------------------------


def test_engine_and_scheduler_inherit_nothing() -> None:
    from megatron_async.engine.engine import DynamicInferenceEngine
    from megatron_async.scheduler.scheduler import Scheduler

    assert DynamicInferenceEngine.__bases__ == (object,)
    assert Scheduler.__bases__ == (object,)


FILES = sorted(PACKAGE.rglob("*.py"))

# What a named tuple has by its language's documentation.
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_field_defaults", "_make"}

# Names of the standard library's, torch's, transformers', megatron-core's and verl's objects that
# look private, for which they have no others.
OF_OTHERS = {
    "_ROLLOUT_REGISTRY",
    "_beam_search",
    "_attn_implementation",
    "_buffers",
    "_cdata",
    "_exit",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_get_backend",
    "_get_initial_cache_position",
    "_getframe",
    "_optimize_model_for_decode",
    "_pad_token_tensor",
    "_parameters",
    "_prefill",
    "_prefill_chunking",
    "_proj_and_transformer_layer",
    "_replace_state_dict_keys_with_sharded_keys",
    "_sample",
    "_scaled_mm",
    "_update_model_kwargs_for_generation",
    "_valid_auto_compile_criteria",
    "_world",
}

# Set to keep what it refers to alive, and for nothing else.
KEPT_ALIVE = {("engine/engine.py", "_stops_with_its_ranks"), ("kernels/compile.py", "_module")}

# Read by the class of another library that the file's class is one of.
READ_BY_OTHERS = {
    ("contrib/trainers/verl.py", name) for name in ("_server_address", "_server_handle")
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_attributes(path: Path) -> list[tuple[ast.Attribute, str]]:
    """Each access of an attribute ``_x`` in a file, and the expression it is an attribute of."""
    return [
        (node, ast.unparse(node.value))
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and is_private(node.attr)
    ]


def private_accesses(path: Path) -> list[str]:
    """Where a file touches a private attribute of another object."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {of}.{node.attr}"
        for node, of in private_attributes(path)
        if of not in ("self", "cls", "super()") and node.attr not in OF_NAMED_TUPLES | OF_OTHERS
    ]


def unread_attributes(path: Path) -> set[str]:
    """Attributes ``self._x`` that a file sets and never reads."""
    accesses = private_attributes(path)
    stored = {n.attr for n, of in accesses if of == "self" and isinstance(n.ctx, ast.Store)}
    read = {node.attr for node, _ in accesses if isinstance(node.ctx, ast.Load)}
    kept = {name for file, name in KEPT_ALIVE | READ_BY_OTHERS if path == PACKAGE / file}
    return stored - read - kept


def test_no_object_touches_the_private_attributes_of_another() -> None:
    assert [access for path in FILES for access in private_accesses(path)] == []


def test_no_attribute_is_made_in_one_file_and_used_only_in_another() -> None:
    unread = {str(path.relative_to(ROOT)): unread_attributes(path) for path in FILES}
    assert {path: names for path, names in unread.items() if names} == {}


def test_the_checks_of_private_attributes_see_both_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "class A:\n"
        "    def __init__(self, other):\n"
        "        self._made = self._used = other._part\n"
        "        other._replace(x=other.parts[0]._deep)\n"
        "    def f(self):\n"
        "        return self._used\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    accesses = ["bad.py:3: other._part", "bad.py:4: other.parts[0]._deep"]
    assert sorted(private_accesses(bad)) == accesses
    assert unread_attributes(bad) == {"_made"}


def test_every_allowed_private_name_is_in_use() -> None:
    used = {node.attr for path in FILES for node, _ in private_attributes(path)}
    assert used >= OF_OTHERS
    for file, name in KEPT_ALIVE:
        assert name in {node.attr for node, _ in private_attributes(PACKAGE / file)}
