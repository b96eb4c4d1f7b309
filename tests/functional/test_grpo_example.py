"""The example of reinforcement learning, in short."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo.py"


@pytest.fixture(scope="module")
def grpo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_example", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_rewards_are_for_python_that_ends_and_is_long_enough(grpo: ModuleType) -> None:
    prompt, whole = "def f(x):\n", "    return " + "x + " * 20 + "x"
    assert grpo.reward_of(prompt, whole, ended=True) == 1.0
    assert grpo.reward_of(prompt, whole, ended=False) == 0.0
    assert grpo.reward_of(prompt, "    return (", ended=True) == 0.0
    assert 0.0 < grpo.reward_of(prompt, "    pass", ended=True) < 0.2


def test_advantages_are_of_a_group(grpo: ModuleType) -> None:
    found = grpo.advantages_of(torch.tensor([[0.0, 1.0], [1.0, 1.0]]))
    assert found[0] < 0 < found[1] and found[2:].tolist() == [0.0, 0.0]


def test_a_short_run_trains_over_its_own_log_probs(
    grpo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    files = ["--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.png")]
    sizes = ["--updates", "3", "--prompts", "2", "--group", "2", "--tokens", "12"]
    try:
        updates = grpo.main([*sizes, *files])
    finally:
        torch.set_num_threads(threads)
    assert len(updates) == 3 and all(0 < update.tokens <= 48 for update in updates)
    # Nothing is older than it may be, and the first batch is of the trainer's own weights.
    assert not any(update.too_old for update in updates)
    assert abs(updates[0].ratio_error) < 1e-3
    written = json.loads((tmp_path / "run.json").read_text())
    assert [update["tokens"] for update in written] == [update.tokens for update in updates]
    assert (tmp_path / "run.png").stat().st_size > 1000
    assert "the engine waited" in capsys.readouterr().out


@pytest.mark.slow
def test_with_exact_numerics_the_kl_error_is_zero(
    grpo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over 20 updates of all weights; without them it is not, in some of the first two."""
    threads = torch.get_num_threads()
    sizes = ["--prompts", "1", "--group", "2", "--tokens", "8", "--staleness", "0"]
    try:
        updates = grpo.main([*sizes, "--updates", "20", "--exact"])
        assert capsys.readouterr().out.endswith("KL error: 0.0 at most\n")
        ordinary = grpo.main([*sizes, "--updates", "2"])
    finally:
        torch.set_num_threads(threads)
    assert [update.kl_error for update in updates] == [0.0] * 20
    assert any(update.kl_error for update in ordinary)


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own_has_the_trainers_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each update changes them, and each batch is sampled with those of the update before."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    apart = importlib.import_module("grpo_apart")
    monkeypatch.setattr(apart, "reward_of", lambda prompt, text, *, ended: len(set(text)) / 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    sizes = ["--prompts", "1", "--group", "2", "--tokens", "8", "--updates", "3"]
    try:
        assert apart.main([*sizes, "--in-turns"]) == [0.0] * 3
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out.endswith("KL error: 0.0 at most\n")
