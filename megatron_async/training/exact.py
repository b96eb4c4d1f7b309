"""A trainer's model whose logits are those of an engine in batch-invariant mode."""

from __future__ import annotations

import inspect
import itertools
import threading
from typing import Any

import torch
from torch import Tensor

from megatron_async.errors import ConfigError
from megatron_async.models.adapt import unwrapped
from megatron_async.models.gpt_network import GPTNetwork
from megatron_async.models.moe.routed import decoder_layers, expert_layers
from megatron_async.models.quantized.linear import quantized
from megatron_async.training.log_probs import exact_log_probs
from megatron_async.training.mirror import mirror
from megatron_async.training.routing import choose
from megatron_async.training.routing_replay import is_forced
from megatron_async.training.whole_sequences import WholeSequences

MAX_TOKENS = 8192
"""Most tokens of a forward, whose keys and values are kept until its end."""


def exact_numerics(
    model: Any, *, max_tokens: int = MAX_TOKENS, recurrent_state_dtype: str | None = None
) -> ExactNumerics:
    """Make the logits and losses of a trainer's model those of the engine, bit for bit.

    The engine has ``batch_invariant=True``, the same weights and the same dtype. Then the
    log-probability of a token (:func:`~megatron_async.training.exact_log_probs`) is that of the
    rollout, whatever was decoded beside it, with drafts, prefix hits, evictions, at any depth.

    First the parameters run without a graph, in the engine's forward of prompts. The model's own
    forward, with its autograd graph, packing and recomputation of activations, then gets these
    values. So gradients go through the model's own activations, and through the experts that the
    engine chooses, if the layers of experts are this package's and are not recomputed.

    Args:
        model: one of this package, or a megatron-core ``GPTModel``, ``HybridModel`` or
            ``MambaModel`` that an engine serves, with or without megatron's wrappers. Experts are
            stacked, so call this before an optimizer or a wrapper takes parameters.
        max_tokens: of one of the engine's forwards; longer batches take several.
        recurrent_state_dtype: the engine's, see ``EngineConfig``.

    Returns:
        What ends it, by ``close`` or as a context.

    Raises:
        ConfigError: the model has dropout, or a part that cannot be served, or an option is wrong.
    """
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens!r} must be an integer of at least 1")
    if recurrent_state_dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(
            f"recurrent_state_dtype={recurrent_state_dtype!r} must be float32 or bfloat16"
        )
    return ExactNumerics(
        unwrapped(model), max_tokens=max_tokens, recurrent_state_dtype=recurrent_state_dtype
    )


class ExactNumerics:
    """What :func:`exact_numerics` returns.

    Attributes:
        vocab_size: tokens that may be sampled; further columns of logits are padding.
    """

    def __init__(self, model: Any, *, max_tokens: int, recurrent_state_dtype: str | None) -> None:
        _check(model)
        self._network = GPTNetwork(mirror(model), batch_invariant=True)
        if self._network.rotation_limit is not None:
            raise ConfigError(
                "exact_numerics: rotations of this model depend on what a request may have at "
                "most (longrope), which a trainer does not know"
            )
        self.vocab_size = self._network.vocab_size
        self._whole = WholeSequences(
            self._network, max_tokens=max_tokens, recurrent_state_dtype=recurrent_state_dtype
        )
        for layer in expert_layers(self._network.model):
            layer.forced = None  # what another forward of the model is told
        self._signature = inspect.signature(type(model).forward)
        self._layers = decoder_layers(model)
        self._current = threading.local()  # several threads may run the model
        self._form = _form(model)
        self._hooks = (
            model.register_forward_pre_hook(self._compute, with_kwargs=True),
            model.register_forward_hook(self._replace, with_kwargs=True, always_call=True),
        )

    def close(self) -> None:
        """The model has its own values again."""
        for hook in self._hooks:
            hook.remove()

    def __enter__(self) -> ExactNumerics:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def log_probs(self, logits: Tensor, tokens: Tensor, **options: Any) -> Tensor:
        """:func:`exact_log_probs` over this model's vocabulary.

        Raises:
            ConfigError: the logits are one tensor-parallel rank's columns.
        """
        if logits.shape[-1] < self.vocab_size:
            raise ConfigError(
                f"logits of {logits.shape[-1]} columns are one rank's share of {self.vocab_size}: "
                "give the model labels, whose losses are exact, or gather the logits"
            )
        return exact_log_probs(logits, tokens, vocab_size=self.vocab_size, **options)

    def _compute(self, model: Any, args: Any, kwargs: Any) -> None:
        """Before a forward: its values, and its experts."""
        self._current.value = None
        given = self._signature.bind(model, *args, **kwargs).arguments
        given |= given.get("kwargs", {})
        if given.get("inference_context") is not None or given.get("inference_params") is not None:
            return
        if _form(model) != self._form:
            raise ConfigError(
                "exact_numerics: modules, dtype or device of the model have changed since: close "
                "it, and call it again"
            )
        _check_stacked(self._network.model)
        if is_forced(model):
            raise ConfigError(
                "exact_numerics takes the experts that an engine with these weights chooses, and "
                "forced_routing others: close one of them"
            )
        token_ids, labels = given["input_ids"], given.get("labels")
        if token_ids is None or given.get("decoder_input") is not None:
            raise ConfigError(
                "exact_numerics: decoder_input is not what an engine embeds: give input_ids alone"
            )
        _check_mask(given.get("attention_mask"), token_ids.shape)
        lengths = _lengths(token_ids, given.get("position_ids"), given.get("packed_seq_params"))
        if model.position_embedding_type == "learned_absolute":
            _check_learned(lengths, given.get("position_ids"))
        logits, experts = self._whole.logits(token_ids.flatten(), lengths)
        logits = logits.view(*token_ids.shape, -1)
        self._current.value = logits if labels is None else -self.log_probs(logits, labels)
        # A model has the tokens of all rows at a position one behind the other.
        shaped = [ids.view(*token_ids.shape, -1).transpose(0, 1).flatten(0, 1) for ids in experts]
        # Recomputed behind the forward, a layer would choose other experts than in it.
        if self._layers and getattr(model.config, "recompute_granularity", None) is None:
            choose(self._layers, shaped)

    def _replace(self, model: Any, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        """Behind a forward, also one that failed."""
        value = vars(self._current).pop("value", None)
        choose(self._layers, None)
        if value is None or not isinstance(output, Tensor):
            return None
        value = _share_of(value, output)
        replaced: Tensor = _Value.apply(output, value.to(output.dtype))  # type: ignore[no-untyped-call]
        return replaced


class _Value(torch.autograd.Function):
    """The value of one tensor with the gradient of another."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


def _form(model: Any) -> tuple[Any, ...]:
    """What the second tree of modules has of the first one, beside parameters."""
    first = next(model.parameters())
    return first.dtype, first.device, *map(id, model.modules())


def _check(model: Any) -> None:
    is_network = isinstance(model, torch.nn.Module) and hasattr(model, "config")
    if not is_network or not hasattr(model.config, "num_layers"):
        raise ConfigError(
            f"exact_numerics: a {type(model).__name__} is no model that an engine serves: give one "
            "of this package, or a GPTModel, HybridModel or MambaModel of megatron-core; of a "
            "wrapper give what it is around"
        )
    if any(
        isinstance(getattr(hook, "__self__", None), ExactNumerics)
        for hook in model._forward_pre_hooks.values()
    ):
        raise ConfigError("exact_numerics: the model has exact numerics already; close them first")
    if quantized(model):
        raise ConfigError(
            "exact_numerics: the model keeps FP8 or MXFP4 weights, which have no gradients: load "
            "it without quantization"
        )
    config = model.config
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(config, name, 0):
            raise ConfigError(f"exact_numerics: {name}={getattr(config, name)} must be 0")
    for name in ("moe_expert_capacity_factor", "moe_input_jitter_eps"):
        if getattr(config, name, None) is not None:
            raise ConfigError(
                f"exact_numerics: {name}={getattr(config, name)} trains experts with other tokens "
                "than engines give them: leave it out"
            )
    if getattr(config, "expert_model_parallel_size", 1) > 1:
        raise ConfigError(
            "exact_numerics: experts are spread over ranks that have tokens of their own: train "
            "without expert_model_parallel_size"
        )
    if not (model.pre_process and model.post_process):
        raise ConfigError("exact_numerics: the model is one of several pipeline stages")


def _check_stacked(model: torch.nn.Module) -> None:
    """Raise where parameters of experts are no views any more of what is computed with."""
    for module in model.modules():
        stacked = vars(module).get("weights")  # of a layer of experts that was adapted
        if stacked is None:
            continue
        storages = {x.untyped_storage().data_ptr() for x in stacked if x is not None}
        experts: Any = module.experts
        if any(p.untyped_storage().data_ptr() not in storages for p in experts.parameters()):
            raise ConfigError(
                "exact_numerics: parameters of experts were moved to other memory since; close it, "
                "and call it again behind the optimizer or wrapper that moves them"
            )


def _check_mask(mask: Tensor | None, shape: torch.Size) -> None:
    """Raise unless a mask ``[..., S, S]``, true where a token is not seen, is causal for the tokens
    in front of padding; or unless in one of the token ids' ``shape`` ``[B, S]``, true for tokens,
    padding is behind them."""
    if mask is not None and mask.shape == shape and bool((mask.int().diff(dim=1) > 0).any()):
        raise ConfigError(
            "exact_numerics: attention_mask has tokens behind padding, where engines would see it: "
            "pad behind the last token"
        )
    if mask is None or mask.dim() < 3 or mask.dtype != torch.bool:
        return
    size = mask.shape[-1]
    if mask.shape[-2] != size:
        return
    is_padding = mask.diagonal(dim1=-2, dim2=-1)
    causal = torch.ones(size, size, dtype=torch.bool, device=mask.device).triu(1)
    fits = is_padding | (mask == causal).all(-1)
    is_behind = is_padding[..., 1:] | ~is_padding[..., :-1]
    if not bool(fits.all() & is_behind.all()):
        raise ConfigError(
            "exact_numerics: attention_mask is not causal, as engines are: pad behind the last "
            "token, and say by packed_seq_params where packed sequences begin"
        )


def _lengths(token_ids: Tensor, position_ids: Tensor | None, packed: Any) -> list[int]:
    """The lengths of the sequences, one behind the other in the rows of ``token_ids`` ``[B, S]``.

    Raises:
        ConfigError: without ``packed``, a row is not one sequence from position 0 on.
    """
    if torch.is_autocast_enabled(token_ids.device.type):
        raise ConfigError(
            "exact_numerics: autocast is on, which engines do not know: leave it out, and load the "
            "model in the dtype of the engine"
        )
    if token_ids.dim() != 2 or not token_ids.numel():
        raise ConfigError(
            f"exact_numerics: input_ids of shape {list(token_ids.shape)} must be of at least one "
            "row and one token"
        )
    rows, columns = token_ids.shape
    if packed is not None:
        ends = packed.cu_seqlens_q.tolist()
        lengths = [end - start for start, end in itertools.pairwise(ends) if end > start]
        if sum(lengths) != token_ids.numel():
            raise ConfigError(
                f"exact_numerics: cu_seqlens_q has sequences of {sum(lengths)} tokens, and "
                f"input_ids has {token_ids.numel()}"
            )
        return lengths
    if position_ids is not None:
        counted = torch.arange(columns, device=position_ids.device)
        if position_ids.shape[-1] != columns or not bool((position_ids == counted).all()):
            raise ConfigError(
                "exact_numerics: position_ids do not count from 0 in each row: pad behind the last "
                "token, and say by packed_seq_params where packed sequences begin"
            )
    return [columns] * rows


def _check_learned(lengths: list[int], position_ids: Tensor | None) -> None:
    """Raise where a model with learned positions would take others than the engine."""
    if position_ids is None:
        return
    counted = torch.cat([torch.arange(length) for length in lengths]).to(position_ids.device)
    if position_ids.numel() == len(counted) and not torch.equal(position_ids.flatten(), counted):
        raise ConfigError(
            "exact_numerics: position_ids of packed sequences must count from 0 in each of them"
        )


def _share_of(value: Tensor, output: Tensor) -> Tensor:
    """This tensor-parallel rank's columns, where ``output`` has those alone."""
    if value.shape == output.shape:
        return value
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    return value.narrow(-1, rank * output.shape[-1], output.shape[-1])
