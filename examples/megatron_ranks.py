"""A model that megatron-core has divided, served by all of its ranks, as NVIDIA's dynamic-inference
example does::

    torchrun --nproc-per-node 2 examples/megatron_ranks.py --tensor-model-parallel-size 2

Each process builds its share of the model, wraps it and builds an engine. All make the same calls
and get the same records; rank 0 prints them. Between two rounds each rank may take a step of an
optimizer over its share, which stays where it is (``--learning-rate``).

The model is a small one with random weights; put your own in the place of :func:`build_model`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_async import EngineConfig
from megatron_async.megatron_api import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    GPTInferenceWrapper,
    SamplingParams,
    TextGenerationController,
)

from megatron.core import parallel_state  # isort: skip
from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip
from megatron.core.transformer.module import Float16Module, MegatronModule  # isort: skip

VOCAB, LONGEST = 96, 128
PROMPTS = ("def read(path):", "import os", "for i in range(", "x = [1, 2")


class Characters:
    """A tokenizer of printable characters."""

    eod, bos, vocab_size = VOCAB - 1, VOCAB - 2, VOCAB

    def tokenize(self, text: str) -> list[int]:
        """Token ids."""
        return [ord(character) - 32 for character in text]

    def detokenize(self, tokens: list[int]) -> str:
        """The text."""
        return "".join(chr(32 + token) for token in tokens)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Sizes under megatron-core's names, and what is asked of the engine."""
    parser = argparse.ArgumentParser(description=__doc__.partition("::")[0])
    add = parser.add_argument
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--pipeline-model-parallel-size", type=int, default=1)
    add("--expert-model-parallel-size", type=int, default=1)
    add("--num-experts", type=int, help="experts of each layer")
    add("--num-layers", type=int, default=2)
    add("--hidden-size", type=int, default=64)
    add("--num-tokens-to-generate", type=int, default=12)
    add("--prompts", nargs="+", default=list(PROMPTS))
    add("--incoming-requests-per-step", type=int, default=2)
    add("--depth", type=int, default=1, help="steps in flight whose tokens the host has not taken")
    add("--bf16", action="store_true", help="weights and activations in bfloat16, not float32")
    add("--learning-rate", type=float, help="take a step of SGD and generate once more")
    add("--rank-timeout-seconds", type=float, default=8.0)
    return parser.parse_args(argv)


def initialise(args: argparse.Namespace) -> None:
    """torch.distributed and megatron-core's parallel state, which are this script's own."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=ranks_of_each_expert(args),
        create_gloo_process_groups=False,
    )


def ranks_of_each_expert(args: argparse.Namespace) -> int:
    """Experts are spread over ranks as a whole, or divided as the other layers are."""
    return 1 if args.expert_model_parallel_size > 1 else args.tensor_model_parallel_size


def build_model(args: argparse.Namespace) -> MegatronModule:
    """This rank's share of a model."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    experts: dict[str, Any] = {}
    if args.num_experts:
        experts = {
            "num_moe_experts": args.num_experts,
            "moe_ffn_hidden_size": args.hidden_size,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "expert_model_parallel_size": args.expert_model_parallel_size,
            "expert_tensor_parallel_size": ranks_of_each_expert(args),
        }
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=2 * args.hidden_size,
        num_attention_heads=4,
        num_query_groups=2,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
        use_cpu_initialization=True,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **experts,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=args.num_experts, normalization="RMSNorm"
        ),
        vocab_size=VOCAB,
        max_sequence_length=LONGEST,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
    )
    if torch.cuda.is_available():
        model.cuda()
    return Float16Module(config, model) if args.bf16 else model


def build_engine(args: argparse.Namespace, model: MegatronModule) -> DynamicInferenceEngine:
    """An engine over this rank's share, where it is."""
    config = model.config
    context = DynamicInferenceContext(
        params_dtype=config.params_dtype,
        num_layers=config.num_layers // config.pipeline_model_parallel_size,
        kv_channels=config.kv_channels,
        num_attention_heads=config.num_query_groups,
        max_sequence_length=LONGEST,
        buffer_size_gb=0.01,
        block_size_tokens=8,
        max_requests=4,
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        materialize_only_last_token_logits=True,
    )
    wrapped = GPTInferenceWrapper(model, args, context)
    wrapped.model_is_pipeline_parallel = not (
        parallel_state.is_pipeline_first_stage() and parallel_state.is_pipeline_last_stage()
    )
    controller = TextGenerationController(wrapped, Characters())
    return DynamicInferenceEngine(
        controller,
        context,
        enable_cuda_graph=torch.cuda.is_available(),
        random_seed=1234,
        config=EngineConfig(
            max_requests=4,
            inference_async_scheduling=args.depth > 0,
            depth=args.depth or None,
            rank_timeout_seconds=args.rank_timeout_seconds,
        ),
    )


def run(args: argparse.Namespace, engine: Any) -> list[list[int]]:
    """Add requests as the steps go on; the tokens of each. All ranks call it."""
    params = SamplingParams(
        top_k=1, num_tokens_to_generate=args.num_tokens_to_generate, termination_id=-1
    )
    tokens: dict[int, list[int]] = {}
    added, total = 0, len(args.prompts)
    while True:
        for request_id in range(added, min(added + args.incoming_requests_per_step, total)):
            engine.add_request(request_id, args.prompts[request_id], params)
            added = request_id + 1
        result = engine.step_modern()
        for record in result["finished_request_records"]:
            finished = record.merge()
            tokens[finished.request_id] = finished.generated_tokens
        if not (engine.has_unfinished_requests() or added < total):
            return [tokens[request_id] for request_id in range(total)]


def train(args: argparse.Namespace, model: Any, tokens: list[list[int]]) -> float:
    """A step of SGD over what was generated, in place; the loss. Not with pipeline stages."""
    batch = torch.tensor(tokens, device=next(model.parameters()).device)
    positions = torch.arange(batch.shape[1] - 1, device=batch.device).expand(len(batch), -1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate)
    model.train()
    loss = model(batch[:, :-1], positions, None, labels=batch[:, 1:]).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    return float(loss.detach())


def main(argv: Sequence[str] | None = None) -> None:
    """Generate, and if asked for train and generate again; rank 0 prints a line of each round."""
    args = parse_args(argv)
    initialise(args)
    model = build_model(args)
    with build_engine(args, model) as engine:
        rounds = [run(args, engine)]
        if args.learning_rate is not None:
            train(args, model, rounds[0])
            engine.reset_prefix_cache()  # no key or value of the old weights is used again
            rounds.append(run(args, engine))
    if dist.get_rank() == 0:
        for tokens in rounds:
            print(json.dumps(tokens))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
