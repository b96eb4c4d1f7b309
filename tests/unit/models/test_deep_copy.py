"""A copy of a model, as a trainer's reference policy: weights of its own, and the same groups."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megatron_async import megatron_compat as compat
from megatron_async.checkpoint import load_pretrained
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.models.adapt import adapt_model
from megatron_async.models.build import build_model
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.quantized import feeds
from megatron_async.models.quantized.linear import HAS_TRITON, quantized
from megatron_async.models.served import ServedModel
from tests.support.audited import DENSE, EXPERTS, MODELS, audited_engine, model_of, tokens
from tests.support.child_environment import child_environment
from tests.support.engines import config_at
from tests.support.programs import run_program
from tests.support.stock_hybrid import EXPERTS as HYBRID_EXPERTS
from tests.support.stock_hybrid import stock_hybrid
from tests.support.stock_model import stock_model
from tests.unit.models import test_moe
from tests.unit.models.test_adapted_hybrid import no_generator  # noqa: F401

KINDS = {
    **MODELS,
    "tied": replace(DENSE, tie_word_embeddings=True),
    "sigmoid": replace(
        DENSE, **EXPERTS, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True
    ),
}  # fmt: skip
IDS = torch.arange(24)[None]


def built(name: str) -> Any:
    torch.manual_seed(3)
    return build_model(KINDS[name], device="cpu", dtype=torch.float32)


def tensors_of(module: Module) -> Iterator[Tensor]:
    """All that a model has, also what is neither a parameter nor a buffer."""
    seen: set[int] = set()

    def look(value: Any) -> Iterator[Tensor]:
        if id(value) in seen or isinstance(value, type):
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
            yield from look(vars(value))
        elif isinstance(value, dict):
            for each in value.values():
                yield from look(each)
        elif isinstance(value, list | tuple | set | frozenset):
            for each in value:
                yield from look(each)
        elif not isinstance(value, dist.ProcessGroup) and hasattr(value, "__dict__"):
            yield from look(vars(value))

    yield from look(module)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS, IDS, None)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_copy_has_the_same_values_in_memory_of_its_own(name: str) -> None:
    model = built(name)
    before = logits(model)
    other = copy.deepcopy(model)
    assert type(other) is type(model) and other.training == model.training
    assert logits(other).equal(before)
    own, theirs = ({t.untyped_storage().data_ptr() for t in tensors_of(m)} for m in (model, other))
    assert len(own) > 10 and not (own & theirs) - {0}
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert vars(one) == vars(two) and one.requires_grad == two.requires_grad
    groups = [m.pg_collection.tp for m in (model, other)]
    assert groups[0] is groups[1] and isinstance(groups[0], dist.ProcessGroup)


@pytest.mark.parametrize("name", KINDS)
def test_the_policy_trains_and_its_reference_stays(name: str) -> None:
    policy = built(name)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    before = logits(reference)
    policy(IDS, IDS, None).logsumexp(-1).sum().backward()
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad.sign()
    assert logits(reference).equal(before) and not logits(policy).equal(before)
    assert all(parameter.grad is None for parameter in reference.parameters())
    fresh = built(name).eval().requires_grad_(False)
    state = {n: x for n, x in policy.state_dict().items() if isinstance(x, Tensor)}
    for model in (reference, fresh):
        model.load_state_dict(state, strict=False)
    assert logits(reference).equal(logits(fresh)), "something is computed from the other's weights"


@pytest.mark.parametrize("name", MODELS)
def test_an_engine_of_its_own_serves_a_copy(name: str) -> None:
    """Of a model that an engine serves, which gets new weights and sleeps."""
    with audited_engine(name) as engine:
        first = tokens(engine)
        reference = copy.deepcopy(model_of(engine))
        served = ServedModel(network=GPTNetwork(reference))
        config = config_at(
            1, max_requests=2, block_count=20, block_size_tokens=16, max_sequence_length=64,
            audit_graphs=True, num_speculative_tokens=1 if name == "MTP" else 0,
        )  # fmt: skip
        with DynamicInferenceEngine(served, config) as other:
            assert tokens(other) == first
            new = {n: x.roll(1, 0) for n, x in model_of(engine).named_parameters()}
            engine.update_weights(new)
            changed = tokens(engine)
            assert changed != first and tokens(other) == first
            engine.sleep(2)
            assert tokens(other) == first
            other.update_weights(new)
            assert tokens(other) == changed


GIVEN = {
    "dense": lambda: stock_model(hidden_dropout=0.0, attention_dropout=0.0),
    "experts": lambda: test_moe.stock_model(test_moe.CONFIG),
    "hybrid": lambda: stock_hybrid("ME*-M", **HYBRID_EXPERTS),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_model_of_a_users_that_was_adapted_has_copies(
    name: str,
    no_generator: None,  # noqa: F811
) -> None:
    compat.ensure_parallel_state()
    model = adapt_model(GIVEN[name]().eval())
    before, other = logits(model), copy.deepcopy(model)
    assert type(other) is type(model) and logits(other).equal(before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert logits(other).equal(before) and not logits(model).equal(before)
    other.load_state_dict(model.state_dict())
    assert logits(other).equal(logits(model)), "experts are not computed from their parameters"


@pytest.mark.parametrize("quantize_activations", (False, True))
@pytest.mark.parametrize("name", ("tiny", "tiny-moe"))
def test_a_copy_keeps_e4m3(name: str, quantize_activations: bool) -> None:
    """Its norms quantize for layers of its own, where norms do (on a GPU)."""
    model = load_pretrained(
        name, quantization="fp8", quantize_activations=quantize_activations
    ).model
    if HAS_TRITON:
        feeds.link(model)
    before, other = logits(model), copy.deepcopy(model)
    assert quantized(other).keys() == quantized(model).keys() != set()
    for layer in quantized(model).values():
        layer.weight_scale.mul_(2)
    assert logits(other).equal(before) and not logits(model).equal(before)
    norms = [each for each in other.modules() if feeds.FEEDS in vars(each)]
    inside = set(map(id, other.modules()))
    assert all(id(vars(each)[feeds.FEEDS]) in inside for each in norms)
    assert bool(norms) == (quantize_activations and HAS_TRITON)


PROGRAM = """
import copy, sys, torch, torch.distributed as dist

dist.init_process_group(
    "gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1
)  # the user's own
from megatron_async import megatron_compat as compat
from megatron_async.checkpoint import load_pretrained

model = load_pretrained("tiny").model
other = copy.deepcopy(model)
ids = torch.arange(9)[None]
assert other(ids, ids, None).equal(model(ids, ids, None))
assert other.pg_collection.tp is model.pg_collection.tp
assert dist.get_backend(model.pg_collection.tp) == "gloo"
"""


def test_groups_of_any_backend_are_shared(tmp_path: Path) -> None:
    """As where an RL library has initialised torch.distributed."""
    run_program(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "store")],
        env=child_environment(OMP_NUM_THREADS="1"),
        check=True,
    )
