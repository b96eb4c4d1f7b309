"""Trainer ranks and engine ranks of many layouts, each filled by megatron-core's own sharding, for
``tests/unit/weights/test_reshard_plans.py``.

``python -m tests.support.megatron_layouts FILE CASE...`` reshards between the two layouts of each
case, such as ``dense:4,1,1,4>2,1,1`` (tensor, pipeline, expert and expert-tensor sizes of the
trainer, the first three of the engine), and writes what it found to a JSON file. No rank has a
process of its own: torch's fake group says who is where, and nothing is communicated.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_async import megatron_compat as compat  # noqa: F401  (before megatron)
from megatron_async.errors import CheckpointError
from megatron_async.megatron_compat.shims import apply
from megatron_async.models import parallel
from megatron_async.models.build import build_random_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.description.latent_config import LatentAttention
from megatron_async.models.parallel import ModelParallel
from megatron_async.ranks.layout import Layout
from megatron_async.weights.sharded import layout as layouts
from megatron_async.weights.sharded import plan as plans
from megatron_async.weights.sharded.layout import TrainerLayout
from megatron_async.weights.sharded.plan import ReshardPlan, TrainerRank, plan_for
from megatron_async.weights.sharded.take import Moves, moves_of
from megatron_async.weights.tensor_info import infos_of, weights_of

apply()
from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.mlp import MLP  # noqa: E402

DENSE = ModelConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_kv_heads=2, head_dim=4,
    ffn_hidden_size=16, vocab_size=32, max_sequence_length=16, qkv_bias=True,
    tie_word_embeddings=False,
)  # fmt: skip
EXPERTS = dataclasses.replace(
    DENSE, num_moe_experts=4, moe_ffn_hidden_size=8, moe_router_topk=2, qkv_bias=False,
    moe_shared_expert_intermediate_size=16,
)  # fmt: skip
LATENTS = dataclasses.replace(
    DENSE, num_kv_heads=4, qkv_bias=False,
    latent_attention=LatentAttention(
        kv_lora_rank=12, q_lora_rank=20, qk_pos_emb_head_dim=2, v_head_dim=6
    ),
)  # fmt: skip
MODELS = {
    "dense": DENSE,
    "padded": DENSE,
    "tied": dataclasses.replace(DENSE, tie_word_embeddings=True),
    "mtp": dataclasses.replace(DENSE, mtp_num_layers=1),
    "experts": EXPERTS,
    "latents": LATENTS,
}
PADDED_ROWS = 40
_OUR_NORMS = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
"""megatron-core stores norms under the names of its fused layers."""


class Sizes(NamedTuple):
    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int

    @property
    def world_size(self) -> int:
        return self.pipeline * max(self.tensor, self.expert * self.expert_tensor)


@contextmanager
def placed(rank: int, sizes: Sizes) -> Iterator[None]:
    """This process as a rank of megatron-core's parallel state."""
    dist.init_process_group("fake", rank=rank, world_size=sizes.world_size, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            sizes.tensor,
            sizes.pipeline,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
            create_gloo_process_groups=False,
        )
        yield
    finally:
        parallel.set_current(None)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def stock(name: str, config: ModelConfig, sizes: Sizes) -> Any:
    """A rank's share as megatron-core builds it for a trainer."""
    if config.latent_attention is not None:  # its own needs Transformer Engine
        return build_random_model(config, device="cpu", dtype=torch.float32)
    experts = config.num_moe_experts
    theirs = TransformerConfig(
        num_layers=config.num_layers, hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads, num_query_groups=config.num_kv_heads,
        ffn_hidden_size=config.ffn_hidden_size, kv_channels=config.head_dim,
        normalization="RMSNorm", add_qkv_bias=config.qkv_bias, add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True, pipeline_dtype=torch.float32, num_moe_experts=experts,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size,
        mtp_num_layers=config.mtp_num_layers or None,
        tensor_model_parallel_size=sizes.tensor, pipeline_model_parallel_size=sizes.pipeline,
        expert_model_parallel_size=sizes.expert, expert_tensor_parallel_size=sizes.expert_tensor,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(experts, moe_grouped_gemm=False, normalization="RMSNorm")
    # Stages that tie their embeddings compare them on a GPU.
    with mock.patch.object(Tensor, "cuda", lambda tensor: tensor):
        return _stock_model(name, config, theirs, spec)


def _stock_model(name: str, config: ModelConfig, theirs: TransformerConfig, spec: Any) -> Any:
    is_last = parallel_state.is_pipeline_last_stage()
    has_mtp = theirs.mtp_num_layers and is_last
    return GPTModel(
        theirs, spec, vocab_size=PADDED_ROWS if name == "padded" else config.vocab_size,
        max_sequence_length=16, pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=is_last, position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        mtp_block_spec=get_gpt_mtp_block_spec(theirs, spec, False) if has_mtp else None,
    )  # fmt: skip


class Whole:
    """Whole tensors, by the keys of megatron-core's checkpoints: each element is another one."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def fill(self, model: Any) -> None:
        """Give a rank's parameters what megatron-core says is theirs."""
        for module in model.modules():
            if isinstance(module, MLP):  # asks plain activations too
                for child in module.children():
                    if not hasattr(child, "sharded_state_dict"):
                        child.sharded_state_dict = lambda *args, **kwargs: {}
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        sharded = model.sharded_state_dict(metadata={"dp_cp_group": group})
        apply_factories(sharded)
        for each in nested_values(sharded):
            if isinstance(each, ShardedTensor):
                at, lead = each.global_offset, each.prepend_axis_num
                sizes = (*[1] * lead, *each.local_shape)
                box = tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))
                part = self._whole(each.key, each.global_shape)[box]
                each.data.detach().copy_(part.reshape(each.local_shape))

    def _whole(self, key: str, shape: tuple[int, ...]) -> Tensor:
        for ours, theirs in _OUR_NORMS.items():
            key = key.replace(ours, theirs)
        if key not in self._tensors:
            count = torch.Size(shape).numel()
            first = 1e5 * len(self._tensors)
            self._tensors[key] = (first + torch.arange(count)).view(shape)
        return self._tensors[key]


class Trainer(NamedTuple):
    ranks: list[TrainerRank]
    tensors: dict[int, dict[str, Tensor]]


def trainer_of(name: str, sizes: Sizes, whole: Whole) -> Trainer:
    """All ranks of a trainer."""
    found = Trainer([], {})
    vocab_size = DENSE.vocab_size if name == "padded" else None
    for rank in range(sizes.world_size):
        with placed(rank, sizes):
            model = stock(name, MODELS[name], sizes)
            whole.fill(model)
            tensors = weights_of(model.state_dict())
            place = TrainerLayout.of(model, vocab_size=vocab_size)
        found.ranks.append(TrainerRank(place, tuple(infos_of(tensors))))
        found.tensors[rank] = tensors
    return found


@contextmanager
def engine_rank(name: str, layout: Layout, rank: int) -> Iterator[Any]:
    """A rank's share of the model that is served."""
    sizes = Sizes(*dataclasses.astuple(layout), 1 if layout.expert > 1 else layout.tensor)
    with placed(rank, sizes):
        if layout.world_size > 1:
            parallel.set_current(ModelParallel(layout, rank))
        yield build_random_model(MODELS[name], device="cpu", dtype=torch.float32)


def reshard(name: str, sizes: Sizes, layout: Layout) -> list[dict[str, int]]:
    """What each rank of an engine took; raises AssertionError where that is not its own."""
    whole = Whole()
    trainer = trainer_of(name, sizes, whole)
    found = []
    for rank in range(layout.world_size):
        with engine_rank(name, layout, rank) as model:
            whole.fill(model)
            parameters = {n: p.detach() for n, p in model.named_parameters()}
            wanted = {n: p.clone() for n, p in parameters.items()}
            for parameter in parameters.values():
                parameter.fill_(-1)
            plan = plan_for(model, trainer.ranks, reader=rank, all_parameters=True)
            check_once(plan)
            moves = list(moves_of(plan, trainer.tensors))
            Moves(moves).copy()
            for n, parameter in parameters.items():
                assert torch.equal(parameter, wanted[n]), f"{n} of rank {rank}"
            taken = sum(move.values.nbytes for move in moves)
            own = sum(p.nbytes for p in parameters.values())
            largest = max(move.values.nbytes for move in moves)
            found.append({"taken": taken, "own": own, "largest": largest, "slices": len(moves)})
    return found


def check_once(plan: ReshardPlan) -> None:
    """Each element of each target is written once."""
    counts = {name: torch.zeros(t.view.shape) for name, t in plan.targets.items()}
    for slices in plan.slices.values():
        for each in slices:
            each.into(counts[each.target]).add_(1)
    assert all(bool((count == 1).all()) for count in counts.values()), "not once"


def off_by_one() -> Any:
    common = plans._common

    def shifted(own: Any, theirs: Any) -> Any:
        found = common(own, theirs)
        if found is None or not found[0] or found[0][0] == 0:
            return found
        start, *rest = found
        return ((start[0] - 1, *start[1:]), *rest)

    return mock.patch.object(plans, "_common", shifted)


def off_by_one_in_the_target() -> Any:
    common = plans._common

    def shifted(own: Any, theirs: Any) -> Any:
        found = common(own, theirs)
        if found is None or not found[1] or found[1][0] == 0:
            return found
        start, (first, *more), sizes = found
        return start, (first - 1, *more), sizes

    return mock.patch.object(plans, "_common", shifted)


def swapped_experts() -> Any:
    swapped: Callable[..., str] = layouts.with_expert_number
    return mock.patch.object(
        layouts, "with_expert_number", lambda name, of: swapped(name, lambda n: of(n) ^ 1)
    )


def joined_halves() -> Any:
    return mock.patch.object(layouts, "blocks_of", lambda name, gated: 1)


MUTANTS = {
    each.__name__: each
    for each in (off_by_one, off_by_one_in_the_target, swapped_experts, joined_halves)
}


def run(case: str) -> Any:
    """``name:sizes>sizes``, behind a mutant and ``!`` where one is to be seen."""
    mutant, _, rest = case.rpartition("!")
    name, _, both = rest.partition(":")
    sizes, layout = (tuple(map(int, each.split(","))) for each in both.split(">"))
    try:
        with MUTANTS[mutant]() if mutant else mock.MagicMock():
            return reshard(name, Sizes(*sizes), Layout(*layout))
    except (AssertionError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    try:
        results = {case: run(case) for case in sys.argv[2:]}
    except BaseException:
        traceback.print_exc()
        raise
    Path(sys.argv[1]).write_text(json.dumps(results))
