"""The engine's configuration: frozen, validated once, every error says what to change."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field

from megatron_async.config.kv_events import KVEventsConfig, kv_events_config
from megatron_async.config.testing_options import TestingOptions, as_testing_options
from megatron_async.errors import ConfigError, shown
from megatron_async.request.parameter_checks import as_integer

DEFAULT_ASYNC_DEPTH = 1
DEFAULT_BLOCK_SIZE_TOKENS = 64
MAX_DEPTH = 64
MAX_AUTOTUNE_SECONDS = 300.0
"""Half of the time that other ranks wait for the one that measures."""
MAX_REQUESTS = 2**16
MAX_DRAFTS = 64
LEAST_DRAFT_COST = 0.05
"""Below it a draft that is never accepted would not be worth leaving out."""
MAX_RANKS = 1024
DEFAULT_RANK_TIMEOUT_SECONDS = 8.0
MAX_RANK_TIMEOUT_SECONDS = 86400.0
QUANTIZATIONS = ("fp8", "mxfp4")
KV_CACHE_DTYPES = ("fp8",)
NEEDS_QUANTIZATION = (
    "quantize_activations=True is for weights in e4m3; set quantization='fp8', or leave it out "
    "(beside experts in MXFP4 'fp8' quantizes the other linear layers)"
)
RECURRENT_STATE_DTYPES = ("float32", "bfloat16")
SPECULATIVE_METHODS = ("mtp", "ngram", "grammar")
GUIDED_ROWS = ("wait", "sit_out")
MAX_GIB = 2**30
MAX_COUNT = 2**31 - 1
"""The largest count of tokens and of blocks: packets hold them as int32."""
MAX_AUTOMATA_BYTES = 1 << 36


def check_integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """``value`` as Python's own integer; raises :class:`ConfigError` unless it is one of that
    range."""
    number = as_integer(value)
    if number is None or (low is not None and number < low):
        least = "" if low is None else f" of at least {low}"
        raise ConfigError(f"{name}={shown(value)} must be an integer{least}")
    if high is not None and number > high:
        raise ConfigError(f"{name}={shown(value)} must be at most {high}; lower it")
    return number


def check_buffer_size(gib: object) -> None:
    """Raises :class:`ConfigError` unless ``gib`` is a size that memory may have."""
    if isinstance(gib, bool) or not isinstance(gib, (int, float)) or not 0 < gib <= MAX_GIB:
        raise ConfigError(f"buffer_size_gb={shown(gib)} must be above 0 and at most {MAX_GIB}")


def check_rank_timeout(seconds: object) -> None:
    """Raises :class:`ConfigError` unless ``seconds`` is 0, or a time that a rank may take."""
    most = MAX_RANK_TIMEOUT_SECONDS
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not (seconds == 0 or 1 <= seconds <= most):  # type: ignore[operator]
        raise ConfigError(
            f"rank_timeout_seconds={shown(seconds)} must be 0, which is never, or between 1 and "
            f"{most:.0f}"
        )


def check_autotune_seconds(seconds: object) -> None:
    """Raises :class:`ConfigError` unless a start may take ``seconds`` for timing GEMMs."""
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= MAX_AUTOTUNE_SECONDS:  # type: ignore[operator]
        raise ConfigError(
            f"gemm_autotune_seconds={shown(seconds)} must be between 0 and "
            f"{MAX_AUTOTUNE_SECONDS:.0f}"
        )


def check_paused_buffer_size(gib: object) -> None:
    """Raises :class:`ConfigError` unless ``gib`` is None, or a size that may be zero."""
    if gib is None:
        return
    if isinstance(gib, bool) or not isinstance(gib, (int, float)) or not 0 <= gib <= MAX_GIB:
        raise ConfigError(
            f"paused_buffer_size_gb={shown(gib)} must be at least 0 and at most {MAX_GIB}, or None"
        )


def check_config(config: object) -> None:
    """Raises :class:`ConfigError` unless ``config`` is an :class:`EngineConfig`."""
    if not isinstance(config, EngineConfig):
        raise ConfigError(f"config is a {type(config).__name__}; give an EngineConfig")


def draft_windows(drafts: int, *, adaptive: bool) -> tuple[int, ...]:
    """The windows that steps may have, with graphs for each: 1 and 1 + ``drafts``; to choose among,
    those of 1, 2, 4, 8 and so on drafts between them."""
    between = (1 + (1 << power) for power in range(drafts.bit_length()))
    return tuple(sorted({1, 1 + drafts, *(w for w in between if adaptive and w <= drafts)}))


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How requests are scheduled and how much memory they may take.

    Attributes:
        depth: steps in flight whose tokens the host has not committed; 0 is serial decoding. None
            is what ``inference_async_scheduling`` says.
        inference_async_scheduling: the command line's and Megatron's name for a depth: True is 1,
            False and None are 0. With a ``depth`` it may only agree with it.
        max_requests: slots, which is also the most rows of one forward; at most 65,536.
        max_tokens: most tokens of one forward; None gives room for four chunks next to full decode
            rows. It never has more than ``max_requests`` chunks.
        max_sequence_length: most tokens of a request, prompt and generation; None takes the
            model's, at most 2**20, as far as the cache and a draft model have room.
        block_size_tokens: tokens of a KV-cache block; None takes the smallest size that costs
            nothing, 16 on a CPU and 64 on a GPU.
        buffer_size_gb: size of the KV cache in GiB. Give this or ``block_count``; with neither,
            the cache holds ``max_requests`` full sequences, at most 1 GiB on a CPU and 16 GiB on
            a GPU, or one full sequence if that is more; and at most three quarters of what is
            free, if ``max_sequence_length`` is not given.
        block_count: usable blocks of the KV cache.
        paused_buffer_size_gb: GiB of it that requests may keep which wait for a block; those of
            the highest priority keys beyond that are evicted. None lets them keep what they have.
        prefill_chunk_tokens: a longer prompt is prefilled in chunks of this size; from
            ``max_sequence_length`` on it means whole prompts. Chunks depend on the prompt
            and on how much of it is cached, never on what else is running.
        long_prefill_token_threshold: prompts of which more tokens are left are long. In each step
            chunks of at most ``max_long_partial_prefills`` of them run, and shorter prompts pass
            those that wait for it. None treats all prompts alike.
        max_long_partial_prefills: see above.
        enable_prefix_caching: requests with a common prefix share its KV blocks.
        state_snapshot_count: of a model with recurrent layers, states that are kept for prompts
            with a common prefix, which go on from the longest prefix that has one; None keeps four
            for each of ``max_requests``, in at most 0.25 GiB on a CPU and 4 GiB on a GPU, and 0
            none. It is memory of its own, beside ``buffer_size_gb``.
        recurrent_state_dtype: "float32" or "bfloat16" for the states of recurrent layers that sum
            over all tokens; None takes the model's, which is float32.
        inference_logging_step_interval: log the counters once in this many steps; 0 is never. A
            logged step is a barrier for itself alone.
        track_paused_request_events: record pauses in the requests' events.
        batch_invariant: a row's results do not depend on the other rows, on padding, or on whether
            a token was prefilled or decoded. Slower.
        allow_non_finite_weights: serve weights with NaN or infinite elements. Without it a model
            directory, and new weights, that have any are refused; the parameters of a model that
            was built in memory are its builder's business and are not looked at.
        generation_config: requests without sampling parameters take those of the model's
            ``generation_config.json``, and over HTTP fields that are left out do.
        random_seed: seed of the requests that bring none.
        num_speculative_tokens: tokens that are drafted for each row and step, at most 64, and
            verified by the next step. It changes no token.
        speculative_method: what drafts: "mtp", the model's layers for multi-token prediction, of
            which the last one drafts what goes beyond their number; "ngram", what followed when
            the last tokens of the request came before; or "grammar", what structured outputs and
            tools force, which is drafted beside the others too.
        tokenizer_model: a ``tokenizer.json``, or the directory of one, instead of the model's own.
        draft_model: "tiny" or the directory of a model over the same vocabulary, which drafts
            instead. It is loaded with the model, and the KV cache has room for both.
        adaptive_speculation: leave drafts out where they do not pay, by the costs of steps, which
            are measured at the start, and by how many drafts were accepted lately. It changes no
            token.
        speculative_draft_cost: what a draft adds to a step, as a share of a step without drafts,
            from 0.05 to 1. With it ``adaptive_speculation`` measures nothing, so that windows
            follow from commands alone. None measures.
        num_cuda_graphs: most row buckets captured; None captures all.
        enable_sampling_extras: keep room on the device for penalties, filters, log-probabilities
            and structured output, and capture the steps of requests that ask for them; the log
            says how much at the start. Without it such requests are refused.
        guided_rows: how rows whose masks need all tokens before are launched: "wait", in each
            step, of which one is in flight then; or "sit_out", in those behind which no launch
            waits for them, so that other rows keep their depth. It changes no token.
        guided_automata_bytes: of the device, for token automata of structured outputs: where the
            grammar of a request has a table, S makes its masks by itself, so that such rows need no
            token on the host, at any depth. Tables are made in the background for grammars that
            come again. The memory is allocated when the first request comes that finds one. 0 is
            off; None is 256 MiB on a GPU, or 1/16 of what is free there, and off on a CPU. It
            changes no token.
        late_planning: plan a step shortly before the one in flight ends, so that a request that
            comes meanwhile is in it, and not in the one behind. With depth 0 it does nothing.
        return_routed_experts: hand out the experts that each token went to, to requests that ask
            for them. Each layer of experts then leaves them in a buffer of the device.
        capture_mixed_steps: capture steps with prefill chunks too, one graph for each token
            bucket; without it their kernels are launched one by one, with the same results.
        gemm_autotune_seconds: of a start on a GPU, for timing GEMMs of decode steps whose shapes
            nobody has measured; what is fastest is kept for later starts. 0 times none.
        kv_events_config: publish which blocks the prefix cache knows, for routers outside; a
            ``KVEventsConfig``, or its fields in a mapping. None publishes nothing.
        enable_sleep_mode: weights and KV cache lie in memory that ``sleep`` gives back and
            ``wake_up`` takes again at the same addresses. So do recurrent states; tables of
            slots and a draft model's weights stay.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:N"``; None takes a GPU where there is one.
        tensor_model_parallel_size, pipeline_model_parallel_size, expert_model_parallel_size: the
            processes that share the model's layers, that have some of its layers each, and that
            have some of its experts each (``ranks/layout.py``); 1 is one process.
        pipeline_micro_batches: parts of the running requests that are planned in turns, so that
            all stages of layers compute, at most one for each request; None is one for each stage.
        rank_timeout_seconds: a rank that has not answered for so long counts as dead, and ends the
            group; eight times as long while it starts, loads or captures. 0 waits for ever.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None takes the checkpoint's on a GPU
            and float32 on a CPU.
        quantization: "fp8" keeps the weights of linear layers and experts as e4m3, those of an FP8
            checkpoint as they are stored, others quantized while they are read; experts that a
            checkpoint has in MXFP4 stay so. "mxfp4" keeps these alone. None multiplies FP8 and
            MXFP4 weights out to ``dtype``.
        quantize_activations: with quantization="fp8" linear layers and experts whose weights are
            e4m3 multiply them by inputs in e4m3, which they quantize by token, by token and group
            of columns, or, but for experts, by scales that the checkpoint brings. Fused decode
            steps on a GPU do so with 9 rows and more, in linear layers with a scale for each row.
        kv_cache_dtype: "fp8" keeps keys and values as e4m3, so that twice the tokens fit; None
            keeps them in ``dtype``. Scales by layer and head are chosen at the start, and for new
            weights.
        record: a file that gets the engine's commands with their ticket numbers; ``megatron-async
            replay`` repeats the run.
        audit_graphs: after new weights, a sleep, a wake-up, a suspension and a reset check that all
            addresses in captured graphs are those of tensors that the engine has now, and that the
            copied and derived ones have new contents; ``debug`` does it too. Steps cost the same.
        debug: poison consumed buffers and check invariants at every step.
        testing: knobs for tests and ``bench``; a ``TestingOptions``, or its fields in a mapping.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    depth: int | None = None
    inference_async_scheduling: bool | None = None
    max_requests: int = 64
    max_tokens: int | None = None
    max_sequence_length: int | None = None
    block_size_tokens: int | None = DEFAULT_BLOCK_SIZE_TOKENS
    buffer_size_gb: float | None = None
    block_count: int | None = None
    paused_buffer_size_gb: float | None = None
    prefill_chunk_tokens: int = 256
    long_prefill_token_threshold: int | None = None
    max_long_partial_prefills: int = 1
    enable_prefix_caching: bool = True
    state_snapshot_count: int | None = None
    recurrent_state_dtype: str | None = None
    inference_logging_step_interval: int = 0
    track_paused_request_events: bool = False
    batch_invariant: bool = False
    allow_non_finite_weights: bool = False
    generation_config: bool = False
    random_seed: int = 0
    num_speculative_tokens: int = 0
    speculative_method: str = "mtp"
    tokenizer_model: str | None = None
    draft_model: str | None = None
    adaptive_speculation: bool = False
    speculative_draft_cost: float | None = None
    num_cuda_graphs: int | None = None
    enable_sampling_extras: bool = True
    guided_rows: str = "wait"
    guided_automata_bytes: int | None = None
    late_planning: bool = False
    return_routed_experts: bool = False
    capture_mixed_steps: bool = True
    gemm_autotune_seconds: float = 0.0
    kv_events_config: KVEventsConfig | None = None
    enable_sleep_mode: bool = False
    device: str | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    pipeline_micro_batches: int | None = None
    rank_timeout_seconds: float = DEFAULT_RANK_TIMEOUT_SECONDS
    dtype: str | None = None
    quantization: str | None = None
    quantize_activations: bool = False
    kv_cache_dtype: str | None = None
    record: str | None = None
    audit_graphs: bool = False
    debug: bool = False
    testing: TestingOptions = field(default_factory=TestingOptions)

    def __post_init__(self) -> None:
        self._check("max_requests", 1, MAX_REQUESTS)
        self._check("block_size_tokens", 1, MAX_COUNT, optional=True)
        self._check("prefill_chunk_tokens", 1, MAX_COUNT)
        self._check("long_prefill_token_threshold", 1, MAX_COUNT, optional=True)
        self._check("max_long_partial_prefills", 1, MAX_REQUESTS)
        self._check("max_sequence_length", 2, MAX_COUNT, optional=True)
        self._check("block_count", 1, MAX_COUNT, optional=True)
        self._check("state_snapshot_count", 0, MAX_COUNT, optional=True)
        self._check("num_cuda_graphs", 1, optional=True)
        self._check("guided_automata_bytes", 0, MAX_AUTOMATA_BYTES, optional=True)
        for name in ("tensor", "pipeline", "expert"):
            self._check(f"{name}_model_parallel_size", 1, MAX_RANKS)
        self._check("pipeline_micro_batches", 1, MAX_RANKS, optional=True)
        check_rank_timeout(self.rank_timeout_seconds)
        check_autotune_seconds(self.gemm_autotune_seconds)
        self._check("num_speculative_tokens", 0, MAX_DRAFTS)
        if self.draft_model is not None and self.speculative_method != "mtp":
            raise ConfigError(
                f"draft_model and speculative_method={self.speculative_method!r} contradict each "
                "other; leave one of them out"
            )
        if self.draft_model is not None and not self.num_speculative_tokens:
            raise ConfigError("draft_model drafts nothing with num_speculative_tokens=0; raise it")
        method = self.speculative_method
        if not isinstance(method, str) or method not in SPECULATIVE_METHODS:
            known = " or ".join(SPECULATIVE_METHODS)
            raise ConfigError(f"speculative_method={shown(method)} must be {known}")
        if not isinstance(self.guided_rows, str) or self.guided_rows not in GUIDED_ROWS:
            known = " or ".join(GUIDED_ROWS)
            raise ConfigError(f"guided_rows={shown(self.guided_rows)} must be {known}")
        for name in ("tokenizer_model", "draft_model"):
            if (path := getattr(self, name)) is not None and not isinstance(path, str):
                raise ConfigError(f"{name}={shown(path)} must be a path")
        if self.record is not None and not isinstance(self.record, str | os.PathLike):
            raise ConfigError(f"record={shown(self.record)} must be the path of a file")
        options = as_testing_options(self.testing)
        options.check_windows(set(draft_windows(self.num_speculative_tokens, adaptive=True)))
        object.__setattr__(self, "testing", options)
        self._check_draft_cost()
        object.__setattr__(self, "kv_events_config", kv_events_config(self.kv_events_config))
        self._check("depth", 0, MAX_DEPTH, optional=True)
        self._check("inference_logging_step_interval", 0)
        self._check("max_tokens", 1, optional=True)
        self._check("random_seed")
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if isinstance(one.default, bool) and not isinstance(value, bool):
                raise ConfigError(f"{one.name}={shown(value)} must be True or False")
        self._check_async_scheduling()
        if self.buffer_size_gb is not None:
            if self.block_count is not None:
                raise ConfigError(
                    f"buffer_size_gb={self.buffer_size_gb} and block_count={self.block_count} "
                    "contradict each other; set one of them"
                )
            check_buffer_size(self.buffer_size_gb)
        check_paused_buffer_size(self.paused_buffer_size_gb)
        least = self.max_requests + self.prefill_chunk_tokens
        if self.max_tokens is not None and self.max_tokens < least:
            raise ConfigError(
                f"max_tokens={self.max_tokens} must be at least max_requests + "
                f"prefill_chunk_tokens = {least}, so that a chunk fits beside the decoding rows"
            )
        state_dtype = self.recurrent_state_dtype
        is_name = isinstance(state_dtype, str) and state_dtype in RECURRENT_STATE_DTYPES
        if state_dtype is not None and not is_name:
            raise ConfigError(
                f"recurrent_state_dtype={shown(state_dtype)} must be float32 or bfloat16"
            )
        names = ("float32", "bfloat16", "float16")
        if self.dtype is not None and not (isinstance(self.dtype, str) and self.dtype in names):
            raise ConfigError(f"dtype={shown(self.dtype)} must be float32, bfloat16 or float16")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise ConfigError(
                f"quantization={shown(self.quantization)} must be 'fp8', 'mxfp4' or None"
            )
        if self.quantize_activations and self.quantization != "fp8":
            raise ConfigError(NEEDS_QUANTIZATION)
        if self.kv_cache_dtype is not None and self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ConfigError(
                f"kv_cache_dtype={shown(self.kv_cache_dtype)} must be 'fp8' or None, for dtype's"
            )

    def _check_draft_cost(self) -> None:
        """A number in its range, beside ``adaptive_speculation`` and no other costs."""
        cost = self.speculative_draft_cost
        if cost is None:
            return
        is_number = isinstance(cost, (int, float)) and not isinstance(cost, bool)
        if not is_number or not LEAST_DRAFT_COST <= cost <= 1:
            raise ConfigError(
                f"speculative_draft_cost={shown(cost)} must be from {LEAST_DRAFT_COST} to 1, a "
                "share of a step without drafts"
            )
        if not self.adaptive_speculation:
            raise ConfigError("speculative_draft_cost is for adaptive_speculation=True; add that")
        if self.testing.speculative_step_costs is not None:
            raise ConfigError(
                "speculative_draft_cost and testing.speculative_step_costs contradict each other; "
                "leave one of them out"
            )

    def _check_async_scheduling(self) -> None:
        """An alias of ``depth`` that says something else than it is refused."""
        asynchronous = self.inference_async_scheduling
        if asynchronous is not None and not isinstance(asynchronous, bool):
            name = "inference_async_scheduling"
            raise ConfigError(f"{name}={shown(asynchronous)} must be True or False")
        if None not in (asynchronous, self.depth) and asynchronous != (self.depth != 0):
            decoding = "asynchronous" if self.depth else "serial"
            raise ConfigError(
                f"depth={self.depth} is {decoding} decoding and contradicts "
                f"inference_async_scheduling={asynchronous}; leave one of them out"
            )

    def _check(
        self, name: str, low: int | None = None, high: int | None = None, *, optional: bool = False
    ) -> None:
        """An integer of that range, Python's own from now on."""
        value = getattr(self, name)
        if not (optional and value is None):
            object.__setattr__(self, name, check_integer(name, value, low, high))

    @property
    def audits(self) -> bool:
        """Graphs are to be audited."""
        return self.audit_graphs or self.debug

    @property
    def effective_depth(self) -> int:
        """Steps that may be in flight uncommitted: 0 is serial decoding."""
        if self.depth is not None:
            return self.depth
        return DEFAULT_ASYNC_DEPTH if self.inference_async_scheduling else 0
