"""Weights of Hugging Face directories: which stored tensor goes where in a ``GPTModel``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_async.checkpoint.huggingface.expert_weights import expert_targets
from megatron_async.checkpoint.huggingface.family import Names
from megatron_async.checkpoint.huggingface.huggingface import family_of
from megatron_async.checkpoint.huggingface.latent_weights import latent_targets
from megatron_async.checkpoint.huggingface.mamba_weights import mamba_targets
from megatron_async.checkpoint.huggingface.mtp_weights import mtp_layers, mtp_targets
from megatron_async.checkpoint.quantized import is_plain, kept_weights
from megatron_async.checkpoint.reading.files import SafetensorsWeights, stored_headers
from megatron_async.checkpoint.reading.json_file import read_json
from megatron_async.checkpoint.targets import EMBEDDING, OUTPUT, Stage, Target, TensorParallel
from megatron_async.errors import CheckpointError, IntegrityError
from megatron_async.models.description.config import ModelConfig
from megatron_async.models.mamba.sizes import ATTENTION, EXPERTS, MAMBA

Arrange = Callable[[Tensor], Tensor]
"""From a whole stored tensor to the same elements in the order of megatron's parameter."""


class Targets(dict[str, Target]):
    """Targets by stored name; knows which parameters no stored tensor fills."""

    def __init__(
        self,
        parameters: dict[str, Tensor],
        parallel: TensorParallel,
        *,
        transposed: bool = False,
        stage: Stage | None = None,
    ) -> None:
        self._parameters = parameters
        self._parallel = parallel
        self._transposed = transposed
        self._stage = stage or Stage()
        self.unused = set(parameters)
        self.elsewhere: set[str] = set()
        """Stored tensors that other ranks take."""

    def rename(self, own: Callable[[str], str]) -> None:
        """Give each stored tensor its ``own`` name."""
        self.elsewhere = set(map(own, self.elsewhere))
        for name in list(self):
            self[own(name)] = self.pop(name)

    def is_elsewhere(self, name: str, *stored: str) -> bool:
        """Whether ``name``, which ``stored`` tensors fill, is a parameter of another stage."""
        if self._stage.local(name) is not None:
            return False
        self.elsewhere.update(stored)
        return True

    def parameter(self, name: str) -> Tensor:
        local = self._stage.local(name)
        if local is None:
            raise CheckpointError(
                "a model of this type is not divided into pipeline stages: leave "
                "pipeline_model_parallel_size out"
            )
        name = local
        self.unused.discard(name)
        if name not in self._parameters:
            raise IntegrityError(f"the model built for this config has no parameter {name}")
        return self._parameters[name].detach()

    def share(
        self, name: str, view: Tensor, shape: list[int], groups: int, *, of_one_expert: bool = False
    ) -> Target:
        """See :meth:`TensorParallel.target`."""
        return self._parallel.target(name, view, shape, groups, of_one_expert=of_one_expert)

    def first_expert(self, stacked: Tensor) -> int:
        """The number of the first of this rank's experts, which are ``stacked``."""
        return len(stacked) * self._parallel.expert_rank

    def whole(
        self, stored: str, name: str, arrange: Arrange | None = None, groups: int = 1
    ) -> None:
        """``groups``: see :meth:`TensorParallel.target`."""
        if self.is_elsewhere(name, stored):
            return
        parameter = self.parameter(name)
        self._add(stored, name, parameter, list(parameter.shape), arrange, groups)

    def rows(
        self,
        stored: dict[str, slice],
        name: str,
        lead: tuple[int, ...],
        arrange: dict[str, Arrange] | None = None,
    ) -> None:
        """Split ``name`` along ``lead`` (its rows as sizes) and give each part to a tensor.

        ``lead`` is (groups, parts, rows): a stored tensor takes its slice of parts.
        """
        if self.is_elsewhere(name, *stored):
            return
        parameter = self.parameter(name)
        grid = parameter.view(*lead, *parameter.shape[1:])
        for stored_name, part in stored.items():
            view = grid[:, part]
            shape = [view.shape[:3].numel(), *parameter.shape[1:]]
            self._add(stored_name, name, view, shape, (arrange or {}).get(stored_name))

    def parts(self, stored: Sequence[str], name: str, expert: int | None = None) -> None:
        """Give each stored tensor an equal share of the rows of ``name``, or of one expert's."""
        if self.is_elsewhere(name, *stored):
            return
        parameter = self.parameter(name)
        view = parameter
        if expert is not None:
            here = expert - self.first_expert(parameter)
            if not 0 <= here < len(parameter):
                self.elsewhere.update(stored)
                return
            view = parameter[here]
        for stored_name, part in zip(stored, view.chunk(len(stored)), strict=True):
            of_one = expert is not None
            self._add(stored_name, name, part, list(part.shape), None, of_one_expert=of_one)

    def _add(
        self,
        stored: str,
        name: str,
        view: Tensor,
        shape: list[int],
        arrange: Arrange | None,
        groups: int = 1,
        *,
        of_one_expert: bool = False,
    ) -> None:
        target = self.share(name, view, shape, groups, of_one_expert=of_one_expert)
        is_linear = ".linear_" in name and len(target.shape) == 2
        if self._transposed and is_linear:
            rest, rows = arrange, target.shape[::-1]
            target = Target(view, rows, _then(Tensor.t, _then(rest, target.select)))
        elif arrange is not None:
            target = Target(view, target.shape, _then(arrange, target.select))
        self[stored] = target


def _then(first: Arrange | None, second: Arrange) -> Arrange:
    if first is None:
        return second
    return lambda stored: second(first(stored))


def half_split(stored: Tensor, config: ModelConfig) -> Tensor:
    """Rows of heads whose rotated pairs are neighbours, with the pairs half the rotated part
    apart: what ``models/layers/rope.py`` rotates. ``stored`` is ``[heads * head_dim, ...]``."""
    heads = stored.reshape(-1, config.head_dim, *stored.shape[1:])
    rotated = config.rotary_dim
    parts = [heads[:, 0:rotated:2], heads[:, 1:rotated:2], heads[:, rotated:]]
    return torch.cat(parts, dim=1).reshape(stored.shape)


def by_group(stored: Tensor, config: ModelConfig, interleaved: bool) -> Tensor:
    """Rows of all queries, all keys, all values as those of each key-value head in turn: its
    queries, its key, its value."""
    sizes = [config.num_attention_heads, config.num_kv_heads, config.num_kv_heads]
    parts = list(stored.split([n * config.head_dim for n in sizes]))
    if interleaved:
        parts[:2] = [half_split(part, config) for part in parts[:2]]
    grouped = [part.reshape(config.num_kv_heads, -1, *stored.shape[1:]) for part in parts]
    return torch.cat(grouped, dim=1).reshape(stored.shape)


def weight_targets(
    config: ModelConfig,
    parameters: dict[str, Tensor],
    parallel: TensorParallel,
    names: Names,
    stored: Collection[str] = (),
    stage: Stage | None = None,
) -> Targets:
    """Target of every stored tensor of a checkpoint with ``names``.

    ``parameters`` are those of this rank, which is of ``stage``. ``stored`` are the names of what
    is there: they decide between layouts that a type may have.

    ``linear_qkv`` holds, for each key-value head, its query heads, its key, its value.
    ``linear_fc1`` holds the gate's rows, then the up projection's.

    Raises:
        IntegrityError: ``parameters`` are not those of a model built from ``config``.
    """
    given, stored = stored, {names.in_file(name) for name in stored}
    targets = Targets(parameters, parallel, transposed=names.transposed, stage=stage)
    targets.whole(f"{names.embedding}.weight", EMBEDDING)
    if names.positions is not None:
        targets.whole(f"{names.positions}.weight", "embedding.position_embeddings.weight")
    if not config.tie_word_embeddings:
        targets.whole(f"{names.head}.weight", OUTPUT)
    for kind in _norm_parts(config):
        targets.whole(f"{names.final_norm}.{kind}", f"decoder.final_layernorm.{kind}")
    for n in range(config.num_layers):
        theirs, ours = names.layer.format(n // names.parts), f"decoder.layers.{n}"
        if config.hybrid_override_pattern is not None:
            _one_part(targets, config, names, theirs, n, stored)
            continue
        _layer(targets, config, names, theirs, ours, parallel.size)
        if config.has_experts(n):
            expert_targets(targets, config, names.experts, theirs, ours, stored)
        else:
            _mlp(targets, config, names, theirs, ours, parallel.size)
    for mtp in mtp_layers(config.mtp_num_layers):
        mtp_targets(targets, mtp)
        _layer(targets, config, names, f"{mtp.theirs}.", mtp.inner, parallel.size)
        _mlp(targets, config, names, f"{mtp.theirs}.", mtp.inner, parallel.size)
    if targets.unused:
        raise IntegrityError(f"no stored tensor fills parameter {min(targets.unused)}")
    if names.in_memory:
        targets.rename(lambda name: names.as_given(name, given))
    return targets


def _layer(
    targets: Targets, config: ModelConfig, names: Names, theirs: str, ours: str, ranks: int
) -> None:
    """Targets of one layer but for its MLP, by the prefixes of its stored names and of its
    parameters."""
    for stored, name in _norms(config, names).items():
        for kind in _norm_parts(config):
            targets.whole(f"{theirs}{stored}.{kind}", f"{ours}.{name}.{kind}")
    if config.latent_attention is not None:
        latent_targets(targets, config, theirs, ours)
        return
    if config.attention_sinks:
        sinks = f"{ours}.self_attention.core_attention.softmax_offset"
        targets.whole(f"{theirs}{names.sinks}", sinks)
    _head_norms(targets, config, names, theirs, ours)
    _attention(targets, config, names, theirs, ours, ranks)


def _one_part(
    targets: Targets,
    config: ModelConfig,
    names: Names,
    theirs: str,
    layer: int,
    stored: Collection[str],
) -> None:
    """Targets of a layer of a hybrid model."""
    assert config.hybrid_override_pattern is not None
    kind, ours = config.hybrid_override_pattern[layer], f"decoder.layers.{layer}"
    norms = {MAMBA: (names.input_norm, "norm"), ATTENTION: (names.input_norm, "input_layernorm")}
    norm, our_norm = norms.get(kind, (names.pre_mlp_norm, "pre_mlp_layernorm"))
    for part in _norm_parts(config):
        targets.whole(f"{theirs}{norm}.{part}", f"{ours}.{our_norm}.{part}")
    if kind == MAMBA:
        mamba_targets(targets, config, f"{theirs}{names.mamba}", f"{ours}.mixer")
    elif kind == ATTENTION:
        _head_norms(targets, config, names, theirs, ours)
        _attention(targets, config, names, theirs, ours, ranks=1)
    elif kind == EXPERTS:
        expert_targets(targets, config, names.experts, theirs, ours, stored)
    else:
        _mlp(targets, config, names, theirs, ours, ranks=1)


def _norm_parts(config: ModelConfig) -> tuple[str, ...]:
    has_bias = config.normalization == "LayerNorm" and config.norm_bias
    return ("weight", "bias") if has_bias else ("weight",)


def _norms(config: ModelConfig, names: Names) -> dict[str, str]:
    """A layer's norms of the hidden size: stored names, and ours."""
    found = {}
    if config.norm_placement != "post":
        found[names.input_norm] = "input_layernorm"
        if config.parallel_residual != "one_norm":
            found[names.pre_mlp_norm] = "pre_mlp_layernorm"
    if config.norm_placement != "pre":
        found[names.post_attention_norm] = "post_attention_layernorm"
        found[names.post_mlp_norm] = "post_mlp_layernorm"
    return found


def _head_norms(
    targets: Targets, config: ModelConfig, names: Names, theirs: str, ours: str
) -> None:
    if not config.qk_norm or config.qk_norm_kind == "l2":
        return
    for x, stored in (("q", names.q_norm), ("k", names.k_norm)):
        heads = config.num_attention_heads if x == "q" else config.num_kv_heads
        shape = {
            "head": (config.head_dim,),
            "projection": (heads * config.head_dim,),
            "each_head": (heads, config.head_dim),
        }[config.qk_norm_kind]

        def arrange(weight: Tensor) -> Tensor:
            return half_split(weight.flatten(), config)

        name = f"{ours}.self_attention.{x}_layernorm.weight"
        if targets.is_elsewhere(name, f"{theirs}{stored}.weight"):
            continue
        parameter = targets.parameter(name)
        plain = Target(parameter, shape)
        target = replace(plain, select=arrange) if names.interleaved else plain
        targets[f"{theirs}{stored}.weight"] = target


def _attention(
    targets: Targets, config: ModelConfig, names: Names, theirs: str, ours: str, ranks: int
) -> None:
    queries = config.num_attention_heads // config.num_kv_heads
    lead = (config.num_kv_heads // ranks, queries + 2, config.head_dim)
    q, k, v = slice(0, queries), slice(queries, queries + 1), slice(queries + 1, queries + 2)

    def grouped(stored: Tensor) -> Tensor:
        return by_group(stored, config, names.interleaved)

    def split(stored: Tensor) -> Tensor:
        return half_split(stored, config)

    for kind in ("weight", "bias"):
        bias = kind == "bias"
        if config.qkv_bias or not bias:
            qkv = f"{ours}.self_attention.linear_qkv.{kind}"
            stored = [f"{theirs}{name}.{kind}" for name in names.qkv]
            if len(stored) == 1:
                by_head = names.qkv_layout == "by_head"
                targets.whole(stored[0], qkv, None if by_head else grouped)
            else:
                pairs: dict[str, Arrange] = {}
                if names.interleaved:
                    pairs = dict.fromkeys(stored[:2], split)
                targets.rows(dict(zip(stored, (q, k, v), strict=True)), qkv, lead, pairs)
        if config.attention_output_bias or not bias:
            projection = f"{ours}.self_attention.linear_proj.{kind}"
            targets.whole(f"{theirs}{names.projection}.{kind}", projection)


def _mlp(
    targets: Targets, config: ModelConfig, names: Names, theirs: str, ours: str, ranks: int
) -> None:
    for kind in ("weight", "bias"):
        if config.mlp_bias or kind == "weight":
            fc1 = f"{ours}.mlp.linear_fc1.{kind}"
            stored = [f"{theirs}{name}.{kind}" for name in names.fc1]
            if len(stored) == 1:
                targets.whole(stored[0], fc1, groups=2 if config.gated else 1)
            else:
                parts = {name: slice(part, part + 1) for part, name in enumerate(stored)}
                targets.rows(parts, fc1, (1, 2, config.ffn_hidden_size // ranks))
            targets.whole(f"{theirs}{names.fc2}.{kind}", f"{ours}.mlp.linear_fc2.{kind}")


def _without_prefix(targets: dict[str, Target], prefix: str) -> dict[str, Target]:
    return {name.removeprefix(prefix): target for name, target in targets.items()}


def load_weights(directory: Path, config: ModelConfig, model: torch.nn.Module) -> None:
    """Fill ``model``, built from ``config``, with the weights of ``directory``.

    Raises:
        CheckpointError: see :class:`~megatron_async.checkpoint.reading.files.SafetensorsWeights`.
    """
    weights_of(directory, config, model).load()
    values = read_json(directory / "config.json")
    vars(model)["huggingface_names"] = family_of(values).names  # for new weights under these
    vars(model)["stored_cache_scales"] = None
    if not is_plain(directory, values):
        from megatron_async.checkpoint.quantized.cache_scales import cache_scales_of
        from megatron_async.checkpoint.quantized.scheme import read_scheme

        vars(model)["stored_cache_scales"] = cache_scales_of(directory, config, model)
        scheme = read_scheme(directory, values)
        vars(model)["stored_block"] = None if scheme is None else scheme.block


def weights_of(directory: Path, config: ModelConfig, model: torch.nn.Module) -> SafetensorsWeights:
    """The weights of ``directory``, for ``model``, which was built from ``config``."""
    values = read_json(directory / "config.json")
    names = family_of(values).names
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    stored = stored_headers(directory)
    stage = Stage.of(model)
    found = weight_targets(config, parameters, TensorParallel.current(), names, stored, stage)
    targets: dict[str, Target] = found
    elsewhere = found.elsewhere
    head, embedding = (
        names.as_given(f"{name}.weight", stored) for name in (names.head, names.embedding)
    )
    if names.prefix and not any(name.startswith(names.prefix) for name in stored):
        targets = _without_prefix(targets, names.prefix)
        elsewhere = {name.removeprefix(names.prefix) for name in elsewhere}
        embedding = embedding.removeprefix(names.prefix)
    copies = {head: embedding} if config.tie_word_embeddings else {}
    if embedding not in targets:  # of a stage that has neither
        elsewhere = elsewhere | copies.keys()
        copies = {}
    ignored = names.ignored

    weights = SafetensorsWeights(
        directory, targets, copies, lambda name: name in elsewhere or name.endswith(ignored)
    )
    if not is_plain(directory, values):
        from megatron_async.checkpoint.quantized.scheme import with_scales

        weights = with_scales(weights, values, stored)
    return kept_weights(weights, model)
