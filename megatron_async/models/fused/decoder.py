"""A GPTModel's forward over one token a row in five kernels a layer (``kernels/``).

    QKV product (norm inside) -> attention (norm of heads, rotation, append inside) ->
    output product (adds to the residual stream) -> first MLP product (norm and activation
    inside) -> second MLP product (adds to the residual stream)

It reads the model's own parameters, so weights updated in place are used at once. Whatever is not
covered (``fused_coverage.py``) runs in the model's own forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_async.kernels import compile as cuda
from megatron_async.kernels.attention import decode_attention as cuda_attention
from megatron_async.kernels.gemm.skinny_gemm import SkinnyGemm, defines
from megatron_async.kernels.gemm.tile_choice import choose
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    ANY_SHAPE_ROWS,
    LAYER_NORM,
    MAX_ROWS,
    NO_NORM,
    RMS_NORM,
    STORE,
    GemmProblem,
    TileConfig,
    load_tuned,
    lookup,
    padded,
)
from megatron_async.kernels.norm.embed import Embed
from megatron_async.models.fused.coverage import epilogue_of, norm_kind, why_not

Norm = tuple[Tensor, Tensor | None, float]
"""Weight, bias, epsilon."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of the model: its shape, what is inside it, how it is cut if that is fixed, whether
    it may be cut into boxes, and what was found to be best on this machine."""

    n: int
    k: int
    norm: int
    epilogue: int
    fixed: TileConfig | None = None
    tma: bool = True
    found: Mapping[GemmProblem, TileConfig] = field(default_factory=dict)
    sm_count: int = field(kw_only=True)

    def case(self, rows: int) -> GemmProblem:
        """It for padded ``rows``."""
        return GemmProblem(rows, self.n, self.k, self.norm, self.epilogue)

    def tiling(self, rows: int) -> TileConfig | None:
        """How it is cut for padded ``rows``; None if it cannot be built."""
        if self.fixed is not None:
            return self.fixed
        found = lookup(self.found, self.case(rows))
        if found is not None and found.tma <= self.tma:
            return found
        return choose(
            self.n, self.k, rows, self.norm, self.epilogue, self.tma, sm_count=self.sm_count
        )


@dataclass(frozen=True, slots=True)
class _Layer:
    index: int
    input_norm: Norm
    qkv: tuple[Tensor, Tensor | None]
    head_norms: tuple[Tensor | None, Tensor | None, float]
    scale: float
    projection: tuple[Tensor, Tensor | None]
    mlp_norm: Norm
    fc1: tuple[Tensor, Tensor | None]
    fc2: tuple[Tensor, Tensor | None]


class FusedDecoder:
    """The fused forward of one model. Buffers are static: one forward at a time.

    Args:
        tilings: for products by name, at all numbers of rows, in place of the measured ones.

    Raises:
        ValueError: :func:`~.fused_coverage.why_not` has a reason.
    """

    def __init__(self, model: Any, tilings: Mapping[str, TileConfig] | None = None) -> None:
        reason = why_not(model)
        if reason is not None:
            raise ValueError(reason)
        self._model = model
        weight = next(model.parameters())
        self._device: torch.device = weight.device
        self._index: int = weight.device.index or 0
        config = model.config
        self._norm = norm_kind(model.decoder.final_layernorm)
        assert self._norm is not None
        self._layers = [_layer(layer) for layer in model.decoder.layers]
        first = self._layers[0]
        attention = model.decoder.layers[0].self_attention
        self._kv_heads: int = attention.num_query_groups_per_partition
        self._head_dim: int = attention.hidden_size_per_attention_head
        self._heads: int = attention.num_attention_heads_per_partition
        self._has_head_norms = first.head_norms[0] is not None
        rotary = getattr(model, "rotary", None)
        self._cos_sin: Tensor | None = None if rotary is None else rotary.cos_sin
        epilogue = epilogue_of(model.decoder.layers[0].mlp, config)
        assert epilogue is not None
        hidden = config.hidden_size
        head = self._head_weight()
        shapes = {
            "qkv": (first.qkv[0].shape[0], hidden, self._norm, STORE),
            "projection": (hidden, first.projection[0].shape[1], NO_NORM, ADD),
            "fc1": (first.fc1[0].shape[0], hidden, self._norm, epilogue),
            "fc2": (hidden, first.fc2[0].shape[1], NO_NORM, ADD),
            "head": (head.shape[0], hidden, self._norm, STORE),
        }
        fixed = tilings or {}
        tma, sm_count = cuda.has_wgmma(self._index), cuda.sm_count(self._index)
        found = load_tuned(cuda.device_name(self._index))
        self.products = {
            name: Product(*shape, fixed.get(name), tma, found, sm_count=sm_count)
            for name, shape in shapes.items()
        }
        self._plans: dict[int, dict[str, SkinnyGemm] | None] = {}
        self._attentions = cuda_attention.DecodeAttentions(self._device)
        self._embeds: dict[int, Embed] = {}
        rows = MAX_ROWS
        self._hidden = self._empty(rows, hidden)
        # Times the next norm's weight, where that is RMSNorm.
        self._scaled = self._empty(rows, hidden) if self._norm == RMS_NORM else self._hidden
        self._qkv = self._empty(rows, first.qkv[0].shape[0])
        self._attended = self._empty(rows, self._heads * self._head_dim)
        self._activated = self._empty(rows, first.fc2[0].shape[1])
        # The finest statistics: 16 elements each.
        self._statistics = [
            torch.empty(rows * hidden // 16 * 2, dtype=torch.float32, device=self._device)
            for _ in range(2)
        ]

    def _empty(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16, device=self._device)

    def _head_weight(self) -> Tensor:
        model = self._model
        shared = model.share_embeddings_and_output_weights
        weight: Tensor = (
            model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
        )
        return weight

    def compile(self, rows: list[int], context: Any) -> None:
        """Compile what forwards of so many rows need, side by side; later calls find it."""
        work: list[tuple[str, dict[str, int]]] = []
        sizes = {padded(r) for r in rows if r <= cuda_attention.MOST_ROWS}
        for most in sizes:
            for name, tiling in (self._tilings(most) or {}).items():
                work.append((tiling.kernel, self.defines(self.products[name], most, tiling)))
        if self._attention_off(context) is None:
            heads, capacity = self._heads_of(context), _capacity(context)
            sm_count = cuda.sm_count(self._index)
            work += [("attention", heads.defines(most, capacity, sm_count)) for most in sizes]
        cuda.compile_together(work, cuda.architecture(self._index))

    def _attention_off(self, context: Any) -> str | None:
        rotated = 0 if self._cos_sin is None else 2 * self._cos_sin.shape[2]
        return cuda_attention.unsupported(
            self._head_dim, self._heads // self._kv_heads, context.block_size_tokens, rotated
        )

    def defines(self, product: Product, rows: int, tiling: TileConfig) -> dict[str, int]:
        """Macros of a product's kernel for padded ``rows``."""
        statistics = LAYER_NORM if self._norm == LAYER_NORM else RMS_NORM
        return defines(
            product.n,
            product.k,
            rows,
            product.norm,
            product.epilogue,
            statistics,
            tiling,
            cuda.sm_count(self._index),
        )

    def off(self, rows: list[int], context: Any) -> str | None:
        """Why decode steps of some of so many rows will not be taken, :data:`ANY_SHAPE_ROWS` rows
        and fewer; None if all are."""
        reason = self._attention_off(context)
        if reason is not None:
            return reason
        for count in rows:
            for name, product in self.products.items():
                if count <= ANY_SHAPE_ROWS and product.tiling(padded(count)) is None:
                    return f"no kernel for {name} ({product.n} x {product.k}) at {count} rows"
        return None

    def takes(self, out: Tensor, context: Any) -> bool:
        """Whether :meth:`forward` may be called."""
        rows = out.shape[0]
        if not 0 < rows <= MAX_ROWS or getattr(context, "batch_invariant", False):
            return False
        if out.dtype != torch.bfloat16 or out.shape[1] != self.products["head"].n:
            return False
        return (
            context.is_decode_only()
            and context.last_token_index is None
            and self._attention_off(context) is None
            and self._plan(rows) is not None
        )

    def _plan(self, rows: int) -> dict[str, SkinnyGemm] | None:
        most = padded(rows)
        if most not in self._plans:
            tilings = self._tilings(most)
            statistics = LAYER_NORM if self._norm == LAYER_NORM else RMS_NORM
            self._plans[most] = (
                None
                if tilings is None
                else {
                    name: SkinnyGemm(
                        p.n, p.k, most, p.norm, p.epilogue, statistics, t, self._device
                    )
                    for (name, t), p in zip(tilings.items(), self.products.values(), strict=True)
                }
            )
        return self._plans[most]

    def _tilings(self, most: int) -> dict[str, TileConfig] | None:
        """How the products are cut for padded rows; None if one of them cannot be built."""
        tilings = {name: product.tiling(most) for name, product in self.products.items()}
        found = {name: tiling for name, tiling in tilings.items() if tiling is not None}
        return found if len(found) == len(tilings) else None

    def _heads_of(self, context: Any) -> cuda_attention.Heads:
        return cuda_attention.Heads(
            self._head_dim,
            self._heads // self._kv_heads,
            self._kv_heads,
            context.block_size_tokens,
            self._has_head_norms,
            self._cos_sin is not None,
        )

    def _embed(self, per_tile: int) -> Embed:
        if per_tile not in self._embeds:
            learned = self._model.position_embedding_type == "learned_absolute"
            assert self._norm is not None
            self._embeds[per_tile] = Embed(
                self._model.config.hidden_size,
                per_tile,
                self._norm,
                positions=learned,
                device=self._device,
            )
        return self._embeds[per_tile]

    def forward(self, token_ids: Tensor, position_ids: Tensor, context: Any, out: Tensor) -> None:
        """Decode one token of each row; :meth:`takes` must have said yes.

        Args:
            token_ids, position_ids: int64 ``[R]``.
            context: its metadata must be those of these rows.
            out: bfloat16 ``[R, vocab]``, filled with the logits.
        """
        rows = token_ids.shape[0]
        plan = self._plan(rows)
        assert plan is not None
        model = self._model
        embedding = model.embedding
        learned = model.position_embedding_type == "learned_absolute"
        hidden, scaled, qkv = self._hidden[:rows], self._scaled[:rows], self._qkv[:rows]
        attended, activated = self._attended[:rows], self._activated[:rows]
        size = hidden.shape[1]
        per_layer, per_half = plan["fc2"].statistic_rows, plan["projection"].statistic_rows
        layer_stats = self._statistics[0][: rows * size // per_layer * 2].view(rows, -1, 2)
        half_stats = self._statistics[1][: rows * size // per_half * 2].view(rows, -1, 2)
        attention = self._attentions.get(self._heads_of(context), rows, _capacity(context))
        final = _norm_of(model.decoder.final_layernorm)
        input_norms = [layer.input_norm for layer in self._layers] + [final]

        def scaled_by(norm: Norm) -> tuple[Tensor, Tensor] | None:
            return (norm[0], scaled) if self._norm == RMS_NORM else None

        self._embed(per_layer)(
            token_ids,
            position_ids,
            embedding.word_embeddings.weight,
            embedding.position_embeddings.weight if learned else None,
            hidden,
            layer_stats,
            scaled_by(input_norms[0]),
        )
        for layer, next_norm in zip(self._layers, input_norms[1:], strict=True):
            plan["qkv"](
                scaled, layer.qkv[0], qkv, bias=layer.qkv[1], norm=layer.input_norm,
                statistics=layer_stats,
            )  # fmt: skip
            keys, values = context.kv_cache[layer.index]
            attention(
                qkv, keys, values, context.block_table, context.token_slots, position_ids,
                context.slot_mapping, attended, scale=layer.scale, cos_sin=self._cos_sin,
                q_weight=layer.head_norms[0], k_weight=layer.head_norms[1],
                eps=layer.head_norms[2],
            )  # fmt: skip
            plan["projection"](
                attended, layer.projection[0], hidden, bias=layer.projection[1], residual=hidden,
                scaled=scaled_by(layer.mlp_norm), statistics_out=half_stats,
            )  # fmt: skip
            plan["fc1"](
                scaled, layer.fc1[0], activated, bias=layer.fc1[1], norm=layer.mlp_norm,
                statistics=half_stats,
            )  # fmt: skip
            plan["fc2"](
                activated, layer.fc2[0], hidden, bias=layer.fc2[1], residual=hidden,
                scaled=scaled_by(next_norm), statistics_out=layer_stats,
            )  # fmt: skip
        plan["head"](scaled, self._head_weight(), out, norm=final, statistics=layer_stats)


def _capacity(context: Any) -> int:
    """Tokens that a row may have."""
    capacity: int = context.block_table.shape[1] * context.block_size_tokens
    return capacity


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attention, layer.mlp
    has_norms = norm_kind(attention.q_layernorm) is not None
    q_norm, k_norm = attention.q_layernorm, attention.k_layernorm
    return _Layer(
        index=attention.layer_index,
        input_norm=_norm_of(layer.input_layernorm),
        qkv=_linear_of(attention.linear_qkv),
        head_norms=(q_norm.weight, k_norm.weight, q_norm.eps) if has_norms else (None, None, 0.0),
        scale=attention.softmax_scale,
        projection=_linear_of(attention.linear_proj),
        mlp_norm=_norm_of(layer.pre_mlp_layernorm),
        fc1=_linear_of(mlp.linear_fc1),
        fc2=_linear_of(mlp.linear_fc2),
    )


def _norm_of(norm: Any) -> Norm:
    return norm.weight, getattr(norm, "bias", None), norm.eps


def _linear_of(linear: Any) -> tuple[Tensor, Tensor | None]:
    return linear.weight, linear.bias
