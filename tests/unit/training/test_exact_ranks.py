"""Two tensor-parallel ranks of a trainer have the values of two ranks of an engine."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_async import megatron_compat as compat
from megatron_async.checkpoint.load import load_pretrained
from megatron_async.errors import ConfigError
from megatron_async.models.build import build_random_model
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.moe.adapt import AdaptedMoELayer, MegatronMoELayer
from megatron_async.models.moe.layer import MoELayer
from megatron_async.models.moe.trainer_ranks import TrainerRanks, ranks_of, with_gradients
from megatron_async.models.parallel import ModelParallel
from megatron_async.models.sequence_parallel import without_sequence_parallel
from megatron_async.ranks.layout import Layout
from megatron_async.training import whole_sequences
from megatron_async.weights.parallel_layouts import shard_of
from tests.support.batches import new_batch
from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS
from tests.support.two_gpus import both_gpus
from tests.unit.models import test_moe

from megatron.core import parallel_state  # isort: skip

__all__ = ["both_gpus"]

ROOT = Path(__file__).parents[3]
RANKS = 2
SIZES = ("model", "tensor")
Found = dict[str, Any]


def found_by_ranks(folder: Path, *arguments: str, **environment: str) -> list[Found]:
    """What each rank of the trainer found, see ``tests/support/exact_ranks.py``."""
    subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.support.exact_ranks",
            str(folder),
            *arguments,
        ],
        env=child_environment(**environment),
        cwd=ROOT,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def check(found: list[Found], depths: tuple[int, ...]) -> None:
    """Each token has the log-probability that it was sampled with, before and after new weights;
    without exact numerics some have others."""
    for of_rank in found:
        assert list(of_rank) == [str(depth) for depth in depths]
        for depth, at_depth in of_rank.items():
            counters = at_depth.pop("counters")
            assert counters["evictions"] and counters["tokens_cached"]
            assert counters["tokens_accepted"]
            assert (counters["tokens_discarded"] > 0) <= (depth != "0")
            assert sum(each["tokens"] for each in at_depth.values()) == 120
            for weights, each in at_depth.items():
                assert each["tokens"] > 20 and each["plain"] > 0
                assert each["exact"] == 0, (depth, weights, each)
                share, whole = each["columns"]  # a rank has its share of the columns
                assert share * RANKS == whole and "one rank's share" in each["share"]


@pytest.mark.slow
@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("model", ("dense", "experts"))
def test_two_ranks_have_the_log_probs_and_gradients_of_two_ranks(
    model: str, tmp_path: Path
) -> None:
    """In float32: bfloat16 hides what differs by a little. Gradients are those of one rank."""
    check(found_by_ranks(tmp_path, model, "float32", "2", OMP_NUM_THREADS="1"), (2,))
    rolled = torch.load(tmp_path / "rollouts.pt", weights_only=True)[2]
    tokens = rolled["batch"]["tokens"]
    whole = load_pretrained(tmp_path / "old", dtype=torch.float32).model.train()
    whole.requires_grad_(True)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    whole(tokens, positions, None, labels=tokens.roll(-1, dims=1)).sum().backward()
    expected = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    for rank in range(RANKS):
        gradients = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            share = shard_of(name, gradient, rank, RANKS, gated=True)
            close = 1e-4 * float(gradient.abs().max())
            torch.testing.assert_close(gradients[name], share, rtol=1e-3, atol=close, msg=name)


def check_own(folder: Path, **environment: str) -> None:
    """Ranks of a megatron-core trainer that are the engine's, see
    ``tests/support/exact_own_ranks.py``."""
    program = [sys.executable, "-W", "ignore", "-m", "tests.support.exact_own_ranks", str(folder)]
    subprocess.run(
        program, env=child_environment(**environment), cwd=ROOT, check=True,
        timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert list(ranks[0]) == ["dense", "experts"]
    for model, found in ranks[0].items():
        errors, other = (of_rank[model].pop("gradients") for of_rank in ranks)
        assert any("router" in name for name in errors) == (model == "experts")
        assert max(*errors.values(), *other.values()) < 1e-4  # beside those of one rank
        assert found == ranks[1][model] and list(found) == ["float32", "bfloat16"]
        for first, second in found.values():
            assert first["tokens"] == second["tokens"] == 80 and first["sum"] != second["sum"]
            assert first["exact"] == second["exact"] == 0
            assert first["plain"] and second["plain"]
            assert 0 < first["accepted"] < second["accepted"]


@pytest.mark.slow
def test_ranks_of_megatrons_trainer_have_the_log_probs_of_their_own_engine(tmp_path: Path) -> None:
    """With drafts, before and after a step of the optimizer; an engine's ranks have a share of the
    logits each, which was refused. Gradients are those of one rank, with experts that are forced
    too. Layers of experts are megatron-core's, over sequences that the ranks divide."""
    check_own(tmp_path, OMP_NUM_THREADS="1")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("model", ("dense", "experts"))
def test_two_gpus_have_the_log_probs_of_two_gpus(
    model: str, dtype: str, tmp_path: Path, both_gpus: None
) -> None:
    """In captured graphs."""
    depths = (0, 1, 2, 4)
    found = found_by_ranks(
        tmp_path, model, dtype, *map(str, depths), RANKED_DEVICE="cuda",
        PYTORCH_NVML_BASED_CUDA_CHECK="1",
    )  # fmt: skip
    check(found, depths)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_of_megatrons_trainer_have_those_of_their_own_engine(
    tmp_path: Path, both_gpus: None
) -> None:
    check_own(tmp_path, RANKED_DEVICE="cuda", PYTORCH_NVML_BASED_CUDA_CHECK="1")


def test_experts_that_are_spread_over_ranks_are_not_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank computed its own experts for its own tokens, and nobody said so."""
    model = load_pretrained("tiny-moe").model
    layer = next(module for module in model.modules() if isinstance(module, MoELayer))
    layer.ranks = ranks_of(SimpleNamespace(**{f"expert_{of}_parallel_size": 2 for of in SIZES}))
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: 2)
    tokens = torch.arange(5)[None]
    with pytest.raises(ConfigError, match="train without expert_model_parallel_size"):
        model(tokens, tokens, None)


def test_a_bias_that_the_first_rank_adds_has_its_gradient_on_all() -> None:
    """Each has a copy of it, and the others' stayed as it was."""

    class Second(TrainerRanks):
        expert_rank, expert_tensor_rank = 0, 1

        def sum_experts_(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def shared(self, hidden: torch.Tensor, routing: Any) -> Any:
            return hidden, routing

    config = dataclasses.replace(test_moe.CONFIG, mlp_bias=True, num_layers=1, moe_layer_freq=None)
    config = dataclasses.replace(
        config, moe_shared_expert_intermediate_size=None, moe_shared_expert_gate=False
    )
    model = build_random_model(config, device=torch.device("cpu"), dtype=torch.float32)
    layer = next(module for module in model.modules() if isinstance(module, MoELayer))
    bias, hidden, found = layer.experts.linear_fc2.bias.requires_grad_(True), torch.randn(5, 64), []
    with torch.no_grad():
        bias.fill_(3)
    for layer.ranks in (None, Second()):
        output = layer(hidden[:, None])[0]
        (gradient,) = torch.autograd.grad(output.sum(), bias)
        found.append((output.detach(), gradient))
    (whole, expected), (part, gradient) = found
    assert torch.equal(gradient, expected) and gradient.any()
    with torch.no_grad():
        assert torch.equal(layer(hidden[:, None])[0], part) and not torch.equal(part, whole)
        bias.zero_()
        layer.ranks = None
        assert torch.equal(layer(hidden[:, None])[0], part)


def test_an_engines_ranks_add_up_with_gradients_where_they_share_each_expert() -> None:
    ranks = object.__new__(ModelParallel)
    for layout, is_shared in ((Layout(2), True), (Layout(1, 1, 2), False)):
        ranks.layout = layout
        assert isinstance(with_gradients(ranks), TrainerRanks) == is_shared
    assert with_gradients(None) is None


def test_ranks_of_an_engine_keep_the_padding_of_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model's own logits have it: else the last rank's share of them is too short."""
    ranks = SimpleNamespace(layout=Layout(2))
    ranks.gather_logits = lambda logits, count: torch.cat([logits, logits + 1], 1)[:, :count]
    network: Any = SimpleNamespace(parallel=ranks, vocab_size=13, kv_cache_spec=None)
    network.model = SimpleNamespace(decoder=SimpleNamespace(layers=[]))
    monkeypatch.setattr(whole_sequences, "decoder_layers", lambda model: [])
    monkeypatch.setattr(whole_sequences, "batch_of_prompts", lambda *_, **__: None)
    monkeypatch.setattr(whole_sequences, "forward_prompts", lambda *_: torch.zeros(3, 8))
    whole = whole_sequences.WholeSequences(network, max_tokens=8, recurrent_state_dtype=None)
    logits, _ = whole.logits(torch.arange(3), [3])
    assert torch.equal(logits, torch.tensor([0.0, 1.0]).repeat_interleave(8).expand(3, -1))


def test_ranks_that_divide_sequences_evaluate_as_megatrons() -> None:
    """Each has tokens of its own there, and what engines add up is of the same tokens."""
    compat.ensure_parallel_state()
    model = GPTNetwork(test_moe.stock_model(test_moe.CONFIG)).model
    model.config.sequence_parallel = True
    inside = without_sequence_parallel(model)
    layer: Any = next(each for each in model.modules() if isinstance(each, AdaptedMoELayer))
    assert inside is not None and not layer.training
    hidden = torch.randn(5, 1, layer.config.hidden_size)
    with mock.patch.object(MegatronMoELayer, "forward", return_value="megatron's"):
        assert layer(hidden) == "megatron's"
        with inside, torch.no_grad():
            assert layer(hidden)[0].shape == hidden.shape


def test_ranks_that_have_some_experts_each_evaluate_as_megatrons() -> None:
    compat.ensure_parallel_state()
    model = GPTNetwork(test_moe.stock_model(test_moe.CONFIG)).model
    layer: Any = next(each for each in model.modules() if isinstance(each, AdaptedMoELayer))
    assert without_sequence_parallel(model) is None
    layer.has_own_tokens = True  # as with expert_model_parallel_size=2
    inside = without_sequence_parallel(model)
    assert inside is not None
    hidden = torch.randn(5, 1, layer.config.hidden_size)
    with mock.patch.object(MegatronMoELayer, "forward", return_value="megatron's"):
        assert layer(hidden) == "megatron's"
        with inside, torch.no_grad():
            assert layer(hidden)[0].shape == hidden.shape
        assert layer(hidden) == "megatron's"


def test_weights_that_want_gradients_give_the_same_bits() -> None:
    """torch.matmul multiplied each token by itself where they did not, and the shape was another
    than that of a copy: an engine over a trainer's own model had other bits."""
    network = GPTNetwork(load_pretrained("tiny", dtype=torch.float32).model)
    shapes = []
    network.model.decoder.register_forward_pre_hook(
        lambda *given: shapes.append(given[-1]["hidden_states"].stride()), with_kwargs=True
    )
    spec = network.kv_cache_spec
    batch = new_batch(
        params_dtype=spec.dtype, num_layers=spec.num_layers, kv_channels=spec.head_dim,
        num_attention_heads=spec.num_kv_heads, max_sequence_length=64, max_requests=1,
        block_size_tokens=8, block_count=8, device="cpu", batch_invariant=True,
    )  # fmt: skip
    positions = torch.arange(40)
    batch.begin_forward(
        torch.full((40,), batch.null_slot), positions, decode_rows=40, read_lengths=True
    )
    network.forward(positions, positions, batch)
    assert shapes == [(256, 256, 1)]
