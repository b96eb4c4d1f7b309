"""``system_fingerprint`` of answers: a client compares it to know whether the same seed may give
another text now."""

from __future__ import annotations

import json
from hashlib import blake2b

from megatron_async.serving.messages import Kept, Launch
from megatron_async.version import __version__

UNRELATED = frozenset({"record", "kv_events_config"})
"""Fields of an ``EngineConfig`` that no answer depends on, and that differ between replicas."""
HASH_BYTES = 4


def fingerprint_of(launch: Launch, kept: Kept) -> str:
    """The version and a hash of model, configuration and weights, in the form of vLLM's."""
    config = {name: value for name, value in launch.config.items() if name not in UNRELATED}
    said = json.dumps(
        [launch.model, config, kept.weights, kept.weight_version], sort_keys=True, default=str
    )
    digest = blake2b(said.encode("utf-8", "surrogateescape"), digest_size=HASH_BYTES).hexdigest()
    return f"megatron-async-{__version__}-{digest}"
