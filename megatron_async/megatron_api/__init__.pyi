"""The names of :data:`HOMES` for type checkers; ``tests/unit/test_public_names.py`` compares."""

from megatron_async.errors import EngineSuspendedError as EngineSuspendedError
from megatron_async.errors import RequestError as _RequestError
from megatron_async.errors import RequestTooLongError as _RequestTooLongError
from megatron_async.megatron_api.context import BlockAllocator as BlockAllocator
from megatron_async.megatron_api.context import DynamicInferenceContext as DynamicInferenceContext
from megatron_async.megatron_api.coordinator.client import InferenceClient as InferenceClient
from megatron_async.megatron_api.coordinator.epochs import (
    FinishedRequestRecord as FinishedRequestRecord,
)
from megatron_async.megatron_api.coordinator.headers import Headers as Headers
from megatron_async.megatron_api.coordinator.states import EngineState as EngineState
from megatron_async.megatron_api.engine import DynamicInferenceEngine as DynamicInferenceEngine
from megatron_async.megatron_api.inference_config import AsyncScheduleMode as AsyncScheduleMode
from megatron_async.megatron_api.inference_config import (
    CudaGraphSizingDistribution as CudaGraphSizingDistribution,
)
from megatron_async.megatron_api.inference_config import InferenceConfig as InferenceConfig
from megatron_async.megatron_api.inference_config import (
    KVCacheManagementMode as KVCacheManagementMode,
)
from megatron_async.megatron_api.inference_config import (
    PrefixCachingCoordinatorPolicy as PrefixCachingCoordinatorPolicy,
)
from megatron_async.megatron_api.inference_config import (
    PrefixCachingEvictionPolicy as PrefixCachingEvictionPolicy,
)
from megatron_async.megatron_api.llm import MegatronAsyncLLM as MegatronAsyncLLM
from megatron_async.megatron_api.llm import MegatronLLM as MegatronLLM
from megatron_async.megatron_api.model import GPTInferenceWrapper as GPTInferenceWrapper
from megatron_async.megatron_api.model import TextGenerationController as TextGenerationController
from megatron_async.request.request import DynamicInferenceEvent as DynamicInferenceEvent
from megatron_async.request.request import DynamicInferenceEventType as DynamicInferenceEventType
from megatron_async.request.request import DynamicInferenceRequest as DynamicInferenceRequest
from megatron_async.request.request import Status as Status
from megatron_async.sampling_params import SamplingParams as SamplingParams

ContextOverflowError = _RequestError
MaxSequenceLengthOverflowError = _RequestTooLongError
DynamicInferenceRequestRecord = DynamicInferenceRequest

HOMES: dict[str, tuple[str, str]]
__all__: list[str]
