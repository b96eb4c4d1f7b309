"""Each address in a captured graph is that of what the engine has now; and where it is not, the
audit names it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async import megatron_compat as compat
from megatron_async.checkpoint.targets import Target
from megatron_async.device.releasable import Region
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.lifecycle.sleep_mode import Memory
from megatron_async.errors import ConfigError, EngineStoppedError, IntegrityError
from megatron_async.graph_audit.derived import Derived
from megatron_async.graph_audit.live_tensors import LiveTensors
from megatron_async.kernels.ranks.peer_sum import PeerWords
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.layers import rope
from megatron_async.models.layers.norm import RMSNorm
from megatron_async.models.parallel import ModelParallel
from megatron_async.models.served import ServedModel
from megatron_async.ranks.follower import Follower
from megatron_async.ranks.messages import Done, ReplaceWeights, Sleep, WakeUp
from tests.support.audited import (
    DENSE,
    EXPERTS,
    audited_engine,
    model_of,
    state_of,
    tokens,
)
from tests.support.engines import config_at
from tests.unit.models.test_moe import stock_model

KINDS = {
    "dense": ("dense", False),
    "experts": ("experts", False),
    "hybrid": ("hybrid", False),
    "MTP": ("MTP", False),
    "draft model": ("dense", True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_was_updated_put_to_sleep_and_reset_passes(kind: str) -> None:
    name, draft = KINDS[kind]
    with audited_engine(name, draft=draft) as engine:
        audit = engine.runner.audit
        assert audit is not None
        expected, state, halved = tokens(engine), state_of(engine), state_of(engine, 0.5)
        assert audit.graphs > 1, "graphs that were not replayed hold nothing"
        engine.update_weights(halved)
        tokens(engine)
        engine.sleep(1)
        engine.wake_up()
        engine.sleep(1)
        engine.wake_up(["kv_cache"])
        engine.wake_up(["weights"])
        engine.update_weights(state)
        assert tokens(engine) == expected
        engine.sleep(2)
        engine.wake_up(["weights"])
        engine.update_weights(state)
        engine.wake_up(["kv_cache"])
        engine.reset()
        engine.suspend()
        engine.resume()
        engine.audit_graphs()
        assert audit.checks == 14
        assert tokens(engine) == expected


def test_requests_that_run_through_updates_do_not_disturb_it() -> None:
    with audited_engine("hybrid", debug=True) as engine:
        states = [state_of(engine), state_of(engine, 0.5)]
        futures = [engine.add_request(i, [i + 1] * 5) for i in range(3)]
        for number in range(6):
            engine.step_modern()
            engine.update_weights(states[number % 2], recompute_kv_cache=number % 3 > 0)
        while engine.has_unfinished_requests():
            engine.step_modern()
        assert all(future.result(0).generated_tokens for future in futures)
        assert engine.runner.audit is not None and engine.runner.audit.checks == 6


def test_another_engine_that_needs_more_positions_leaves_the_first_one_its_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rope, "FIRST_ROWS", 32)
    with audited_engine("dense", enable_sleep_mode=False, max_sequence_length=32) as first:
        before, rotary = tokens(first), model_of(first).rotary
        with first.with_config(dataclasses.replace(first.config, max_sequence_length=64)) as other:
            assert len(rotary.cos_sin) == 64 and len(rotary.outgrown) == 1
            assert tokens(other) == before
            first.update_weights(state_of(first))  # both are audited
            assert first.runner.audit.checks == other.runner.audit.checks == 1  # type: ignore[union-attr]
            assert tokens(first) == before
            rotary.outgrown.clear()
            with pytest.raises(IntegrityError, match=r"rotary\.outgrown\[0\]\), which was freed"):
                first.reset()
            other.reset()


def test_an_engine_that_was_not_asked_for_it_watches_nothing() -> None:
    with audited_engine("dense", audit_graphs=False) as engine:
        tokens(engine)
        assert engine.runner.audit is None and engine.device.watch is None
        with pytest.raises(ConfigError, match="build it with audit_graphs=True"):
            engine.audit_graphs()


# --- mutants ----------------------------------------------------------------------------------

Break = Callable[[DynamicInferenceEngine], Any]
"""Returns what must stay alive: the audit may not rest on memory that was freed."""
FC1 = "decoder.layers.0.mlp.linear_fc1"


def other_data(engine: DynamicInferenceEngine, model: Any, name: str) -> Tensor:
    parameter = model.get_parameter(name)
    old = parameter.data
    parameter.data = old.clone()
    return old


def other_parameter(engine: DynamicInferenceEngine) -> Tensor:
    module = model_of(engine).get_submodule(FC1)
    old: Tensor = module.weight
    module.weight = torch.nn.Parameter(old.detach().clone(), requires_grad=False)
    return old


def other_states(engine: DynamicInferenceEngine) -> Any:
    states = engine.cache.states._states  # type: ignore[union-attr]
    old = states["ssm"]
    states["ssm"] = old.clone()
    return old


def other_cache(engine: DynamicInferenceEngine) -> Any:
    old = engine.batch.kv_cache
    engine.batch.kv_cache = old.clone()
    return old


def other_slots(engine: DynamicInferenceEngine) -> Any:
    old = engine.cache.slots.last_token
    engine.cache.slots.last_token = old.clone()
    return old


def freed_buffer(engine: DynamicInferenceEngine) -> None:
    engine.runner._program._packet = torch.zeros(1)
    engine.runner._program._row_records = engine.runner._program._stage._records = torch.zeros(1)


MOVED: dict[str, tuple[str, Break, str]] = {
    "a parameter's data": (
        "dense",
        lambda engine: other_data(engine, model_of(engine), f"{FC1}.weight"),
        rf"model\.{FC1}\.weight is at 49152 bytes at 0x\w+ now, and graph \d+ "
        r"\(.*H2D F\) holds 49152 bytes at 0x\w+, where it was",
    ),
    "a parameter": ("dense", other_parameter, rf"model\.{FC1}\.weight is at"),
    "stacked experts": (
        "experts",
        lambda engine: other_data(
            engine, model_of(engine), "decoder.layers.1.mlp.experts.linear_fc2.weight"
        ),
        r"decoder\.layers\.1\.mlp\.experts\.linear_fc2\.weight is at",
    ),
    "a mixer": (
        "hybrid",
        lambda engine: other_data(engine, model_of(engine), "decoder.layers.0.mixer.A_log"),
        r"decoder\.layers\.0\.mixer\.A_log is at",
    ),
    "an MTP layer": (
        "MTP",
        lambda engine: other_data(engine, model_of(engine), "mtp.layers.0.eh_proj.weight"),
        r"model\.mtp\.layers\.0\.eh_proj\.weight is at",
    ),
    "a draft model": (
        "draft model",
        lambda engine: other_data(engine, engine.model.draft.model, f"{FC1}.weight"),  # type: ignore[union-attr]
        rf"draft_model\.{FC1}\.weight is at",
    ),
    "a recurrent state": ("hybrid", other_states, r"states\._states\['ssm'\] is at"),
    "the KV cache": ("dense", other_cache, r"batch\.kv_cache is at"),
    "a slot's field": ("dense", other_slots, r"slots\.last_token is at"),
    "a buffer": ("dense", freed_buffer, r"runner\._program\._packet is at 4 bytes"),
}
EVENTS: dict[str, Break] = {
    "new weights": lambda engine: engine.update_weights(state_of(engine)),
    "a sleep": lambda engine: engine.sleep(1),
    "a reset": lambda engine: engine.reset(),
    "a suspension": lambda engine: (engine.suspend(), engine.resume()),
    "a call of audit_graphs": lambda engine: engine.audit_graphs(),
}


@pytest.mark.parametrize("what", MOVED)
def test_memory_that_graphs_hold_and_nobody_uses_any_more_is_named(what: str) -> None:
    name, break_it, says = MOVED[what]
    event = list(EVENTS)[list(MOVED).index(what) % len(EVENTS)]
    kind, draft = KINDS[name]
    with audited_engine(kind, draft=draft) as engine:
        tokens(engine)
        engine.audit_graphs()
        old = break_it(engine)
        with pytest.raises(IntegrityError, match=rf"graphs do not fit .* after {event}: .*{says}"):
            EVENTS[event](engine)
        with pytest.raises(EngineStoppedError):
            engine.step_modern()
        del old


def test_memory_that_was_freed_is_named_though_nobody_knows_where_it_was() -> None:
    with audited_engine("dense") as engine:
        norm = model_of(engine).decoder.final_layernorm
        hidden: list[Tensor] = [torch.ones(64)]  # the audit looks into no hook of torch's
        norm.register_forward_hook(lambda module, given, out: out * hidden[0])
        tokens(engine)
        hidden[0] = torch.ones(64)
        with pytest.raises(IntegrityError, match=r"holds 256 bytes .*float32 \[64\].*was freed"):
            engine.reset()


def test_another_rank_answers_what_its_audit_finds() -> None:
    answers: list[Done] = []
    group: Any = SimpleNamespace(answer=answers.append)
    nothing: Any = SimpleNamespace(sleep=lambda message: None, wake_up=lambda message: None)
    follower = Follower(group, nothing)
    with audited_engine("dense") as engine:
        tokens(engine)
        follower._engines[1] = engine.device, engine.runner
        said = [ReplaceWeights(), Sleep(1, True), WakeUp(1, "weights")]
        for message in said:
            follower.do(message)
        assert answers == [Done()] * 3
        old = other_parameter(engine)
        for message in said:
            follower.do(message)
        errors = [
            (answer.error, f"model.{FC1}.weight is at" in answer.message) for answer in answers
        ]
        assert errors[3:] == [("IntegrityError", True)] * 3
        del old


def test_what_ranks_send_each_other_through_is_found() -> None:
    """A record of tensors is followed whatever its first field is."""
    tensors = [torch.zeros(8) for _ in range(3)]
    words = PeerWords(0, (tensors[0], tensors[1]), tensors[2], 8)
    found = LiveTensors.of({"words": words}).tensors
    assert set(map(id, found.values())) == set(map(id, tensors))


def test_what_ranks_send_each_other_through_follows_no_weights() -> None:
    """A model's layers refer to it, and nobody has to say what it is made from."""
    ranks = object.__new__(ModelParallel)
    words = PeerWords(0, (torch.zeros(8), torch.zeros(8)), torch.zeros(8), 8)
    ranks.tensor_words = ranks.expert_words = words
    ranks._sends = collections.deque([(None, torch.zeros(8))])
    live = LiveTensors.of({"ranks": ranks})
    assert len(live.tensors) == 4 and not live.made
    ranks.other = torch.zeros(8)
    assert LiveTensors.of({"ranks": ranks}).made == {"ranks.other"}


def test_experts_of_megatron_core_follow_their_stacked_weights() -> None:
    config = dataclasses.replace(DENSE, **EXPERTS, moe_layer_freq=(0, 1))
    compat.ensure_parallel_state()
    network = GPTNetwork(stock_model(config))
    options = config_at(1, max_requests=2, max_sequence_length=64, block_count=20, debug=True)
    with DynamicInferenceEngine(ServedModel(network=network), options) as engine:
        tokens(engine)
        engine.update_weights(state_of(engine, 0.5))
        experts = model_of(engine).decoder.layers[1].mlp.experts.local_experts
        old = experts[2].linear_fc2.weight.data
        experts[2].linear_fc2.weight.data = old * 2
        with pytest.raises(
            IntegrityError,
            match=r"experts\.2\.linear_fc2\.weight is at .*weights\.w2\[2\] does not follow",
        ):
            engine.audit_graphs()


# --- contents ---------------------------------------------------------------------------------


class ScaledNorm(RMSNorm):
    """A norm of this package that keeps its weight times two."""

    doubled: Tensor

    def refresh(self) -> None:
        self.doubled = self.weight.detach() * 2

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, self.doubled.shape, self.doubled, self.eps)


class DeclaredNorm(ScaledNorm):
    def derived_tensors(self) -> Iterator[Derived]:
        yield Derived("doubled", self.doubled, lambda: self.weight.detach() * 2)


for _class in (ScaledNorm, DeclaredNorm):
    _class.__module__ = RMSNorm.__module__


def with_norm(engine: DynamicInferenceEngine, kind: type[ScaledNorm]) -> ScaledNorm:
    norm: ScaledNorm = model_of(engine).decoder.layers[1].pre_mlp_layernorm
    norm.__class__ = kind
    norm.refresh()
    return norm


def test_a_tensor_made_of_a_parameter_must_be_declared() -> None:
    with audited_engine("dense") as engine:
        with_norm(engine, ScaledNorm)
        tokens(engine)
        with pytest.raises(
            IntegrityError,
            match=r"decoder\.layers\.1\.pre_mlp_layernorm\.doubled, which graph .* holds, is "
            r"neither a parameter nor scratch",
        ):
            engine.update_weights(state_of(engine))


def test_a_derived_tensor_that_does_not_follow_an_update_is_named() -> None:
    with audited_engine("dense") as engine:
        norm = with_norm(engine, DeclaredNorm)
        tokens(engine)
        engine.update_weights(state_of(engine))  # the same weights
        with pytest.raises(
            IntegrityError,
            match=r"pre_mlp_layernorm\.doubled does not follow what it is made from: 64 of 64 "
            r"elements differ, the first at \[0\], where 1\.0 was expected and 2\.0 found",
        ):
            engine.update_weights(state_of(engine, 0.5))
        assert norm.weight[0] == 0.5, "the update itself was right"


def test_a_table_with_other_contents_is_named() -> None:
    with audited_engine("dense") as engine:
        model_of(engine).rotary.cos_sin[7, 1, 2] += 1
        with pytest.raises(IntegrityError, match=r"rotary\.cos_sin does not .* at \[7, 1, 2\]"):
            engine.reset()


def test_a_parameter_that_an_update_leaves_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with audited_engine("dense") as engine:
        left_out = model_of(engine).get_parameter(f"{FC1}.weight").data_ptr()
        copy = Target.copy_from

        def lazy(target: Target, stored: Tensor) -> None:
            if target.view.data_ptr() != left_out:
                copy(target, stored)

        monkeypatch.setattr(Target, "copy_from", lazy)
        with pytest.raises(IntegrityError, match=rf"{FC1}\.weight does not have the new values"):
            engine.update_weights(state_of(engine, 0.5))


def test_weights_that_come_back_as_others_are_named() -> None:
    with audited_engine("dense") as engine:
        engine.sleep(1)
        model_of(engine).get_parameter(f"{FC1}.weight").data[3, 3] += 1
        engine.wake_up(["kv_cache"])
        with pytest.raises(IntegrityError, match=rf"{FC1}\.weight has other contents than before"):
            engine.wake_up(["weights"])


def test_a_cache_that_comes_back_with_contents_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with audited_engine("hybrid") as engine:
        restore = Memory.restore

        def dirty(memory: Memory, tag: str) -> None:
            restore(memory, tag)
            engine.cache.states._states["ssm"][0, 0] = 1  # type: ignore[union-attr]

        monkeypatch.setattr(Memory, "restore", dirty)
        engine.sleep(1)
        with pytest.raises(IntegrityError, match=r"regions\[\d\] came back with contents"):
            engine.wake_up(["kv_cache"])


def test_memory_that_does_not_come_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with audited_engine("dense") as engine:
        engine.sleep(2)
        engine.wake_up(["weights"])
        engine.update_weights(state_of(engine))
        monkeypatch.setattr(Region, "restore", lambda region, *, zeros=False: False)
        with pytest.raises(IntegrityError, match=r"regions\[0\] was not given back its memory"):
            engine.wake_up(["kv_cache"])
