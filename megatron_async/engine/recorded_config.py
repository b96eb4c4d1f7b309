"""What a recorded run may set of the configuration: a run is somebody else's data.

A run sets how requests are scheduled and how tokens are computed. It opens no file and no port, and
chooses no GPU: what could is refused, or is for the user to allow.
"""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.path import EMBEDDED, RANDOM
from megatron_async.config.engine_config import EngineConfig
from megatron_async.engine.commands import Command, UpdateWeights
from megatron_async.errors import ConfigError, shown

TAKEN = (
    "depth",
    "inference_async_scheduling",
    "max_requests",
    "max_tokens",
    "max_sequence_length",
    "block_size_tokens",
    "buffer_size_gb",
    "block_count",
    "paused_buffer_size_gb",
    "prefill_chunk_tokens",
    "long_prefill_token_threshold",
    "max_long_partial_prefills",
    "enable_prefix_caching",
    "state_snapshot_count",
    "recurrent_state_dtype",
    "inference_logging_step_interval",
    "track_paused_request_events",
    "batch_invariant",
    "allow_non_finite_weights",
    "generation_config",
    "random_seed",
    "num_speculative_tokens",
    "speculative_method",
    "adaptive_speculation",
    "speculative_draft_cost",
    "num_cuda_graphs",
    "enable_sampling_extras",
    "guided_rows",
    "guided_automata_bytes",
    "late_planning",
    "return_routed_experts",
    "capture_mixed_steps",
    "enable_sleep_mode",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "pipeline_micro_batches",
    "rank_timeout_seconds",
    "dtype",
    "quantization",
    "quantize_activations",
    "kv_cache_dtype",
    "audit_graphs",
    "debug",
    "testing",
)
"""Fields that a replay takes from a run; sizes of ranks are compared with the machine as all are.
"""
PATHS = ("tokenizer_model", "draft_model")
"""Fields that name files; :func:`check_paths` is for files of others."""
MACHINE = ("device", "gemm_autotune_seconds")
"""Fields that say where a run was; a replay takes the CPU from it alone."""
REFUSED = ("record", "kv_events_config")
"""Fields that no recorder writes: they would open files and ports."""


def config_of_run(data: object) -> EngineConfig:
    """The configuration that the header of a run describes.

    Raises:
        ConfigError: it sets what a run may not, or a value is wrong.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"config={shown(data)} must be an object")
    # Runs of before there were automata had none.
    values: dict[str, Any] = {"guided_automata_bytes": 0}
    for name, value in data.items():
        if name in TAKEN or name in PATHS:
            values[name] = value
        elif name in REFUSED:
            if value is not None:
                raise ConfigError(f"config sets {name}={shown(value)}, which a run may not set")
        elif name not in MACHINE:
            raise ConfigError(f"config sets {shown(name)}, which this version does not know")
    if data.get("device") == "cpu":
        values["device"] = "cpu"
    return EngineConfig(**values)


def check_paths(config: EngineConfig, commands: list[Command]) -> None:
    """Raises :class:`ConfigError` if a replay would read files that the run names."""
    named = {name: getattr(config, name) for name in PATHS}
    named = {
        name: path
        for name, path in named.items()
        if path not in (None, *EMBEDDED) and not path.startswith(RANDOM)
    }
    for command in commands:
        if isinstance(command, UpdateWeights) and command.source is not None:
            named["new weights"] = command.source
    for name, path in named.items():
        raise ConfigError(
            f"the run reads {name} from {shown(path)}; look whether that is yours, and add "
            "--trust-paths"
        )
