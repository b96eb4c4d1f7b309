"""A trainer's layers of experts take the experts that a rollout's tokens went to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async import DynamicInferenceEngine, SamplingParams
from megatron_async.errors import ConfigError, RequestError
from megatron_async.models.adapt import adapt_model
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.moe.routed import decoder_layers
from megatron_async.models.served import ServedModel
from megatron_async.request.rollouts import RolloutBatch, batch_of, routed_experts_of
from megatron_async.training import exact_numerics, forced_routing
from megatron_async.training.mirror import mirror
from megatron_async.training.routing import noted_experts
from tests.support.engines import config_at
from tests.unit.training import test_exact_numerics
from tests.unit.training.test_exact_numerics import model_of, trained

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42]]
megatron_trains_on_a_cpu = test_exact_numerics.megatron_trains_on_a_cpu


def rollouts_of(model: Any) -> tuple[RolloutBatch, Tensor]:
    """Of two requests of different lengths, with weights that the trainer will not have."""
    config = config_at(1, return_routed_experts=True, max_requests=2, max_sequence_length=40)
    params = [
        SamplingParams(
            num_tokens_to_generate=count, seed=count, termination_id=-1, return_log_probs=True,
            return_routed_experts=True,
        )
        for count in (9, 4)
    ]  # fmt: skip
    with DynamicInferenceEngine(ServedModel(network=GPTNetwork(mirror(model))), config) as engine:
        rollouts = [r.rollout() for r in engine.generate(PROMPTS, params)]
    return batch_of(rollouts), routed_experts_of(rollouts)


def arguments(tokens: Tensor) -> tuple[Tensor, Tensor, None]:
    return tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None


def changed(model: Any) -> Any:
    """A training step further, which chooses other experts."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router" in name:
                generator = torch.Generator().manual_seed(len(name))
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(noise * parameter.std() * 2)
    return trained(model)


def taken(model: Any, tokens: Tensor) -> Tensor:
    """``[B, S, layers, top_k]`` of a forward of this package's layers."""
    with noted_experts(decoder_layers(model)) as noted:
        model(*arguments(tokens))
    shape = (tokens.shape[1], tokens.shape[0], -1)
    return torch.stack([each.view(shape).transpose(0, 1) for each in noted], dim=2)


@pytest.mark.parametrize("with_gradients", (True, False))
def test_layers_take_the_experts_of_rollouts(with_gradients: bool) -> None:
    """The router chooses for the last token and for padding; gradients go through the router."""
    model = model_of("experts", torch.float32)
    batch, routed = rollouts_of(model)
    assert routed.shape == (*batch.tokens.shape, 2, 2)
    ends = batch.attention_mask.sum(1) - 1
    assert [(row[:, 0, 0] >= 0).sum() for row in routed] == ends.tolist()
    changed(model)
    with torch.set_grad_enabled(with_gradients):
        own = taken(model, batch.tokens)
        with forced_routing(model, routed):
            found = taken(model, batch.tokens)
            logits = model(*arguments(batch.tokens))
        assert torch.equal(taken(model, batch.tokens), own)
    is_known = routed >= 0
    assert torch.equal(found[is_known], routed[is_known].int())
    assert not torch.equal(own[is_known], found[is_known])
    assert bool((found >= 0).all())
    if with_gradients:
        logits.sum().backward()
        for layer in decoder_layers(model):
            assert layer.router.weight.grad.abs().sum() > 0


def test_megatrons_own_layers_take_them(megatron_trains_on_a_cpu: None) -> None:
    """In training and in evaluation, by what its routers ask a replay for; weights of the experts
    are the router's own scores."""
    model = model_of("stock experts", torch.float32)
    batch, routed = rollouts_of(model)
    changed(model)
    maps: list[Tensor] = []
    layers = [m for m in model.modules() if type(m).__name__ == "MoELayer"]
    for layer in layers:
        layer.router.register_forward_hook(lambda _, __, out: maps.append(out[1]) or None)
    for mode in (True, False):
        model.train(mode)
        maps.clear()
        own = model(*arguments(batch.tokens))
        chosen = list(maps)
        maps.clear()
        with forced_routing(model, routed) as forced:
            logits = model(*arguments(batch.tokens))
            forced.close()  # twice is once
        assert len(maps) == routed.shape[2]
        for number, found in enumerate(maps):
            wanted = routed[:, :, number].transpose(0, 1).flatten(0, 1).long()
            known = wanted[:, 0] >= 0
            expected = torch.zeros_like(found).scatter(1, wanted.clamp(min=0), True)
            assert torch.equal(found[known], expected[known])
            assert bool((found.sum(1) == wanted.shape[1]).all())
        assert not all(map(torch.equal, maps, chosen)) and not torch.equal(logits, own)
        assert torch.equal(model(*arguments(batch.tokens)), own)
        logits.sum().backward()
        assert all(layer.router.weight.grad.abs().sum() > 0 for layer in layers)


def test_megatrons_layers_that_an_engine_has_adapted_take_them_too() -> None:
    model = model_of("stock experts", torch.float32)
    batch, routed = rollouts_of(model)
    adapt_model(changed(model)).eval()
    own = taken(model, batch.tokens)
    with forced_routing(model, routed):
        found = taken(model, batch.tokens)
    is_known = routed >= 0
    assert torch.equal(found[is_known], routed[is_known].int())
    assert not torch.equal(own, found) and torch.equal(taken(model, batch.tokens), own)


@pytest.mark.parametrize("name", ("experts", "stock experts"))
def test_recomputed_activations_take_them_too(name: str, megatron_trains_on_a_cpu: None) -> None:
    """The forward that is recomputed has no gradients the first time."""
    found = []
    for granularity in (None, "full"):
        model = model_of(name, torch.float32)
        batch, routed = rollouts_of(model)
        changed(model).config.recompute_granularity = granularity
        model.config.recompute_method, model.config.recompute_num_layers = "uniform", 1
        with forced_routing(model, routed):
            logits = model(*arguments(batch.tokens))
            logits.square().mean().backward()
        found.append((logits, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[0][0], found[1][0])
    for own, recomputed in zip(*(gradients for _, gradients in found), strict=True):
        if own is not None or recomputed is not None:
            torch.testing.assert_close(
                own, recomputed, rtol=1e-4, atol=float(1e-5 * own.abs().max())
            )


def test_the_same_weights_choose_them_anyway() -> None:
    """Forced experts are those that the model would have taken, so nothing changes."""
    model = trained(model_of("experts", torch.float32))
    batch, routed = rollouts_of(model)
    own = model(*arguments(batch.tokens))
    with forced_routing(model, routed):
        assert torch.equal(model(*arguments(batch.tokens)), own)


def test_an_engine_over_the_same_layers_chooses_by_itself() -> None:
    model = model_of("experts", torch.float32)
    wanted, routed = rollouts_of(model)
    with forced_routing(model, (routed + 1) % 4):
        again, found = rollouts_of(model)
    assert torch.equal(again.tokens, wanted.tokens) and torch.equal(found, routed)


def test_what_does_not_suit_is_refused(megatron_trains_on_a_cpu: None) -> None:
    model = trained(model_of("experts", torch.float32))
    ids = torch.zeros(1, 3, 2, 2, dtype=torch.int16)
    for wrong in (ids[0], ids[:, :, :1], ids.float()):
        with pytest.raises(ConfigError, match=r"must be integers \[B, S, 2, 2\]"):
            forced_routing(model, wrong)
    with pytest.raises(ConfigError, match="between 0 and 3"):
        forced_routing(model, ids + 4)
    with pytest.raises(ConfigError, match="no layers of experts"):
        forced_routing(model_of("dense", torch.float32), ids)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with forced_routing(model, ids), exact_numerics(model), pytest.raises(ConfigError, match="one"):
        model(*arguments(tokens))
    with forced_routing(model, ids):
        exact = exact_numerics(model)
    value = model(*arguments(tokens))  # nothing is left of them
    exact.close()
    torch.testing.assert_close(model(*arguments(tokens)), value)
    stock = model_of("stock experts", torch.float32)
    stock.config.moe_router_fusion = True
    with pytest.raises(ConfigError, match="moe_router_fusion=False"):
        forced_routing(stock, ids)


@pytest.mark.parametrize("kind", ("experts", "stock experts"))
def test_no_token_gets_the_experts_of_another(kind: str, megatron_trains_on_a_cpu: None) -> None:
    """Forwards over other batches, also those with as many tokens, or with one, whose experts all
    tokens would take; and a second set of experts."""
    model = trained(model_of(kind, torch.float32))
    batch, routed = rollouts_of(model)
    changed(model)
    tokens = batch.tokens
    own = model(*arguments(tokens))
    with forced_routing(model, routed):
        forced = model(*arguments(tokens))
        for other in (tokens[:1], tokens[:, :-1], tokens.t(), tokens.view(1, -1), tokens[:1, :1]):
            with pytest.raises(ConfigError, match=r"routed_experts are of \[2, 14\]"):
                model(*arguments(other))
        with pytest.raises(ConfigError, match="forced already"):
            forced_routing(model, routed)
        with torch.inference_mode(), pytest.raises(ConfigError, match=r"torch.no_grad\(\)"):
            model(*arguments(tokens))
        with torch.no_grad():
            torch.testing.assert_close(model(*arguments(tokens)), forced)
        assert not torch.equal(forced, own)
    with forced_routing(model, routed[:1, :1]), pytest.raises(ConfigError, match=r"of \[1, 1\]"):
        model(*arguments(tokens))
    assert torch.equal(model(*arguments(tokens)), own)


def test_all_rollouts_of_a_batch_must_have_them() -> None:
    model = model_of("experts", torch.float32)
    config = config_at(1, return_routed_experts=True, max_requests=2, max_sequence_length=40)
    params = SamplingParams(
        num_tokens_to_generate=2, return_log_probs=True, return_routed_experts=True
    )
    with DynamicInferenceEngine(ServedModel(network=GPTNetwork(model)), config) as engine:
        aborted = engine.add_request(9, [1, 2, 3], params)
        engine.abort_request(9)
        (one,) = engine.generate([[1, 2]], params)
        without = aborted.result(0).rollout()  # it ended before a forward was over it
    routed = routed_experts_of([without, one.rollout()])
    assert bool((routed[0] == -1).all()) and routed.shape[:2] == (2, 4)
    assert torch.equal(routed[1, :3], torch.from_numpy(one.routed_experts))
    other = dataclasses.replace(one.rollout(), routed_experts=None)
    for some in ([], [without], [one.rollout(), other]):
        with pytest.raises(RequestError, match="return_routed_experts=True"):
            routed_experts_of(some)
