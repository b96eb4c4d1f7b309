"""SmolLM3: each fourth layer has no rotation (NoPE)."""

from __future__ import annotations

from typing import Any

from megatron_async.checkpoint.huggingface.family import Family, layer_count, sliding_layers
from megatron_async.checkpoint.reading.fields import Fields


def config(fields: Fields) -> dict[str, Any]:
    layers = layer_count(fields)
    interval = fields.read("no_rope_layer_interval", int, 4)
    rotated = fields.optional("no_rope_layers", list)
    if rotated is None:
        rotated = [int((n + 1) % max(interval, 1) != 0) for n in range(layers)]
    if len(rotated) != layers or not set(map(str, rotated)) <= {"0", "1"}:
        raise fields.unsupported("no_rope_layers", "1 (rotation) or 0 for each layer")
    uses_window = fields.read("use_sliding_window", bool, False)
    window = fields.optional("sliding_window", int) if uses_window else None
    nope = tuple(n for n in range(layers) if not rotated[n])
    return {"nope_layers": nope, **sliding_layers(fields, window, lambda n: n in nope)}


FAMILY = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    config=config,
    defaults={"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True},
)
