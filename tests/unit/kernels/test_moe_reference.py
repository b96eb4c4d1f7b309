"""Router and experts in PyTorch: megatron-core's choice, and rows that do not see each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.errors import ConfigError
from megatron_async.kernels.moe import reference
from megatron_async.kernels.moe.reference import NO_EXPERT, Routing, expert_mlp, route
from megatron_async.kernels.moe.settings import ExpertActivation, RouterSettings

from megatron.core.transformer.moe.moe_utils import (  # isort: skip
    topk_routing_with_score_function,
)

EXPERTS, TOP_K, HIDDEN, INNER = 16, 4, 24, 16


def settings(**fields: Any) -> RouterSettings:
    return RouterSettings(num_experts=EXPERTS, top_k=TOP_K, **fields)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        (
            {"pre_softmax": True, "scaling_factor": 2.5},
            {"use_pre_softmax": True, "scaling_factor": 2.5},
        ),
        (
            {"score_function": "sigmoid", "normalize": True},
            {"score_function": "sigmoid", "expert_bias": True},
        ),
        (
            {"score_function": "sigmoid", "normalize": True, "num_groups": 4, "kept_groups": 2,
             "group_score_experts": 2},
            {"score_function": "sigmoid", "expert_bias": True, "num_groups": 4, "group_topk": 2},
        ),
    ],
)  # fmt: skip
def test_routing_is_that_of_megatron(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    logits, bias = torch.randn(33, EXPERTS), torch.randn(EXPERTS)
    theirs = theirs | ({"expert_bias": bias} if "expert_bias" in theirs else {})
    found = route(logits, settings(**ours), expert_bias=theirs.get("expert_bias"))
    weights, chosen = topk_routing_with_score_function(logits, TOP_K, **theirs)
    dense = torch.zeros_like(logits).scatter(1, found.ids.long(), found.weights)
    torch.testing.assert_close(dense, weights)
    assert torch.equal(dense != 0, chosen)
    plain = route(logits, settings(**ours))
    assert ("expert_bias" in theirs) == (not torch.equal(plain.ids, found.ids))


def test_of_equal_scores_the_first_expert_is_chosen_and_dead_rows_have_none() -> None:
    logits = torch.zeros(3, EXPERTS)
    logits[1, 9] = 1.0
    found = route(logits, settings(), live=torch.tensor([True, True, False]))
    assert found.ids.tolist() == [[0, 1, 2, 3], [9, 0, 1, 2], [NO_EXPERT] * 4]
    assert found.weights[2].tolist() == [0.0] * 4 and found.ids.dtype == torch.int32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "activation",
    [
        ExpertActivation(),
        ExpertActivation(function="squared_relu", gated=False),
        ExpertActivation(function="quick_gelu", limit=1.0, offset=1.0),
    ],
)
def test_a_rows_experts_do_not_depend_on_the_other_rows(
    dtype: torch.dtype, activation: ExpertActivation
) -> None:
    first = 2 * INNER if activation.gated else INNER
    w1 = (torch.randn(EXPERTS, first, HIDDEN) / 5).to(dtype)
    w2 = (torch.randn(EXPERTS, HIDDEN, INNER) / 4).to(dtype)
    b1, b2 = torch.randn(EXPERTS, first).to(dtype), torch.randn(EXPERTS, HIDDEN).to(dtype)
    hidden, live = torch.randn(33, HIDDEN).to(dtype), torch.rand(33) > 0.3
    found = route(torch.randn(33, EXPERTS), settings(), live=live)
    together = expert_mlp(hidden, found, w1, w2, activation, b1=b1, b2=b2)
    assert not together[~live].any() and together[live].any(1).all()
    for rows in (slice(0, 1), slice(5, 8), slice(13, 33)):
        routing = Routing(found.ids[rows], found.weights[rows])
        alone = expert_mlp(hidden[rows], routing, w1, w2, activation, b1=b1, b2=b2)
        assert torch.equal(alone, together[rows])
    arguments = hidden, found.ids, w1, w2, activation, b1, b2
    for_all, grouped = reference._all_experts(*arguments), reference._in_groups(*arguments)
    one_by_one = reference._one_expert_after_another(*arguments)
    assert torch.equal(for_all[live], one_by_one[live])
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(grouped[live], one_by_one[live], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"top_k": 17}, "top_k=17"),
        ({"score_function": "relu"}, "score_function='relu'"),
        ({"num_groups": 3}, "num_groups=3"),
        ({"kept_groups": 2}, "kept_groups=2"),
        ({"num_groups": 8, "kept_groups": 1}, "top_k=4"),
        ({"group_score_experts": 17}, "group_score_experts=17"),
    ],
)
def test_settings_that_do_not_fit_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RouterSettings(**{"num_experts": EXPERTS, "top_k": TOP_K} | fields)
    with pytest.raises(ConfigError, match="'swish'"):
        ExpertActivation(function="swish")
    with pytest.raises(ConfigError, match="offset"):
        ExpertActivation(gated=False, offset=1.0)
