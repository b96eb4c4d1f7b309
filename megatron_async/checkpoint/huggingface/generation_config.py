"""Sampling defaults of a Hugging Face directory: its ``generation_config.json``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_async.checkpoint.reading.field_uses import FieldUses
from megatron_async.checkpoint.reading.fields import Fields
from megatron_async.checkpoint.reading.json_file import read_json
from megatron_async.checkpoint.reading.regular_files import is_regular_file
from megatron_async.errors import CheckpointError, RequestError, legible, shown
from megatron_async.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"
TOP_K = 50
"""What transformers samples from where the file does not say."""
SAMPLED = FieldUses.of(
    heeded="do_sample temperature top_k top_p min_p repetition_penalty max_new_tokens eos_token_id",
    neutral="early_stopping length_penalty use_mtp use_cache cache_config max_cache_len low_memory "
    "prefill_chunk_size renormalize_logits output_attentions output_hidden_states output_scores "
    "output_logits return_dict_in_generate pad_token_id bos_token_id decoder_start_token_id "
    "is_assistant num_assistant_tokens num_assistant_tokens_schedule "
    "assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size "
    "assistant_early_exit assistant_lookbehind target_lookbehind speculation_type compile_config "
    "disable_compile continuous_batching_config transformers_version",
    max_length=(), min_length=(0,), min_new_tokens=(0,), max_time=(), stop_strings=([],),
    num_beams=(1,), num_beam_groups=(1,), diversity_penalty=(0,), num_return_sequences=(1,),
    penalty_alpha=(0,), dola_layers=(), constraints=([],), force_words_ids=([],),
    cache_implementation=(
        "dynamic", "static", "offloaded", "offloaded_static", "sliding_window", "hybrid",
        "hybrid_chunked", "offloaded_hybrid", "offloaded_hybrid_chunked", "paged",
    ),
    top_h=(), typical_p=(1,), epsilon_cutoff=(0,), eta_cutoff=(0,),
    encoder_repetition_penalty=(1,), encoder_no_repeat_ngram_size=(0,), no_repeat_ngram_size=(0,),
    bad_words_ids=([],), suppress_tokens=([],), begin_suppress_tokens=([],), sequence_bias=({}, []),
    forced_bos_token_id=(), forced_eos_token_id=(), exponential_decay_length_penalty=(),
    remove_invalid_values=(False,), token_healing=(False,), guidance_scale=(1,),
    watermarking_config=(), assistant_ensemble_weight=(),
)  # fmt: skip
"""Fields of transformers' ``GenerationConfig``. Beams and drafts of its own are not this engine's;
one whose value would change what is generated is named in the log."""
GREEDY = SAMPLED | FieldUses.of(neutral="top_h typical_p epsilon_cutoff eta_cutoff")
"""The same where the likeliest token is taken."""


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """Fields of :class:`SamplingParams` that the file sets: ``temperature``, ``top_k``, ``top_p``,
    ``min_p``, ``repetition_penalty`` and ``num_tokens_to_generate`` (its ``max_new_tokens``).

    As in transformers, without ``"do_sample": true`` the likeliest token is taken, and without a
    ``top_k`` it is one of 50. Other fields that would change what is generated are named in the
    log.

    Raises:
        CheckpointError: there is no such file, or a value is of a wrong type or out of range.
    """
    path = directory / GENERATION_FILE
    if not is_regular_file(path):
        raise CheckpointError(
            f"{directory}: has no {GENERATION_FILE}; leave --generation-config out"
        )
    values = read_json(path)
    try:
        found = _sampling(Fields(values))
        SamplingParams(**found).checked()
    except (CheckpointError, RequestError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    _name_others(path, values, GREEDY if found["temperature"] == 0 else SAMPLED)
    return found


def _sampling(fields: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {"temperature": 0.0}
    if fields.read("do_sample", bool, False) and fields.get("temperature") != 0:
        kinds = {"temperature": float, "top_k": int, "top_p": float, "min_p": float}
        given = {name: fields.unless_zero(name, kind) for name, kind in kinds.items()}
        found = {name: value for name, value in given.items() if value is not None}
        found.setdefault("temperature", 1.0)
        if fields.get("top_k") is None:
            found["top_k"] = TOP_K
    for theirs, ours, kind in (
        ("repetition_penalty", "repetition_penalty", float),
        ("max_new_tokens", "num_tokens_to_generate", int),
    ):
        if fields.get(theirs) is not None:
            found[ours] = fields.read(theirs, kind)
    return found


def _name_others(path: Path, values: Mapping[str, Any], uses: FieldUses) -> None:
    """Warn of fields that transformers' ``generate`` heeds, and of those that nobody knows."""
    if names := uses.unsupported(values):
        told = ", ".join(f"{name}={shown(values[name])}" for name in names)
        logger.warning("%s: %s would change what transformers generates; left unread", path, told)
    if unknown := uses.unknown(values):
        logger.warning("%s: fields that are left unread: %s", path, legible(", ".join(unknown)))
