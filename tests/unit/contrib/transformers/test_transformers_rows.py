"""Captured steps of one row with the kernels of one token: equal to stock, and put back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers
from transformers import CompileConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatron_async.contrib.transformers import CapturedGenerate, generate_captured
from megatron_async.contrib.transformers.captured import row_forward as rows_module
from megatron_async.contrib.transformers.captured import step as step_module
from megatron_async.contrib.transformers.stopping.selection import largest
from tests.support.called_graphs import CalledGraphs
from tests.support.compared_generation import generate_seeded
from tests.support.late_streams import LateStreams
from tests.support.tiny_generators import VOCABULARY, generator_model, prompts

pytestmark = pytest.mark.sweep


def arguments(**more: Any) -> dict[str, Any]:
    config = CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    given = {"max_new_tokens": 10, "pad_token_id": 0, "eos_token_id": [3, 5, 7]}
    return {
        **prompts(1), **given, "cache_implementation": "static", "compile_config": config, **more
    }  # fmt: skip


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    logging.disable(logging.INFO)  # the compiler's trace, which pytest would format
    monkeypatch.setattr(step_module, "say_once", found.append)
    monkeypatch.setattr(step_module, "without_padding", lambda compiled: compiled)  # inductor's
    yield found
    logging.disable(logging.NOTSET)


def sdpa(name: str) -> Any:
    model = copy.deepcopy(generator_model(name))
    model.set_attn_implementation("sdpa")
    return model


def stock_and_ours(model: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    torch._dynamo.reset()
    given = {"max_new_tokens": 10, "pad_token_id": 0, "eos_token_id": [3, 5, 7], **prompts(1)}
    stock, _ = generate_seeded(model, {**given, **more})
    custom = CapturedGenerate(3, LateStreams(), CalledGraphs())
    ours, _ = generate_seeded(model, {**arguments(**more), "custom_generate": custom})
    return stock, ours


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_tokens_are_those_of_stock_and_all_is_put_back(
    name: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ran = sdpa(name), []
    forwards = {m: m.forward for m in model.modules()}
    names = set(ALL_ATTENTION_FUNCTIONS)
    compiled = step_module.CapturedStep._compile
    monkeypatch.setattr(
        step_module.CapturedStep, "_compile",
        lambda step, *given: ran.append(step._used_cache) or compiled(step, *given),
    )  # fmt: skip
    for more in ({}, {"do_sample": True, "temperature": 0.9, "top_k": 9}):
        stock, ours = stock_and_ours(model, **more)
        assert torch.equal(ours, stock)
    assert [type(cache) for cache in ran] == [rows_module.RowCache] * 2 and not said
    assert model.config._attn_implementation == "sdpa"
    assert set(ALL_ATTENTION_FUNCTIONS) == names
    for module, forward in forwards.items():
        assert "forward" not in vars(module) and module.forward == forward


def changed(name: str, **config: Any) -> Any:
    """A tiny model whose configuration has other values."""
    model = sdpa(name)
    kind, values = type(model), {**model.config.to_dict(), **config}
    torch.manual_seed(7)
    made = kind(type(model.config).from_dict(values)).eval()
    made.set_attn_implementation("sdpa")
    return made


def hooked() -> Any:
    model = sdpa("llama")
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, given, out: out * 2)
    return model


def bias() -> Any:
    return changed("llama", attention_bias=True, mlp_bias=True)


def gemma2() -> Any:
    """Soft caps, and windows in every second layer."""
    torch.manual_seed(7)
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=6,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize("make", [hooked, bias, gemma2, lambda: sdpa("mistral")])
def test_other_models_are_equal_too(make: Any, said: list[str]) -> None:
    """With the kernels where they fit, else as before."""
    stock, ours = stock_and_ours(make())
    assert torch.equal(ours, stock)


def test_what_the_kernels_cannot_do_is_seen_in_a_forward(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention that asks for more than keys, values and the mask."""
    inner = rows_module.RowCache.attention

    def attention(self: Any, *given: Any, **more: Any) -> Any:
        return inner(self, *given, **{**more, "softcap": 3.0})

    monkeypatch.setattr(rows_module.RowCache, "attention", attention)
    stock, ours = stock_and_ours(sdpa("llama"))
    assert torch.equal(ours, stock) and said == [
        "a captured step has no kernels of one token: attention has softcap"
    ]
    monkeypatch.undo()


def test_a_long_cache_and_a_compiler_that_fails(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sdpa("llama")
    with monkeypatch.context() as patch:
        patch.setattr(rows_module, "LONGEST", 8)
        stock, ours = stock_and_ours(model)
        assert torch.equal(ours, stock) and "more than 8 tokens" in said.pop()

    def fails(compiled: Any) -> Any:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(step_module, "without_padding", fails)
    stock, ours = stock_and_ours(model)
    assert torch.equal(ours, stock)
    assert said == ["a captured step has no kernels of one token: no kernel"]
    assert all("forward" not in vars(module) for module in model.modules())


def test_an_interrupt_puts_all_back(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = sdpa("llama"), rows_module.attend_one

    def interrupt(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(rows_module, "attend_one", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stock_and_ours(model)
    assert model.config._attn_implementation == "sdpa"
    assert all("forward" not in vars(module) for module in model.modules())
    monkeypatch.setattr(rows_module, "attend_one", plain)
    stock, ours = stock_and_ours(model)
    assert torch.equal(ours, stock)


def test_an_interrupt_while_forwards_are_swapped_in() -> None:
    model = sdpa("llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=8)
    rows = rows_module.RowForward(model, rows_module.RowCache(cache, *[torch.zeros(1)] * 2))

    class Interrupted(dict[Any, Any]):
        def items(self) -> Any:
            yield next(iter(super().items()))
            raise KeyboardInterrupt

    rows._forwards = Interrupted(rows._forwards)
    names = set(ALL_ATTENTION_FUNCTIONS)
    with pytest.raises(KeyboardInterrupt), rows.swapped():
        pass
    assert model.config._attn_implementation == "sdpa" and set(ALL_ATTENTION_FUNCTIONS) == names
    assert all("forward" not in vars(module) for module in model.modules())


def test_errors_of_other_kinds_and_captures_that_fail(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's errors are no RuntimeErrors; a step that has run is not run again."""
    model = sdpa("llama")

    def fails(*given: Any) -> Any:
        raise ValueError("no kernel")

    with monkeypatch.context() as patch:
        patch.setattr(rows_module, "attend_one", fails)
        stock, ours = stock_and_ours(model)
    assert torch.equal(ours, stock)
    assert said == ["a captured step has no kernels of one token: no kernel"]

    class NoCapture(CalledGraphs):
        def capture(self, step: Any) -> Any:
            raise RuntimeError("no capture")

    graphs = NoCapture()
    custom = CapturedGenerate(3, LateStreams(), graphs)
    with pytest.raises(RuntimeError, match="no capture"):
        model.generate(**arguments(), custom_generate=custom)
    assert graphs.runs == 1 and not custom._steps
    assert all("forward" not in vars(module) for module in model.modules())


@torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
def test_each_step_has_versions_of_its_own() -> None:
    """Where steps shared a code, the second version would be one too many."""
    torch._dynamo.reset()
    layer, given = nn.Linear(4, 4), torch.ones(1, 4)
    for factor in (1.0, 2.0, 3.0):
        layer.forward = lambda input, factor=factor: input * factor  # type: ignore[method-assign]
        call = torch.compile(step_module.call_of_its_own(layer), backend="eager")
        assert torch.equal(call(input=given), given * factor)


def test_linear_layers_that_somebody_changed_keep_their_forward() -> None:
    plain = nn.Linear(4, 4)
    assert rows_module.is_plain(plain)

    class Own(nn.Linear):
        pass

    patched, hooks = nn.Linear(4, 4), nn.Linear(4, 4)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    hooks.register_forward_pre_hook(lambda module, given: None)
    integers = nn.Linear(4, 4)
    integers.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    strided = nn.Linear(4, 4)
    strided.weight = nn.Parameter(torch.zeros(8, 8)[::2, ::2])
    for module in (Own(4, 4), patched, hooks, integers, strided):
        assert not rows_module.is_plain(module)


@pytest.mark.parametrize("width", [8, 4096, 4099, 50257, 32000])
def test_the_largest_is_the_first_of_equals(width: int) -> None:
    torch.manual_seed(width)
    scores = torch.randn(3, width).round(decimals=1)
    scores[1, width // 2] = torch.nan
    scores[2] = -torch.inf
    assert torch.equal(largest(scores), scores.argmax(dim=-1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_rows_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32, compiled, in a graph: the tokens of stock without compilation."""
    said: list[str] = []
    monkeypatch.setattr(step_module, "say_once", said.append)
    model = sdpa(name).cuda()
    given = {key: value.cuda() for key, value in prompts(1).items()}
    given |= {"max_new_tokens": 40, "pad_token_id": 0, "cache_implementation": "static"}
    stock = model.generate(**given, disable_compile=True)
    for _ in range(2):  # captured, replayed
        assert torch.equal(model.generate(**given, custom_generate=generate_captured), stock)
    assert not said
    again = model.generate(**given, disable_compile=True)
    assert torch.equal(again, stock)
    generate_captured.release(model)
