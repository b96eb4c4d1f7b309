"""``generate_captured``: one step over fixed memory, launched ahead, equal to stock."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import BloomConfig, BloomForCausalLM, CompileConfig, LogitsProcessor

from megatron_async.contrib.transformers import CapturedGenerate, generate_captured
from megatron_async.contrib.transformers.stopping import notices
from tests.support.called_graphs import CalledGraphs
from tests.support.compared_generation import Heard, generate_seeded
from tests.support.late_streams import LateStreams
from tests.support.tiny_generators import generator_model, prompts

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def arguments(rows: int = 4, **more: Any) -> dict[str, Any]:
    given = {**prompts(rows), "max_new_tokens": 10, "pad_token_id": 0}
    return {**given, "cache_implementation": "static", "eos_token_id": [3, 5, 7], **more}


@pytest.mark.parametrize(
    ("name", "attention"),
    [("gpt2", "eager"), ("llama", "sdpa"), ("qwen3", "eager"), ("qwen3", "sdpa")],
)
def test_captured_tokens_and_random_state_are_those_of_stock(name: str, attention: str) -> None:
    model = generator_model(name)
    model.set_attn_implementation(attention)
    try:
        for rows, depth, sample in ((1, 1, True), (1, 4, False), (4, 4, True), (16, 6, True)):
            graphs, heard, expected = CalledGraphs(), Heard(), Heard()
            custom = CapturedGenerate(depth, LateStreams(rows), graphs)
            given = arguments(rows, do_sample=sample, temperature=0.9, top_k=9, top_p=0.95)
            if not sample:
                given = arguments(rows)
            stock, state = generate_seeded(model, {**given, "streamer": expected})
            ours, ours_state = generate_seeded(
                model, {**given, "streamer": heard, "custom_generate": custom}
            )
            assert torch.equal(ours, stock) and torch.equal(ours_state, state)
            assert (heard.puts, heard.ended) == (expected.puts, 1)
            launches = graphs.runs + graphs.replays
            assert stock.shape[1] - 6 <= launches < stock.shape[1] - 6 + depth
    finally:
        model.set_attn_implementation("eager")


def test_a_step_is_captured_once_for_calls_of_one_shape() -> None:
    graphs = CalledGraphs()
    custom, model = CapturedGenerate(3, LateStreams(), graphs), generator_model("llama")
    for seed, ends in enumerate(([3, 5, 7], [9, 11, 13], [2, 4, 6])):
        given = arguments(do_sample=True, eos_token_id=ends)
        stock, _ = generate_seeded(model, given, seed)
        ours, _ = generate_seeded(model, {**given, "custom_generate": custom}, seed)
        assert torch.equal(ours, stock)
    assert graphs.captures == graphs.runs == 1
    generate_seeded(model, arguments(do_sample=True, temperature=0.5, custom_generate=custom))
    assert graphs.captures == 2
    custom.release(model)
    generate_seeded(model, arguments(do_sample=True, custom_generate=custom))
    assert graphs.captures == 3


def test_the_forward_is_compiled_where_stock_compiles_it() -> None:
    model, graphs, seen = generator_model("llama"), CalledGraphs(), []

    def backend(module: Any, inputs: Any) -> Any:
        seen.append(module)
        return module.forward

    config = CompileConfig(backend=backend)
    config._compile_all_devices = True
    stock, _ = generate_seeded(model, arguments())
    custom = CapturedGenerate(3, LateStreams(), graphs)
    asked = {"compile_config": config, "custom_generate": custom}
    for more, compilations in ((asked, 1), ({**asked, "disable_compile": True}, 2)):
        ours, _ = generate_seeded(model, arguments(**more))
        assert torch.equal(ours, stock)
        assert seen and graphs.captures == compilations
        seen.append(None)
    assert seen.count(None) == 2 and seen[-1] is None and seen[-2] is None
    custom.release(model)


class Bans(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, input_ids[0, -1:], -torch.inf)


@pytest.mark.parametrize(
    ("name", "more", "reason"),
    [
        ("gpt2", {"cache_implementation": "dynamic"}, "cache_implementation"),
        ("mistral", {}, "full attention"),
        ("gpt2", {"logits_processor": [Bans()]}, "Bans looks at ids"),
        ("gpt2", {"repetition_penalty": 1.2}, "looks at ids"),
        ("gpt2", {"return_dict_in_generate": True, "output_scores": True}, "return_dict"),
    ],
)
def test_what_cannot_be_captured_stops_asynchronously(
    name: str, more: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    notices.say_once.cache_clear()
    model, graphs, streams = generator_model(name), CalledGraphs(), LateStreams()
    given = arguments(do_sample=True, **more)
    stock, _ = generate_seeded(model, given)
    custom = CapturedGenerate(3, streams, graphs)
    with caplog.at_level(logging.WARNING):
        ours, _ = generate_seeded(model, {**given, "custom_generate": custom})
    assert torch.equal(*(getattr(out, "sequences", out) for out in (ours, stock)))
    assert any(reason in record.message for record in caplog.records)
    assert graphs.runs == 0 and streams.submitted > 0


def test_positions_go_on_from_the_callers() -> None:
    model, graphs = generator_model("gpt2"), CalledGraphs()
    given = arguments(2, attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]))
    for more in ({}, {"position_ids": torch.arange(7, 12).expand(2, 5)}):
        stock = model.generate(**given, **more)
        custom = CapturedGenerate(3, LateStreams(), graphs)
        assert torch.equal(model.generate(**given, **more, custom_generate=custom), stock)


def test_what_each_forward_is_given_is_not_captured() -> None:
    model, graphs = generator_model("gpt2"), CalledGraphs()
    given = arguments(token_type_ids=torch.ones((4, 5), dtype=torch.long))
    custom = CapturedGenerate(3, LateStreams(), graphs)
    assert torch.equal(model.generate(**given, custom_generate=custom), model.generate(**given))
    assert graphs.runs == 0


def test_alibi_is_not_captured() -> None:
    config = BloomConfig(vocab_size=24, hidden_size=16, n_layer=1, n_head=2)
    model, graphs = BloomForCausalLM(config).eval(), CalledGraphs()
    custom = CapturedGenerate(3, LateStreams(), graphs)
    given = arguments()
    assert torch.equal(model.generate(**given, custom_generate=custom), model.generate(**given))
    assert graphs.runs == 0


def test_nothing_is_launched_beyond_the_positions_of_the_model() -> None:
    model, ids = copy.deepcopy(generator_model("gpt2")), prompts(1, 62, 8)["input_ids"]
    model.set_attn_implementation("sdpa")  # eager takes no mask of more tokens in 4.57
    end = model.generate(ids, max_new_tokens=3, pad_token_id=0)[0, -1:].tolist()
    given = arguments(input_ids=ids, attention_mask=torch.ones_like(ids), eos_token_id=end)
    stock = model.generate(**given)
    assert stock.shape[1] == 65, "ends too early to show it"
    custom = CapturedGenerate(4, LateStreams(), CalledGraphs())
    assert torch.equal(model.generate(**given, custom_generate=custom), stock)


def test_weights_that_moved_are_captured_again() -> None:
    model, graphs = copy.deepcopy(generator_model("llama")), CalledGraphs()
    vars(model).pop("_cache", None)  # as a model that has not generated yet, in 4.57
    custom = CapturedGenerate(3, LateStreams(), graphs)
    model.generate(**arguments(), custom_generate=custom)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.roll(1, 0))
    model.generate(**arguments(), custom_generate=custom)
    assert graphs.captures == 2


def test_an_interrupt_leaves_no_half_captured_step() -> None:
    model, graphs, streams = generator_model("llama"), CalledGraphs(), LateStreams()
    custom = CapturedGenerate(3, streams, graphs)
    calls = 0

    def interrupt(module: Any, inputs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    given = arguments(eos_token_id=[23])
    with pytest.raises(KeyboardInterrupt):
        model.generate(**given, custom_generate=custom)
    hook.remove()
    assert streams.closed == 1
    stock = model.generate(**given)
    assert torch.equal(model.generate(**given, custom_generate=custom), stock)
    assert graphs.captures == 2


def test_depth_is_checked() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CapturedGenerate(0)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_captured_on_a_gpu(name: str) -> None:
    import copy

    model = copy.deepcopy(generator_model(name)).cuda()
    model.set_attn_implementation("sdpa")
    for rows, sample in ((1, False), (4, True), (4, True), (16, True)):
        given = arguments(rows, do_sample=sample, disable_compile=True)
        given.update({key: value.cuda() for key, value in prompts(rows).items()})
        torch.manual_seed(rows)
        stock, state = model.generate(**given), torch.cuda.get_rng_state()
        torch.manual_seed(rows)
        ours = model.generate(**given, custom_generate=generate_captured)
        assert torch.equal(ours, stock)
        assert torch.equal(torch.cuda.get_rng_state(), state)
    generate_captured.release(model)
