"""Parameters change between requests and nothing is captured or compiled again."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_async.device.cpu import CpuDevice
from megatron_async.device.cuda import CudaDevice
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.request.request import FinishReason
from megatron_async.sampling_params import SamplingParams
from tests.support.drafting_model import DraftingHashModel
from tests.support.engines import config_at, drive, hash_engine
from tests.support.hash_tokenizer import hash_tokenizer

PROMPT = [7, 1, 9, 7, 30, 2]
LENGTH = 12
SCHEMA = {"json": {"enum": [True, None]}, "disable_any_whitespace": True}


def only_even(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[1::2] = -torch.inf
    return logits


# 1 and multiples of 16 are what Triton would compile kernels of their own for.
VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1.0, 0.37),
    "top_k": (1, 2, 16, 48),
    "top_p": (0.1, 0.5, 1.0),
    "return_log_probs": (True,),
    "skip_prompt_log_probs": (True,),
    "return_segments": (False,),
    "num_tokens_to_generate": (1, 2, 16, 17),
    "num_tokens_total": (len(PROMPT) + 1, 16, 23),
    "termination_id": (-1, 1, 16),
    "top_n_logprobs": (1, 16, 20),
    "add_BOS": (False,),
    "stop_words": (["k"], ["12", "tr", "e"]),
    "stop_token_ids": ((16,), range(1, 30)),
    "seed": (0, 1, 16, -(2**63)),
    "min_p": (0.01, 0.5, 1.0),
    "repetition_penalty": (0.5, 1.7),
    "presence_penalty": (-2.0, 1.0),
    "frequency_penalty": (-1.0, 2.0),
    "logit_bias": ({1: 1.0}, {token: -3.5 for token in range(40)}),
    "allowed_token_ids": ([1], list(range(0, 60, 2))),
    "bad_words": ([[1]], [[16, 2], [3, 4, 5]], [[token, 1] for token in range(2, 60)]),
    "min_tokens": (1, 9),
    "ignore_eos": (True,),
    "include_stop_str_in_output": (True,),
    "log_probs_mode": ("raw", "processed"),
    "detokenize": (False,),
    "forced_token_ids": ([16], [1, 16, 3]),
    "n": (2, 3),
    "best_of": (2, 4),
    "num_speculative_tokens": (0,),
    "cache_salt": ("salt", "another"),
    "structured_outputs": ({"regex": "[a-f]{3,9}[0-9]+"}, {"choice": ["ab", "null"]}, SCHEMA),
    "logits_processors": ([only_even], [only_even, only_even]),
    "return_routed_experts": (False,),
    "prompt_hidden_states": (None,),
}  # fmt: skip
WITH: dict[str, dict[str, Any]] = {
    "skip_prompt_log_probs": {"return_log_probs": True},
    "log_probs_mode": {"return_log_probs": True, "top_k": 5, "top_p": 0.8},
    "include_stop_str_in_output": {"stop_words": ["tr", "k"]},
    "min_tokens": {"stop_token_ids": range(25)},
    "num_tokens_total": {"num_tokens_to_generate": None},
}


def asks(*names: str) -> list[SamplingParams]:
    """A request for each value of these parameters, sampled unless it says otherwise."""
    usual = {"temperature": 1.2, "seed": 3, "num_tokens_to_generate": LENGTH}
    return [
        SamplingParams(**{**usual, **WITH.get(name, {}), name: value})
        for name in names
        for value in VALUES[name]
    ]


def serve(engine: DynamicInferenceEngine, listed: list[SamplingParams]) -> None:
    """Each by itself, then all together with changes while they run."""
    requests = [engine.generate([PROMPT], asked)[0] for asked in listed]
    futures = [
        engine.add_request(index, [*PROMPT, *range(index % 17)], asked)
        for index, asked in enumerate(listed)
    ]
    changes = ({"temperature": 0.5}, {"top_k": 16}, {"top_p": 0.7, "seed": 16}, {"seed": None})
    for step, change in enumerate(changes * 8):
        engine.step_modern()
        engine.update_sampling_params(step % len(listed), **change)
        if step % 5 == 2:
            engine.evict_request(step % len(listed))
    drive(engine)
    requests += [future.result(0) for future in futures]
    ended = {FinishReason.STOP, FinishReason.LENGTH}
    assert all(request.finish_reason in ended for request in requests)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what devices capture."""
    names: list[str] = []

    def counting(device: type) -> Callable[..., Any]:
        capture = device.capture  # type: ignore[attr-defined]

        def counted(self: Any, work: Callable[[], None], name: str, **options: Any) -> Any:
            names.append(name)
            return capture(self, work, name, **options)

        return counted

    for device in (CpuDevice, CudaDevice):
        monkeypatch.setattr(device, "capture", counting(device))
    return names


def small_hash_engine(device: str = "cpu", **values: Any) -> DynamicInferenceEngine:
    return hash_engine(
        1, tokenizer=hash_tokenizer(), device_name=device, max_requests=5, block_size_tokens=4,
        block_count=120, prefill_chunk_tokens=16, **values,
    )  # fmt: skip


PLAIN = [name for name in VALUES if name != "logits_processors"]


def test_every_parameter_is_here_with_a_value_that_is_not_its_default() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert VALUES.keys() == defaults.keys()
    same = {name for name in VALUES if all(value == defaults[name] for value in VALUES[name])}
    # These are of the host alone: what an engine captures is no matter of one request.
    assert same == {"return_segments", "add_BOS", "return_routed_experts", "prompt_hidden_states"}


@pytest.mark.parametrize("drafts", (0, 2))
def test_nothing_is_captured_after_the_start(drafts: int, captured: list[str]) -> None:
    model = DraftingHashModel(drafts, 0.2) if drafts else None
    with small_hash_engine(model=model) as engine:
        assert len(captured) == engine.runner.graph_count > 0
        captured.clear()
        serve(engine, asks(*VALUES))
        counters = engine.counters
        assert captured == []
    assert counters.steps_with_extras and counters.steps_with_control and counters.evictions
    assert counters.steps_launched > counters.steps_with_extras


# --- on a GPU -----------------------------------------------------------------------------------


def jit_kernels() -> dict[str, Any]:
    """Our Triton kernels that have been imported, by name."""
    import triton

    found = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron_async."):
            for each, value in vars(module).items():
                if isinstance(value, triton.JITFunction):
                    found[f"{value.fn.__module__}.{each}"] = value
    return found


def compiled() -> Counter[str]:
    """How often each kernel has been compiled for other arguments."""
    from megatron_async.kernels import compile as cuda

    counts = Counter(
        {
            name: sum(len(caches[0]) for caches in kernel.device_caches.values())
            for name, kernel in jit_kernels().items()
        }
    )
    counts["CUDA C++"] = cuda._kernel.cache_info().misses
    return +counts


def tiny_engine(device: str) -> DynamicInferenceEngine:
    config = config_at(
        1, device=device, max_requests=5, max_sequence_length=256, prefill_chunk_tokens=16
    )
    return DynamicInferenceEngine.from_pretrained("tiny", config)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make", (small_hash_engine, tiny_engine))
def test_nothing_is_captured_or_compiled_after_the_start_on_a_gpu(
    make: Callable[[str], DynamicInferenceEngine],
    captured: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_async.kernels import compile as cuda

    # What other tests have compiled does not count.
    cuda._kernel.cache_clear()
    for kernel in jit_kernels().values():
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    with make("cuda") as engine:
        assert len(captured) == engine.runner.graph_count > 0
        captured.clear()
        monkeypatch.delattr(torch.cuda, "CUDAGraph")  # whoever makes another one fails
        at_start = compiled()
        assert any("process_logits" in name for name in at_start)
        serve(engine, asks(*PLAIN))
        assert compiled() == at_start
        # A Python function has no parameters that are compiled: its first step alone may need a
        # kernel that reads two rows of logits.
        serve(engine, asks("logits_processors"))
        with_functions = compiled()
        changed = {name for name in with_functions if with_functions[name] != at_start[name]}
        assert {name.rpartition(".")[2] for name in changed} <= {"_process_kernel"}
        serve(engine, asks(*VALUES))
        assert compiled() == with_functions
        assert captured == []
