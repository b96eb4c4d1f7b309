"""One forward of a megatron-core model over the tokens of a batch."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from megatron_async.models import parallel
from megatron_async.models.description.kv_cache_spec import (
    KVCacheSpec,
    kv_cache_spec,
    plain_parameter,
)
from megatron_async.models.description.recurrent_state_spec import recurrent_state_spec
from megatron_async.models.fused import where
from megatron_async.models.gpt import GPTModel, Inference
from megatron_async.models.layers.attention import PagedAttention
from megatron_async.models.network import Network

if TYPE_CHECKING:
    from megatron_async.models.fused.blocks.gemms import Work
    from megatron_async.models.fused.blocks.residual import AllReduce
    from megatron_async.models.fused.decoder import FusedDecoder
    from megatron_async.models.fused.mtp import FusedMtp
    from megatron_async.models.fused.report import DecodeCoverage
    from megatron_async.weights.source import AnySource

logger = logging.getLogger(__name__)


@functools.cache
def _log_many_rows(most: int) -> None:
    logger.info(
        "decode steps of more than %d rows run the model's own forward, with GEMMs of cuBLAS", most
    )


class GPTNetwork(Network):
    """A GPT or hybrid model of megatron-core.

    Args:
        model: one of :func:`~megatron_async.models.build.build_model`, or a megatron-core
            ``GPTModel``, which is adapted in place. It is set to evaluation mode.
        batch_invariant: on a GPU, compute with kernels that give each token bits of its own,
            whatever else is in the forward. The context attends, so it needs the same choice.
        fused_decode: decode with the kernels of ``models/fused`` where they take a block of the
            model, which is faster. Where they do not, a warning says why, once, and
            :meth:`decode_coverage`; where no layer has such a block, ``fused_decode_off``.

    Raises:
        ConfigError: the model has a part that cannot be served; the message names it.
    """

    of_one_forward: ClassVar[frozenset[str]] = frozenset({"hidden_states"})

    def __init__(
        self,
        model: Any,
        *,
        batch_invariant: bool = False,
        fused_decode: bool = True,
        kv_cache_dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(model, Inference):
            from megatron_async.models.adapt import adapt_model

            model = adapt_model(model)
        self.model: GPTModel = model.eval()
        self.batch_invariant = batch_invariant
        width: int = self.model.vocab_size
        self.vocab_size = self.model.token_count or width
        self.parallel = parallel.current()
        self._whole_sequences: AbstractContextManager[None] | None = None
        config = self.model.config
        if getattr(config, "sequence_parallel", False) or config.expert_model_parallel_size > 1:
            from megatron_async.models.sequence_parallel import without_sequence_parallel

            self._whole_sequences = without_sequence_parallel(self.model)
        self._has_stages = self.parallel is not None and self.parallel.layout.pipeline > 1
        ranks = 1 if self.parallel is None else self.parallel.layout.tensor
        self.logits_width: int = width // ranks
        self.max_sequence_length: int = self.model.max_sequence_length
        self._like: Tensor = plain_parameter(self.model)
        self.device: torch.device = self._like.device
        self.kv_cache_spec: KVCacheSpec = kv_cache_spec(self.model)
        if kv_cache_dtype is not None:
            self.kv_cache_spec = replace(self.kv_cache_spec, kept=kv_cache_dtype)
        self.recurrent_state_spec = recurrent_state_spec(self.model)
        self.rotation_limit = self.model.rotary.limit if self.model.rotary is not None else None
        self.attention_window = _attention_window(self.model)
        self.mtp_layers = len(self.model.mtp.layers) if self.model.mtp_process else 0
        if not self._has_stages:
            self.hidden_state_count = 1 + len(self.model.decoder.layers)
        self._unwanted: str | None = None
        """Why no block shall be fused."""
        if batch_invariant:
            from megatron_async.kernels.gemm.invariant import mode as products

            self._unwanted = "batch_invariant=True"
            products.prepare(self.device, self._like.dtype)
        elif not fused_decode:
            self._unwanted = "fused_decode=False"
        self._found_coverage: DecodeCoverage | None = None
        self._fused: FusedDecoder | None = None
        self._fused_mtp: FusedMtp | None = None
        self.outgrown: list[FusedDecoder | FusedMtp | None] = []
        """What other engines' captured steps go on with."""
        self._rows: set[int] = set()
        self._has_adapted_experts = any(
            getattr(type(m), "asks_for_padding_mask", False) for m in self.model.modules()
        )
        runs = self._unwanted is None and where.device_why_not(self.model) is None
        if runs and self._coverage.off is None:
            self._fused = self._fused_decoder()
        if self.device.type == "cuda" and self._unwanted is None:
            self._coverage.log()

    @property
    def _coverage(self) -> DecodeCoverage:
        """Found when it is first asked for: where no kernel runs, nobody may."""
        if self._found_coverage is None:
            from megatron_async.models.fused import coverage
            from megatron_async.models.fused.report import DecodeCoverage

            unwanted, divided = self._unwanted, self._all_reduce is not None
            self._found_coverage = DecodeCoverage(
                coverage.blocks(
                    self.model, parallel=divided, stages=self._has_stages, unwanted=unwanted
                ),
                coverage.mtp_blocks(self.model, unwanted=unwanted),
            )
        return self._found_coverage

    @property
    def _all_reduce(self) -> AllReduce | None:
        """What adds partial sums up over ranks that share a layer; None for one of them."""
        if self.parallel is None or self.parallel.layout.tensor == 1:
            return None
        return self.parallel.sum_

    def _fused_decoder(self) -> FusedDecoder:
        from megatron_async.models.fused.decoder import FusedDecoder

        ranks = self.parallel
        return FusedDecoder(
            self.model,
            all_reduce=self._all_reduce,
            words=None if ranks is None else ranks.tensor_words,
            stages=ranks if self._has_stages else None,
            agree=None if ranks is None else ranks.holds_on_all,
        )

    @property
    def fused_decode_off(self) -> str | None:
        """Why no layer decodes in fused kernels; None if one does."""
        return self._coverage.off

    def reserve_positions(self, length: int) -> None:
        """Have rotary embeddings for ``length`` positions; called before steps are captured."""
        tables = self.model.rotary, self.model.sliding_rotary
        if any([table.reserve(length) for table in tables if table is not None]):
            self.outgrown.extend((self._fused, self._fused_mtp))
            self._fused_mtp = None
            if self._fused is not None:
                self._fused = self._fused_decoder()

    def claim_waiting_grids(self, owner: object) -> bool:
        """Whether the engine whose device is ``owner`` may launch kernels whose CTAs wait for each
        other; it uses the model from now on."""
        if self.device.type != "cuda" and self._fused is None:
            return False
        from megatron_async.device import waiting_grids

        ranks = self.parallel
        found: str | None = "it has no such kernels"
        has_some = self._fused is not None and self._fused.has_waiting_grids
        if has_some:
            found = waiting_grids.claim(self.device, owner, ranks)
        if self.device.type == "cuda" and ranks is not None and ranks.agrees:
            found = ranks.agree(found, "" if self._fused is None else self._fused.tuned)
        if found is not None:
            waiting_grids.release(owner)
        if found is not None and has_some:
            logger.info("no kernel waits for its own CTAs, or those of other ranks: %s", found)
        return found is None

    def kernels_of(self, rows: list[int], context: Any) -> Iterator[Work]:
        """See ``Network.kernels_of``."""
        if self.batch_invariant:
            from megatron_async.kernels.gemm.invariant.skinny import work_of
            from megatron_async.models.description.invariant_products import products_of

            yield from work_of(products_of(self.model), rows, self.device)
        if self._fused is not None:
            yield from self._fused.kernels_of(rows, context)
        if self._fused_mtp is not None:
            window = 1 + context.num_speculative_tokens
            yield from self._fused_mtp.kernels_of([n // window for n in rows], window, context)

    def prepare(self, rows: list[int], context: Any) -> None:
        """Compile what decoding ``rows`` rows needs, ahead of their capture."""
        if self.batch_invariant and self.device.type == "cuda":
            from megatron_async.models.description.invariant_products import load_products

            load_products(self.model, rows, self.device)
        if self._fused is not None and context.gemm_autotune_seconds:
            from megatron_async.models.fused.autotune import tune_and_keep

            seconds, most = context.gemm_autotune_seconds, self._fused.most_rows(context)
            fused = [count for count in rows if count <= most]
            tune_and_keep(self._fused, fused, seconds, self.device, self.parallel)
        if self._fused_mtp is not None:
            self._prepare_drafts(self._fused_mtp, rows, context)
        if self._fused is None:
            return
        self._fused.compile(rows, context)
        self._rows |= set(rows)
        covered = self._fused.covered(sorted(self._rows), context)
        self._found_coverage = replace(covered, drafting=self._coverage.drafting)
        most = self._fused.most_rows(context)
        if min(rows) <= most:
            self._coverage.log()
        if max(rows) > most:
            _log_many_rows(most)

    def shortened(self) -> GPTNetwork:
        """See ``Network.shortened``."""
        from megatron_async.models.layers import alike

        kinds, layers = alike.kinds_of(self.model), self.model.decoder.layers
        few = copy.copy(self)
        few.model = alike.shortened(self.model, kinds)
        if self._fused is not None:
            numbers = (layer.layer_number for layer in layers)
            fused = self._fused.shortened(dict(zip(numbers, kinds, strict=True)))
            vars(few)["_fused"] = fused
        return few

    def _prepare_drafts(self, fused: FusedMtp, tokens: list[int], context: Any) -> None:
        window = 1 + context.num_speculative_tokens
        rows = [count // window for count in tokens]
        fused.compile(rows, window, context)
        drafting = fused.covered(rows, window, context)
        self._found_coverage = replace(self._coverage, drafting=drafting)

    def fused_mtp(self) -> FusedMtp | None:
        """The MTP layers in fused kernels, for a drafter; None where these take no block."""
        if self._fused_mtp is not None or where.device_why_not(self.model) is not None:
            return self._fused_mtp
        if any(block.is_fused for block in self._coverage.drafting):
            from megatron_async.models.fused.mtp import FusedMtp

            self._fused_mtp = FusedMtp(self.model)
        return self._fused_mtp

    def decode_coverage(self, rows: list[int] | None = None, context: Any = None) -> DecodeCoverage:
        """Which blocks decode in fused kernels, and why not the others.

        Args:
            rows: of the steps that are asked about; None for those of all engines that were built,
                in the cache of the last one, or for what holds in all steps if there is none.
            context: theirs, with ``rows``.
        """
        if rows is None or self._fused is None:
            return self._coverage
        return replace(self._fused.covered(rows, context), drafting=self._coverage.drafting)

    def forward_into(
        self,
        logits: Tensor,
        token_ids: Tensor,
        position_ids: Tensor,
        context: Any,
        hidden_states: Tensor | None = None,
    ) -> None:
        fused = self._fused if len(token_ids) == len(logits) else None
        if fused is not None and fused.takes(logits, context):
            fused.forward(token_ids, position_ids, context, logits, hidden_states)
            return
        logits.copy_(self.forward(token_ids, position_ids, context)[: len(logits)])
        if hidden_states is not None:
            assert self.hidden_states is not None
            hidden_states.copy_(self.hidden_states)

    @torch.no_grad()
    def forward(self, token_ids: Tensor, position_ids: Tensor, context: Any = None) -> Tensor:
        """Run the model once; nothing in it waits for the device.

        Args:
            token_ids: int64 ``[T]``, the tokens of all rows one after the other.
            position_ids: int64 ``[T]``, their positions.
            context: holds keys and values; see
                :class:`~megatron_async.models.batch.Batch`. If its
                ``materialize_only_last_token_logits`` is set, its ``last_token_logits([1, T,
                hidden]) -> [R, hidden]`` selects the rows that get logits. None is a forward over
                a whole sequence.

        Returns:
            Logits ``[R, vocab]`` (or ``[T, vocab]``) in the model's dtype: of several ranks this
            one's columns, and zeros of stages before the last.
        """
        stages = self.parallel if self._has_stages else None
        if stages is not None and not stages.is_first:
            size = (len(token_ids), 1, self.model.config.hidden_size)
            self.model.set_input_tensor(stages.receive_(self._like.new_empty(size)))
        with self.numerics():
            logits: Tensor = self.model(
                token_ids.unsqueeze(0),
                position_ids.unsqueeze(0),
                None,
                inference_context=context,
                runtime_gather_output=self.parallel is None,
                **self._mask(context),
            )
        if stages is not None and not stages.is_last:
            stages.send(logits)
            self.hidden_states = logits.squeeze(1)
            index = None if context is None else context.last_token_index
            count = len(token_ids) if index is None else len(index)
            return logits.new_zeros(count, self.logits_width)
        at = self.model if context is None else context
        assert at.decoder_hidden_states is not None
        self.hidden_states = at.decoder_hidden_states.squeeze(1)
        return logits.squeeze(0)

    def _mask(self, context: Any) -> dict[str, Tensor]:
        """What megatron's layers are told that do not ask the context by themselves."""
        if context is None or not self._has_adapted_experts or context.padding_mask is None:
            return {}
        return {"padding_mask": context.padding_mask}

    @torch.no_grad()
    def mtp_forward(
        self,
        layer: int,
        hidden_states: Tensor,
        token_ids: Tensor,
        position_ids: Tensor,
        context: Any,
    ) -> Tensor:
        """MTP layer ``layer`` over hidden states ``[T, hidden]`` and the tokens that they meet,
        int64 ``[T]`` with their positions. Returns hidden states ``[T, hidden]``, normed."""
        with self.numerics():
            hidden = self.model.mtp_hidden_states(
                layer, hidden_states[:, None], token_ids[None], position_ids[None], context
            )
        return hidden.squeeze(1)

    @torch.no_grad()
    def logits(self, hidden_states: Tensor) -> Tensor:
        """The output layer over normed hidden states: ``[R, hidden]`` to ``[R, vocab]``."""
        with self.numerics():
            gathers = self.parallel is None
            return self.model.logits(hidden_states[:, None], gathers).squeeze(0)

    def numerics(self) -> AbstractContextManager[None]:
        """The scope in which all of the model's Python must run, MTP layers included."""
        scopes: list[AbstractContextManager[None]] = []
        if self._whole_sequences is not None:
            scopes.append(self._whole_sequences)
        if self.batch_invariant:
            from megatron_async.kernels.gemm.invariant.mode import batch_invariant_mode

            scopes.append(batch_invariant_mode())
        if len(scopes) < 2:
            return scopes[0] if scopes else nullcontext()
        return _all_of(scopes)

    @contextmanager
    def handing_out_hidden_states(
        self, layers: tuple[int, ...], take: Callable[[int, Tensor], None]
    ) -> Iterator[None]:
        from megatron_async.models.hidden_states import handing_out

        last = self.hidden_state_count - 1
        with handing_out(self.model, [layer for layer in layers if layer < last], take):
            yield
        if last in layers:
            assert self.hidden_states is not None
            take(last, self.hidden_states)

    def expert_layers(self) -> list[Any]:
        """Layers that choose experts, in the model's order, without those that draft."""
        from megatron_async.models.moe.routed import decoder_layers

        return decoder_layers(self.model)

    @property
    def weights_owner(self) -> GPTModel:
        return self.model

    def read_weights(
        self,
        source: str | Path | Mapping[str, Any] | AnySource,
        *,
        allow_non_finite_weights: bool = False,
        all_parameters: bool = False,
    ) -> Callable[[], None]:
        from megatron_async.weights.place import read_weights

        return read_weights(
            self.model,
            source,
            allow_non_finite_weights=allow_non_finite_weights,
            all_parameters=all_parameters,
        )

    __call__ = forward


@contextmanager
def _all_of(scopes: list[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope)
        yield


def _attention_window(model: GPTModel) -> int | None:
    """Tokens that the layer with the largest window attends to; None if one attends to all."""
    windows = [
        module.limits.get("window")
        for module in model.modules()
        if isinstance(module, PagedAttention)
    ]
    known = [window for window in windows if window is not None]
    return max(known) if windows and len(known) == len(windows) else None
