"""The baseline of ``bench``: ``generate`` of transformers on the same shape."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from megatron_async.models.config import ModelConfig

from .bench_engine import free_memory
from .bench_timeline import percentile

SKIPPED_STEPS = 8

Requests = list[tuple[list[int], int]]
"""Prompts, and how many tokens to generate."""


class NoBaselineError(Exception):
    """Why there is nothing to compare with."""


def transformers_config(config: ModelConfig) -> Any:
    """The same architecture as transformers has it.

    Raises:
        NoBaselineError: transformers is missing, or has no such architecture that we know of.
    """
    if importlib.util.find_spec("transformers") is None:
        raise NoBaselineError("transformers is not installed")
    try:
        import transformers
    except ImportError as error:
        raise NoBaselineError(f"transformers is broken: {first_line(error)}") from None

    is_llama = (config.normalization, config.activation) == ("RMSNorm", "swiglu")
    biased = config.qkv_bias or config.attention_output_bias or config.mlp_bias
    if config.position_embedding == "rope" and is_llama and not biased:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
        if config.rope_scaling is not None:
            scaling = config.to_dict()["rope_scaling"]
            rope = {"rope_type": "llama3", "rope_theta": config.rope_theta, **scaling}
        make = transformers.Qwen3Config if config.qk_norm else transformers.LlamaConfig
        return make(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_sequence_length,
            rms_norm_eps=config.norm_epsilon,
            tie_word_embeddings=config.tie_word_embeddings,
            rope_parameters=rope,
        )
    is_gpt2 = (config.normalization, config.activation) == ("LayerNorm", "gelu_tanh")
    if config.position_embedding == "learned_absolute" and is_gpt2 and config.qkv_bias:
        return transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.max_sequence_length,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_attention_heads,
            n_inner=config.ffn_hidden_size,
            layer_norm_epsilon=config.norm_epsilon,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    raise NoBaselineError("this architecture has no counterpart in transformers that bench knows")


class TransformersBaseline:
    """A model of transformers with random weights that decodes the load of ``bench``.

    ``generate``, greedy, with a static cache; its forward is compiled on a GPU, as transformers
    does by default, and not on a CPU, where that takes longer than the measurement.

    Raises:
        NoBaselineError: see :func:`transformers_config`, or building the model failed.
    """

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self.compiled = device.type == "cuda"
        self._model, self.version = build_model(config, device, dtype)

    def measure(self, requests: Requests, most_rows: int) -> list[dict[str, Any]]:
        """The figures of steady decode steps, under the names of ours.

        Raises:
            NoBaselineError: transformers cannot decode this.
        """
        if len({(len(prompt), new_tokens) for prompt, new_tokens in requests}) > 1:
            raise NoBaselineError("generate decodes requests of one length only")
        started = time.perf_counter()
        try:
            self._generate(requests)  # compiles
            warm_seconds = time.perf_counter() - started
            ends = self._generate(requests)
        except Exception as error:
            raise NoBaselineError(f"transformers failed: {first_line(error)}") from None
        engine = f"transformers {self.version} generate, static cache"
        row = {
            "batch": len(requests),
            "engine": engine + (", compiled" if self.compiled else ""),
            **step_figures(ends[SKIPPED_STEPS:], len(requests)),
            "first_run_seconds": warm_seconds,
        }
        return [row]

    def close(self) -> None:
        """Free the model."""
        del self._model
        free_memory()

    def _generate(self, requests: Requests) -> list[float]:
        ends: list[float] = []
        batch_size, new_tokens = len(requests), requests[0][1]
        going_on = torch.zeros(batch_size, dtype=torch.bool, device=self._device)

        def clock(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            # generate itself waits for the device once a step, so these times follow the steps.
            ends.append(time.perf_counter())
            return going_on

        ids = torch.tensor([prompt for prompt, _ in requests], device=self._device)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
                cache_implementation="static",
                disable_compile=not self.compiled,
                stopping_criteria=[clock],
            )
        return ends


def build_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, attention: str | None = None
) -> tuple[Any, str]:
    """A model of transformers with random weights, and the version of transformers.

    Raises:
        NoBaselineError: see :func:`transformers_config`, or building the model failed.
    """
    hf_config = transformers_config(config)
    import transformers

    try:
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
        if attention is not None:
            model.set_attn_implementation(attention)
    except Exception as error:
        raise NoBaselineError(f"transformers cannot build it: {first_line(error)}") from None
    return model.to(device).eval(), transformers.__version__


def step_figures(ends: Sequence[float], batch_size: int) -> dict[str, Any]:
    """Figures of steps that ended at these times, in seconds.

    Raises:
        NoBaselineError: there are too few.
    """
    steps = [1e3 * (after - before) for before, after in itertools.pairwise(ends)]
    if not steps:
        raise NoBaselineError("too few steps; raise --new-tokens")
    mean = statistics.fmean(steps)
    return {
        "steps": len(steps),
        "step_ms_mean": mean,
        "step_ms_p50": statistics.median(steps),
        "step_ms_p99": percentile(steps, 0.99),
        "tokens_per_second": 1e3 * batch_size / mean,
    }


def first_line(error: BaseException) -> str:
    """An error's type and what it says first."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
