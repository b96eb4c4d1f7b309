"""The engine on a GPU over the shapes that models have: head sizes, groups, blocks, long contexts.

In fp32 its tokens are those of the engine on the CPU, whose attention is PyTorch's. Shapes that no
model has must work as well, or be refused when the engine is built.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from megatron_async.build.spec import EngineSpec
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import MegatronAsyncError
from megatron_async.kernels.attention.paged_attention import KERNEL_HEAD_DIM
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.served import ServedModel
from megatron_async.runner.memory.cache_attention import warn_of_slow_attention
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import config_at
from tests.unit.models.test_forward_accuracy import Rig, draw_weights

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=gpu)])

HEAD_SIZES = (64, 96, 128, 256)
GROUPS = (1, 2, 4, 8, 16)
BLOCK_SIZES = (16, 32, 64, 128)
# Every head size with every block size; the groups in turn, four of the five with each head size.
SHAPES = [
    (head_dim, GROUPS[n % len(GROUPS)], block_size)
    for n, (head_dim, block_size) in enumerate(itertools.product(HEAD_SIZES, BLOCK_SIZES))
]
# No model's: heads that no power of two divides, beyond the kernel, odd; blocks below and beside a
# tile, of one token, longer than every sequence; groups that are no power of two.
ODD_SHAPES = [(80, 2, 64), (64, 4, 8), (16, 3, 1), (112, 6, 48), (320, 2, 64), (33, 5, 512)]

PROMPT_LENGTHS = (3, 57, 120)
NEW_TOKENS = 16
"""Two of the prompts grow over an end of a block, of 16 to 128 tokens."""
CHUNK = 64
LONG_CONTEXT = 131072


def model_config(head_dim: int, group: int, max_sequence_length: int = 256) -> ModelConfig:
    """Two layers of the shape, with norms of queries and keys in every other group."""
    kv_heads = 1 if group > 8 else 2
    return ModelConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=128,
        vocab_size=256,
        max_sequence_length=max_sequence_length,
        qk_norm=group in (2, 8),
        position_embedding="learned_absolute" if head_dim % 2 else "rope",
    )


def decode(config: ModelConfig, block_size: int, device: str) -> list[list[int]]:
    """Greedy tokens in fp32, the same weights and prompts on every device."""
    model = build_model(config, device=device, dtype=torch.float32, initialize=False)
    draw_weights(model)
    wrapper = GPTNetwork(model)
    engine_config = config_at(
        1,
        device=device,
        max_requests=len(PROMPT_LENGTHS),
        max_tokens=len(PROMPT_LENGTHS) + CHUNK,
        block_size_tokens=block_size,
        prefill_chunk_tokens=CHUNK,
        num_cuda_graphs=1,
    )
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, 256, (n,), generator=generator) for n in PROMPT_LENGTHS]
    params = SamplingParams(temperature=0, num_tokens_to_generate=NEW_TOKENS, termination_id=-1)
    with DynamicInferenceEngine(
        ServedModel(network=wrapper),
        engine_config,
    ) as engine:
        requests = engine.generate(list(prompts), params)
        assert engine.counters.prefill_chunks == 1 + 1 + 2
    return [request.generated_tokens for request in requests]


@pytest.fixture(autouse=True)
def full_fp32() -> Iterator[None]:
    """No TF32 in products, whatever another test left."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def name(shape: tuple[int, int, int]) -> str:
    return "head{}-group{}-block{}".format(*shape)


def test_all_sizes_are_covered() -> None:
    assert {(head, block) for head, _, block in SHAPES} == set(
        itertools.product(HEAD_SIZES, BLOCK_SIZES)
    )
    assert {group for _, group, _ in SHAPES} == set(GROUPS)
    for head_dim in HEAD_SIZES:
        assert len({group for head, group, _ in SHAPES if head == head_dim}) == 4


@on_gpu
@pytest.mark.parametrize("shape", SHAPES, ids=name)
def test_fp32_tokens_are_the_cpus(shape: tuple[int, int, int], device: str) -> None:
    head_dim, group, block_size = shape
    config = model_config(head_dim, group)
    tokens = decode(config, block_size, device)
    assert tokens == decode(config, block_size, "cpu")
    assert len({token for request in tokens for token in request}) > NEW_TOKENS


@on_gpu
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=name)
def test_fp32_tokens_of_odd_shapes_are_the_cpus(
    shape: tuple[int, int, int], device: str, caplog: pytest.LogCaptureFixture
) -> None:
    head_dim, group, block_size = shape
    config = model_config(head_dim, group)
    warn_of_slow_attention.cache_clear()
    assert decode(config, block_size, device) == decode(config, block_size, "cpu")
    warned = [record for record in caplog.records if "head size" in record.getMessage()]
    assert len(warned) == (head_dim > KERNEL_HEAD_DIM)


@on_gpu
@pytest.mark.parametrize("shape", SHAPES[::5], ids=name)
def test_bf16_logits_are_those_of_a_float64_forward(
    shape: tuple[int, int, int], device: str
) -> None:
    """Tiles of 16-bit values are others than those of fp32."""
    head_dim, group, block_size = shape
    rig = Rig(
        model_config(head_dim, group),
        torch.bfloat16,
        device,
        3,
        block_size_tokens=block_size,
        prefill_chunk_tokens=CHUNK,
        num_cuda_graphs=1,
    )
    with rig.engine:
        assert max(rig.worst_errors(3, prompt_tokens=125)) < 2e-2


def long_context_errors(device: str, tokens: int, chunk: int) -> tuple[float, float]:
    """Errors in fp32 of a prompt that leaves room for the last few tokens only.

    Scores are drawn so wide that a few keys anywhere in the context make up a row's attention:
    with narrow ones it would be a mean of everything, which no error of one part could change.
    """
    config = model_config(64, 2, tokens)
    rig = Rig(
        config,
        torch.float32,
        device,
        2,
        norm_scale=2.0,
        prefill_chunk_tokens=chunk,
        max_tokens=2 + chunk,
        num_cuda_graphs=1,
        capture_mixed_steps=False,
    )
    with rig.engine:
        assert rig.model.rotary is not None
        rig.reference.table = rig.model.rotary.cos_sin
        errors = rig.worst_errors(1, prompt_tokens=tokens - 7)
        assert rig.engine.counters.prefill_chunks == -(-(tokens - 7) // chunk)
    return errors


@on_gpu
def test_logits_over_a_context_of_128k_tokens(device: str) -> None:
    assert max(long_context_errors(device, LONG_CONTEXT, 8192)) < 1e-3


def test_logits_over_a_context_of_2k_tokens_on_a_cpu() -> None:
    assert max(long_context_errors("cpu", 2048, 256)) < 2e-5


@pytest.mark.parametrize("shape", [(80, 2, 8), (33, 3, 1), (320, 5, 512)], ids=name)
def test_odd_shapes_decode_the_same_tokens_in_any_blocks_on_a_cpu(
    shape: tuple[int, int, int],
) -> None:
    head_dim, group, block_size = shape
    config = model_config(head_dim, group)
    assert decode(config, block_size, "cpu") == decode(config, 64, "cpu")


@pytest.mark.parametrize(
    ("model", "engine", "message"),
    [
        ({"head_dim": 33}, {}, "head_dim=33 must be even"),
        ({"head_dim": 0}, {}, "head_dim=0 must be a positive integer"),
        ({"num_attention_heads": 3}, {}, "must be a multiple of num_kv_heads=2"),
        ({}, {"block_size_tokens": 0}, "block_size_tokens=0 must be an integer of at least 1"),
        ({}, {"block_size_tokens": 16.0}, "block_size_tokens=16.0 must be an integer"),
        ({}, {"max_sequence_length": 512}, "exceeds the model's 256"),
    ],
)
def test_shapes_that_cannot_be_are_refused_by_name(
    model: dict[str, int], engine: dict[str, int], message: str
) -> None:
    with pytest.raises(MegatronAsyncError, match=message):
        values = {**model_config(16, 1).to_dict(), **model}
        config = ModelConfig.from_dict(values)
        engine_config = config_at(1, device="cpu", **engine)
        wrapper = GPTNetwork(build_model(config, device="cpu", dtype=torch.float32))
        EngineSpec.of(ServedModel(network=wrapper), engine_config, "cpu")
