"""The experts that tokens went to leave the engine with the tokens: those that a router chooses in
one forward over the whole sequence, whatever happened to the request."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async import DynamicInferenceEngine, DynamicInferenceRequest, SamplingParams
from megatron_async.engine.recording import read_run
from megatron_async.engine.replay import replay
from megatron_async.engine.requests.output_processor import OutputProcessor
from megatron_async.errors import ConfigError, IntegrityError, RequestError
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.moe.routed import decoder_layers, expert_layers, routed_layers
from megatron_async.models.served import ServedModel
from megatron_async.request.request import FinishReason
from megatron_async.request.routed_experts import TokenRoutes
from megatron_async.runner import routed_experts
from megatron_async.scheduler.events import Commit
from megatron_async.step.plan import Plan
from megatron_async.step.records import Routes
from megatron_async.training.routing import noted_experts
from tests.support.engines import config_at, drive, hash_engine

CONFIG = ModelConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_kv_heads=2, head_dim=8,
    ffn_hidden_size=48, vocab_size=61, max_sequence_length=80, num_moe_experts=16,
    moe_ffn_hidden_size=16, moe_router_topk=3, mtp_num_layers=1,
)  # fmt: skip
HYBRID = dataclasses.replace(
    CONFIG, num_layers=6, mtp_num_layers=0, hybrid_override_pattern="ME*EM-", mamba_state_dim=8,
    mamba_head_dim=16, mamba_num_groups=2, activation="squared_relu",
)  # fmt: skip
PROMPTS = [[(7 * (n // 2) + 3 * i) % 60 for i in range(6 + 9 * (n % 4))] for n in range(8)]
LENGTH = 24
SIZES: dict[str, Any] = {
    "batch_invariant": True, "block_size_tokens": 4, "block_count": 34, "max_requests": 4,
    "prefill_chunk_tokens": 8, "return_routed_experts": True, "debug": True,
}  # fmt: skip
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"num_speculative_tokens": 3, "speculative_method": "ngram"},
    "mtp": {"num_speculative_tokens": 2, "speculative_method": "mtp"},
}


@functools.cache
def network_of(config: ModelConfig = CONFIG) -> GPTNetwork:
    model = build_random_model(config, device=torch.device("cpu"), dtype=torch.float32, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return GPTNetwork(model, batch_invariant=True)


def engine_of(depth: int, config: ModelConfig = CONFIG, **values: Any) -> DynamicInferenceEngine:
    served = ServedModel(network=network_of(config))
    return DynamicInferenceEngine(served, config_at(depth, **SIZES | values))


def params_of(number: int, **values: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.4, "seed": number, "num_tokens_to_generate": LENGTH,
           "termination_id": -1, "return_log_probs": True, "skip_prompt_log_probs": True,
           "return_routed_experts": True, **values}
    )  # fmt: skip


def chosen_for(tokens: list[int], config: ModelConfig = CONFIG) -> np.ndarray[Any, Any]:
    """``[tokens, layers, top_k]``: what the routers choose in one forward over the sequence."""
    network = network_of(config)
    with noted_experts(decoder_layers(network.model)) as noted:
        network.forward(torch.tensor(tokens), torch.arange(len(tokens)))
    return torch.stack(noted, dim=1).numpy()


def check(request: DynamicInferenceRequest, config: ModelConfig = CONFIG) -> None:
    """All tokens but the last have the experts of one forward over the whole sequence."""
    tokens = [*request.prompt_tokens, *request.generated_tokens]
    found = request.routed_experts
    assert found.dtype == np.int16
    assert found.shape == (len(tokens) - 1, *chosen_for([1], config).shape[1:])
    np.testing.assert_array_equal(found, chosen_for(tokens, config)[:-1])


def play(depth: int, count: int = len(PROMPTS), **values: Any) -> Any:
    with engine_of(depth, **values) as engine:
        requests = engine.generate(PROMPTS[:count], [params_of(n) for n in range(count)])
        return requests, engine.counters


@pytest.mark.parametrize(
    ("depth", "drafts"),
    [(0, "none"), (1, "ngram"), (2, "mtp"), (4, "ngram")],
)
def test_they_are_those_of_one_forward(depth: int, drafts: str) -> None:
    """With chunked prompts, prefix hits, evictions and rejected drafts."""
    requests, counters = play(depth, **DRAFTS[drafts])
    assert counters.evictions and any(r.counters.cached for r in requests)
    if drafts != "none":
        assert 0 < counters.tokens_accepted < counters.tokens_drafted
    for request in requests:
        check(request)
        rollout = request.rollout()
        assert rollout.routed_experts is request.routed_experts
        assert len(rollout.routed_experts) == len(rollout.tokens) - 1


def test_hybrid_models_have_some_too() -> None:
    """Their prefix hits begin at snapshots of recurrent state."""
    with engine_of(2, HYBRID, block_count=60) as engine:
        for again in (False, True):
            requests = engine.generate(PROMPTS[2:4], [params_of(0), params_of(1)])
            assert any(r.counters.cached for r in requests) == again
            for request in requests:
                check(request, HYBRID)


@pytest.mark.parametrize("depth", (0, 2))
def test_pauses_aborts_and_forced_tokens(depth: int) -> None:
    """An aborted request has those of the tokens that it got; rows move meanwhile."""
    with engine_of(depth, num_speculative_tokens=2, speculative_method="ngram") as engine:
        forced = {3: [5, 6, 7, 8, 9]}
        for n, prompt in enumerate(PROMPTS):
            engine.add_request(n, prompt, params_of(n, forced_token_ids=forced.get(n)))
        ended = []
        for step in range(200):
            if not engine.has_unfinished_requests():
                break
            if step == 6:
                engine.pause_request(1)
            if step == 9:
                engine.abort_request(0)
            if step == 20:
                engine.resume_request(1)
            ended += engine.step_modern()["finished_request_records"]
        assert len(ended) == len(PROMPTS)
        for request in ended:
            check(request)
        (aborted,) = [r for r in ended if r.finish_reason is FinishReason.ABORT]
        assert aborted.request_id == 0 and 0 < len(aborted.generated_tokens) < LENGTH
        assert ended[-1].routed_experts is not None


def test_a_request_that_is_aborted_in_the_queue_has_none() -> None:
    with engine_of(1) as engine:
        future = engine.add_request(0, PROMPTS[3], params_of(0))
        engine.abort_request(0)
        drive(engine)
        assert future.result().routed_experts is None


def test_several_sequences_share_a_prompt() -> None:
    """Each has those of the whole prompt, which was prefilled once; stop tokens end some."""
    with engine_of(1) as engine:
        (request,) = engine.generate([PROMPTS[3]], params_of(0, n=3, stop_token_ids=[4, 17, 30]))
        assert len(request.choices) == 3
        for choice in request.choices:
            check(choice)


def test_new_weights_begin_anew() -> None:
    """A request that begins again behind its prompt has those of its second run."""
    with engine_of(2) as engine:
        future = engine.add_request(0, PROMPTS[3], params_of(0))
        for _ in range(12):
            engine.step_modern()
        same = {name: p.clone() for name, p in network_of().model.named_parameters()}
        engine.update_weights(same, partial_rollouts="restart")
        drive(engine)
        check(future.result())


def test_a_request_goes_through_json() -> None:
    (request,), _ = play(1, 1)
    data = json.loads(json.dumps(request.serialize()))
    again = DynamicInferenceRequest.deserialize(data)
    assert again.routed_experts.dtype == np.int16
    np.testing.assert_array_equal(again.routed_experts, request.routed_experts)


def test_a_run_is_replayed(tmp_path: Any) -> None:
    path = tmp_path / "run.jsonl"
    with engine_of(1, record=str(path)) as engine:
        engine.generate(PROMPTS[:2], [params_of(0), params_of(1)])
    run = read_run(path)
    assert run.config.return_routed_experts
    with engine_of(1) as engine:
        assert not replay(run, engine).differences
    with engine_of(1, return_routed_experts=False) as engine, pytest.raises(RequestError):
        replay(run, engine)


# --- off ----------------------------------------------------------------------------------------


def test_off_there_is_no_ring_and_nothing_more_is_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No buffer, no work on the device, and the same graphs; a request that asks is refused."""
    monkeypatch.delattr(routed_experts.RoutedExperts, "__init__")
    names = {}
    for on in (False, True):
        if on:
            monkeypatch.undo()
        with engine_of(1, return_routed_experts=on) as engine:
            device = engine.runner.device
            device.start_timeline()
            requests = engine.generate(PROMPTS[:2], params_of(0, return_routed_experts=False))
            names[on] = {span.name for span in device.take_timeline()}, engine.runner.graph_count
            assert all(r.routed_experts is None for r in requests)
            if not on:
                with pytest.raises(RequestError, match="--enable-return-routed-experts"):
                    engine.add_request(9, PROMPTS[0], params_of(0))
    assert "routes" not in names[False][0]
    assert names[True][0] == names[False][0] | {"routes"} and names[True][1] == names[False][1]


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a model with experts"):
        hash_engine(1, return_routed_experts=True)
    dense = dataclasses.replace(
        CONFIG, num_moe_experts=None, moe_ffn_hidden_size=None, mtp_num_layers=0
    )
    with pytest.raises(ConfigError, match="needs a model with experts"):
        engine_of(1, dense)


def test_layers_that_draft_are_left_out() -> None:
    """Dense layers too, and each of the others knows its place among all."""
    model = network_of().model
    assert len(decoder_layers(model)) == 2 and len(expert_layers(model)) == 3
    assert routed_layers(network_of())[1:] == (16, 3, (0, 1), 2)
    assert routed_layers(network_of(HYBRID))[1:] == (16, 3, (1, 3), 6)


# --- faults that the tests above must see -------------------------------------------------------


def kept_rejected(take_routes: Any) -> Any:
    """The experts of a row's last draft, accepted or not, are its newest token's."""

    def taken(self: Any, plan: Plan, commit: Commit, routes: Routes) -> None:
        firsts = list(routes.firsts)
        for row, tokens in enumerate(commit.tokens[: plan.decode_rows]):
            firsts[row] += plan.rows.windows[row] - len(tokens) if plan.rows.windows else 0
        take_routes(self, plan, commit, routes._replace(firsts=tuple(firsts)))

    return taken


def of_another_step(take: Callable[..., Routes]) -> Callable[..., Routes]:
    """The ring's entry of the step before."""

    def taken(self: Any, plan: Plan, width: int | None) -> Routes:
        ids = self._id_ring
        before = ids[(plan.number - 1) % len(ids)].clone()
        routes = take(self, plan, width)
        return routes._replace(ids=before[: len(routes.ids)].numpy())

    return taken


def no_prefixes(take: Callable[..., Routes]) -> Callable[..., Routes]:
    """Cached prefixes have the ids of block 1."""

    def taken(self: Any, plan: Plan, width: int | None) -> Routes:
        assignments = tuple(each._replace(block=1) for each in plan.assignments)
        return take(self, plan._replace(assignments=assignments), width)

    return taken


@pytest.mark.parametrize("fault", ("kept", "step", "prefix"))
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take = routed_experts.RoutedExperts.take
    if fault == "kept":
        taken = kept_rejected(OutputProcessor.take_routes)
        monkeypatch.setattr(OutputProcessor, "take_routes", taken)
    else:
        fault_of = {"step": of_another_step, "prefix": no_prefixes}[fault]
        monkeypatch.setattr(routed_experts.RoutedExperts, "take", fault_of(take))
    requests, _ = play(1, 4, **DRAFTS["ngram"])
    with pytest.raises(AssertionError):
        for request in requests:
            check(request)


def test_a_gap_is_an_error() -> None:
    (request,), _ = play(1, 1)
    rollout = request.rollout()
    with pytest.raises(IntegrityError, match="30 tokens have routed experts of 28"):
        dataclasses.replace(rollout, routed_experts=rollout.routed_experts[1:])
    routes = TokenRoutes()
    assert routes.until(3) is None
    routes.put(0, np.ones((2, 1, 1), np.uint8))
    with pytest.raises(IntegrityError, match="position 3 have come before those of 2"):
        routes.put(3, np.ones((2, 1, 1), np.uint8))
