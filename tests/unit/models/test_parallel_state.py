"""What megatron-core is given at its import, and its parallel state from the environment."""

from __future__ import annotations

import sys
from types import FunctionType

import pytest
import torch

from megatron_async import megatron_compat as compat
from megatron_async.errors import ConfigError


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"WORLD_SIZE": "2"}, "RANK expected"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR expected"),
        ({"WORLD_SIZE": "2", "RANK": "first"}, "'first'"),
        ({"WORLD_SIZE": "x"}, "invalid literal"),
    ],
)
def test_part_of_the_environment_of_a_launcher_says_what_to_unset(
    environment: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # As in a process without a group, which this one may have by now.
    monkeypatch.setattr(compat.dist, "is_initialized", lambda: False)
    rendezvous = torch.distributed.rendezvous
    monkeypatch.setattr(compat.dist, "init_process_group", lambda _: next(rendezvous("env://")))
    with pytest.raises(ConfigError, match=f"WORLD_SIZE=.*{reason}.*: unset it for one process"):
        compat.ensure_parallel_state()


def test_no_function_of_megatron_waits_for_a_compiler() -> None:
    """Its fuser is ``torch.compile``, which takes seconds for each new shape."""
    modules = {n: m for n, m in sys.modules.items() if n.startswith("megatron.core")}
    assert "megatron.core.fusions.fused_bias_swiglu" in modules
    compiled = [
        f"{name}.{key}"
        for name, module in modules.items()
        for key, value in vars(module).items()
        if isinstance(value, FunctionType) and hasattr(value, "_torchdynamo_orig_callable")
    ]
    assert compiled == [] and torch.compile.__module__ == "torch"
