"""Decode steps of megatron-core's own engine and of ours, on one model object.

    python scripts/compare_megatron.py --shape 8b --batch 1 32 [--stand-ins PATH ...] [--json FILE]

A ``GPTModel`` of megatron-core with random weights is served by its ``DynamicInferenceEngine`` (in
each mode of the release), is then adapted in place, and served by ours at depth 0 and 1, with the
same prompts. All decode greedily. Tokens must be equal up to near ties: where two engines part, a
plain forward in float32 over what came before must find both tokens within ``--tie`` times the
rounding noise of each other: the standard deviation of what the model's own precision changes in a
logit. What follows is not compared, since prompts differ from there on.

megatron-core's engine needs flash-attn and flashinfer; ``--stand-ins`` are folders that come first
on the path and have packages in their place.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SHAPES: dict[str, dict[str, Any]] = {
    "8b": dict(num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32,
               num_query_groups=8, kv_channels=128, vocab=128256, theta=500000, tied=False),
    "0.6b": dict(num_layers=28, hidden_size=1024, ffn_hidden_size=3072, num_attention_heads=16,
                 num_query_groups=8, kv_channels=128, vocab=151936, theta=1000000, tied=True,
                 qk_layernorm=True),
    "tiny": dict(num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4,
                 num_query_groups=2, kv_channels=16, vocab=512, theta=10000, tied=True),
}  # fmt: skip
"""Llama-3.1-8B, Qwen3-0.6B, and one for tests."""
WARM_UP_STEPS = 8


class Run(NamedTuple):
    """One engine over all prompts.

    Args:
        name: of the engine and its mode.
        tokens: generated, of each prompt.
        steps: seconds of each step in which all requests decoded.
    """

    name: str
    tokens: list[list[int]]
    steps: list[float]

    @property
    def milliseconds(self) -> float:
        """The median of a step, behind the first ones."""
        return 1000 * statistics.median(self.steps[WARM_UP_STEPS:] or self.steps)


class Parting(NamedTuple):
    """Where two engines first gave different tokens to a prompt."""

    prompt: int
    position: int
    tokens: tuple[int, int]


def partings(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> list[Parting]:
    """The first difference of each prompt that has one.

    Raises:
        ValueError: they have another number of prompts, or of tokens.
    """
    if [len(tokens) for tokens in one] != [len(tokens) for tokens in other]:
        raise ValueError("the engines gave another number of tokens")
    found = []
    for prompt, (a, b) in enumerate(zip(one, other, strict=True)):
        for position, pair in enumerate(zip(a, b, strict=True)):
            if pair[0] != pair[1]:
                found.append(Parting(prompt, position, pair))
                break
    return found


def beyond_ties(
    found: Sequence[Parting], gap: Callable[[Parting], float], tie: float
) -> list[tuple[Parting, float]]:
    """The partings whose gap of logits exceeds ``tie``, and the gap, in units of rounding noise."""
    gaps = [(parting, gap(parting)) for parting in found]
    return [(parting, size) for parting, size in gaps if not size <= tie]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each shape and batch, a column for each engine, ms a step."""
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    lines = [f"| shape | batch | {' | '.join(engines)} |", "|---|---" + "|---" * len(engines) + "|"]
    for shape, batch in dict.fromkeys((row["shape"], row["batch"]) for row in rows):
        cells = [
            next(
                (
                    f"{row['ms']:.2f}"
                    for row in rows
                    if (row["shape"], row["batch"], row["engine"]) == (shape, batch, engine)
                ),
                "",
            )
            for engine in engines
        ]
        lines.append(f"| {shape} | {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def prompts_of(count: int, length: int, vocab: int, seed: int = 123) -> list[list[int]]:
    """Random token ids."""
    draw = random.Random(seed)
    return [[draw.randrange(10, min(vocab, 50000)) for _ in range(length)] for _ in range(count)]


# --- the model and its two engines ------------------------------------------------------------


def build(shape: dict[str, Any], device: Any, max_length: int) -> Any:
    """A megatron-core ``GPTModel`` in bfloat16, or in float32 on a CPU."""
    import torch

    from megatron_async import megatron_compat as compat
    from megatron.core.models.gpt import GPTModel  # isort: skip
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
    from megatron.core.transformer import TransformerConfig  # isort: skip

    compat.ensure_parallel_state()
    values = dict(shape)
    vocab, theta, tied = (values.pop(name) for name in ("vocab", "theta", "tied"))
    on_gpu = device.type == "cuda"
    graphs: dict[str, Any] = {}
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if on_gpu:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from megatron_async.megatron_compat import engines

        model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)
        graphs = engines.config_options()
    config = TransformerConfig(
        **values, params_dtype=dtype, pipeline_dtype=dtype, bf16=on_gpu, normalization="RMSNorm",
        add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0, attention_dropout=0.0, attention_softmax_in_fp32=False,
        bias_activation_fusion=on_gpu, bias_dropout_fusion=on_gpu, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, use_cpu_initialization=not on_gpu,
        perform_initialization=not on_gpu, inference_rng_tracker=True,
        **graphs,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    model = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=vocab,
        max_sequence_length=max_length, share_embeddings_and_output_weights=tied,
        position_embedding_type="rope", rotary_base=theta, parallel_output=True,
    )  # fmt: skip
    model = model.to(device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02, generator=generator)
            else:
                parameter.fill_(1)
    return model.eval()


def run_megatron(model: Any, mode: str, prompts: list[list[int]], count: int) -> Run:
    """megatron-core's engine, until all prompts have ``count`` tokens."""
    import torch

    from megatron_async.megatron_compat import engines

    longest = max(map(len, prompts)) + count + 1
    with torch.inference_mode():
        engine = engines.megatron_engine(
            model, mode, max_requests=len(prompts), max_tokens=sum(map(len, prompts)) + 64,
            max_sequence_length=longest,
        )  # fmt: skip
        for number, prompt in enumerate(prompts):
            engine.add_request(number, prompt, engines.greedy(count))
        found: dict[int, list[int]] = {}
        steps = []
        while engine.has_unfinished_requests():
            started = time.perf_counter()
            result = engine.step_modern()
            seconds = time.perf_counter() - started
            done = result["finished_request_records"]
            if not done and len(result["active_request_ids"]) == len(prompts):
                steps.append(seconds)
            found |= engines.tokens_of(done)
    engines.leave_inference(model)
    return Run(f"megatron-core, {mode}", [found[n] for n in range(len(prompts))], steps)


def run_ours(model: Any, depth: int, prompts: list[list[int]], count: int) -> Run:
    """Our engine over the same object, which is adapted in place."""
    from megatron_async import EngineConfig, SamplingParams
    from megatron_async.engine.engine import DynamicInferenceEngine
    from megatron_async.models.gpt_network import GPTNetwork
    from megatron_async.models.served import ServedModel

    network = GPTNetwork(model)
    config = EngineConfig(
        device=str(network.device), max_requests=len(prompts), depth=depth,
        enable_prefix_caching=False,
    )  # fmt: skip
    steps = []
    params = SamplingParams(num_tokens_to_generate=count, temperature=0.0, termination_id=-1)
    with DynamicInferenceEngine(ServedModel(network=network), config) as engine:
        futures = [engine.add_request(n, prompt, params) for n, prompt in enumerate(prompts)]
        while engine.has_unfinished_requests():
            started = time.perf_counter()
            result = engine.step_modern()
            seconds = time.perf_counter() - started
            if not result["finished_request_records"] and len(result["active_request_ids"]) == len(
                prompts
            ):
                steps.append(seconds)
        tokens = [list(future.result().generated_tokens) for future in futures]
    return Run(f"ours, depth {depth}", tokens, steps)


class Logits:
    """The logits behind what came before a parting, in the model's precision and in float32.

    Args:
        model: :meth:`measure` moves it to float32, for good.
    """

    def __init__(self, model: Any, prompts: list[list[int]], tokens: list[list[int]]) -> None:
        self._model = model
        self._prompts, self._tokens = prompts, tokens
        self._own: dict[tuple[int, int], Any] = {}
        self._exact: dict[tuple[int, int], Any] = {}

    def _forward(self, parting: Parting) -> Any:
        import torch

        before = self._prompts[parting.prompt] + self._tokens[parting.prompt][: parting.position]
        device = next(self._model.parameters()).device
        ids = torch.tensor([before], device=device)
        with torch.no_grad():
            positions = torch.arange(len(before), device=device)[None]
            return self._model(ids, positions, None)[0, -1].float().cpu()

    def measure(self, found: Sequence[Parting]) -> None:
        """Run the forwards that :meth:`gap` needs, in both precisions."""
        import torch

        places = {(parting.prompt, parting.position): parting for parting in found}
        self._own = {place: self._forward(parting) for place, parting in places.items()}
        self._model.float()
        for field in ("params_dtype", "pipeline_dtype"):
            setattr(self._model.config, field, torch.float32)
        self._exact = {place: self._forward(parting) for place, parting in places.items()}

    def gap(self, parting: Parting) -> float:
        """The gap of the two tokens' logits in float32, in units of rounding noise."""
        exact = self._exact[parting.prompt, parting.position]
        noise = float((self._own[parting.prompt, parting.position] - exact).std())
        one, other = parting.tokens
        gap = abs(float(exact[one] - exact[other]))
        return gap / noise if noise else float("inf") if gap else 0.0


def compare(
    name: str, model: Any, prompts: list[list[int]], count: int, tie: float, *, theirs: bool = True
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the table, and what went beyond near ties."""
    runs = []
    if theirs:
        from megatron_async.megatron_compat import engines

        for mode in engines.MODES:
            runs.append(run_megatron(model, mode, prompts, count))
            gc.collect()
    runs += [run_ours(model, depth, prompts, count) for depth in (0, 1)]
    rows, wrong = [], []
    ours = runs[-1]
    parted = [partings(run.tokens, ours.tokens) for run in runs]
    logits = Logits(model, prompts, ours.tokens)
    logits.measure([parting for found in parted for parting in found])
    for run, found in zip(runs, parted, strict=True):
        bad = beyond_ties(found, logits.gap, tie)
        wrong += [f"{name}, batch {len(prompts)}: {run.name}: {each}" for each in bad]
        rows.append(
            {
                "shape": name, "batch": len(prompts), "engine": run.name, "ms": run.milliseconds,
                "steps": len(run.steps), "partings": len(found), "beyond_ties": len(bad),
            }
        )  # fmt: skip
    return rows, wrong


def main(argv: list[str] | None = None) -> int:
    """Run the command; 1 if tokens differ beyond near ties."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["8b"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument(
        "--tie",
        type=float,
        default=6.0,
        metavar="N",
        help="largest gap of logits of a tie, in units of rounding noise",
    )
    parser.add_argument("--stand-ins", type=Path, nargs="*", default=[], metavar="PATH")
    parser.add_argument("--ours-alone", action="store_true", help="without megatron-core's engine")
    parser.add_argument("--json", type=Path, help="where the rows go, too")
    options = parser.parse_args(argv)
    sys.path[:0] = [str(path) for path in options.stand_ins]
    import torch

    from megatron_async import megatron_compat as compat

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, wrong = [], []
    for name in options.shape:
        for batch in options.batch:
            # Adapting is for good, so each batch has a model of its own.
            length = options.prompt_tokens + options.new_tokens + 1
            model = build(SHAPES[name], device, length)
            prompts = prompts_of(batch, options.prompt_tokens, SHAPES[name]["vocab"])
            found, bad = compare(
                name, model, prompts, options.new_tokens, options.tie,
                theirs=not options.ours_alone,
            )  # fmt: skip
            rows += found
            wrong += bad
            del model
            gc.collect()
    print(f"megatron-core {compat.installed().version}, torch {torch.__version__}, {device}\n")
    print(table(rows))
    for row in rows:
        print(f"{row['shape']}, batch {row['batch']}, {row['engine']}: {row['partings']} near ties")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    for line in wrong:
        print(f"beyond a tie: {line}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
