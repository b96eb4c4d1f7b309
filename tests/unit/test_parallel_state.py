"""Starting megatron's parallel state from the environment."""

from __future__ import annotations

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
