"""The names of ``HOMES`` for type checkers; ``tests/unit/test_public_names.py`` compares."""

from megatron_async.contrib.transformers.captured.generate import (
    CapturedGenerate as CapturedGenerate,
)
from megatron_async.contrib.transformers.captured.generate import (
    generate_captured as generate_captured,
)
from megatron_async.contrib.transformers.engine.batch import (
    async_generate_batch as async_generate_batch,
)
from megatron_async.contrib.transformers.engine.manager import (
    AsyncContinuousBatchingManager as AsyncContinuousBatchingManager,
)
from megatron_async.contrib.transformers.stopping.criteria import (
    AsyncStoppingCriteriaList as AsyncStoppingCriteriaList,
)
from megatron_async.contrib.transformers.stopping.criteria import reads_on_host as reads_on_host
from megatron_async.contrib.transformers.stopping.generate import AsyncGenerate as AsyncGenerate
from megatron_async.contrib.transformers.stopping.generate import async_generate as async_generate
from megatron_async.contrib.transformers.stopping.generate import async_stopping as async_stopping
from megatron_async.contrib.transformers.stopping.streams import (
    alternating_streams as alternating_streams,
)

HOMES: dict[str, str]
__all__: list[str]
