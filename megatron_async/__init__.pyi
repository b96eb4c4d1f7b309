"""The names of :data:`HOMES` for type checkers; ``tests/unit/test_public_names.py`` compares."""

from megatron_async.config.engine_config import EngineConfig as EngineConfig
from megatron_async.engine.engine import DynamicInferenceEngine as DynamicInferenceEngine
from megatron_async.engine.requests.output_processor import TokenOutput as TokenOutput
from megatron_async.errors import EngineSuspendedError as EngineSuspendedError
from megatron_async.grammar.spec import StructuredOutputs as StructuredOutputs
from megatron_async.megatron_api.context import DynamicInferenceContext as DynamicInferenceContext
from megatron_async.megatron_api.inference_config import InferenceConfig as InferenceConfig
from megatron_async.megatron_api.llm import MegatronAsyncLLM as MegatronAsyncLLM
from megatron_async.megatron_api.llm import MegatronLLM as MegatronLLM
from megatron_async.megatron_api.model import GPTInferenceWrapper as GPTInferenceWrapper
from megatron_async.megatron_api.model import TextGenerationController as TextGenerationController
from megatron_async.request.request import DynamicInferenceRequest as DynamicInferenceRequest
from megatron_async.request.request import FinishReason as FinishReason
from megatron_async.request.request import RequestFuture as RequestFuture
from megatron_async.request.request import Rollout as Rollout
from megatron_async.request.request import StepReport as StepReport
from megatron_async.request.request import TokenLogProbs as TokenLogProbs
from megatron_async.request.scores import Score as Score
from megatron_async.sampling_params import SamplingParams as SamplingParams
from megatron_async.version import __version__ as __version__

HOMES: dict[str, str]
__all__: list[str]
