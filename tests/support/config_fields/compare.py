"""One config in transformers and in this package: alike, refused by name, or different."""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from megatron_async.checkpoint import load_pretrained
from megatron_async.errors import CheckpointError
from tests.support.config_fields.cases import Case

TOLERANCE = 1e-4
MOST_TOKENS = 128
MOST_LENGTHS = 4
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case.

    Args:
        verdict: "theirs": transformers refuses it. "alike": log-probabilities are within
            :data:`TOLERANCE`. "unnamed": refused by an error that does not name the field.
            "excused": different, for a reason of :data:`EXCUSED`.
        detail: the difference, or the error.
    """

    case: Case
    verdict: Literal["alike", "refused", "unnamed", "different", "theirs", "died", "excused"]
    detail: str = ""

    @property
    def said(self) -> str:
        """The verdict and why, on a line."""
        return f"{self.verdict}: {' '.join(self.detail.split())[:160]}"


RIGHT = ("alike", "refused", "theirs", "excused")
EXCUSED = {
    ("nemotron_h", "time_step_min"): "transformers clamps steps to it in prompts alone, and the "
    "published model nowhere",
}
"""What transformers itself gets wrong, by type and field. Dynamic rope is not compared beyond
``max_position_embeddings``: transformers rotates a whole prompt by its length, and its own
``generate`` each token by the length at its time."""


def their_model(folder: Path, seed: int = 5) -> Any:
    """transformers' model of the config in ``folder``, with random weights that matter."""
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in name:
                torch.nn.init.normal_(parameter, 0, 0.25)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model.float().eval()


def lengths(values: dict[str, Any], longest: int) -> list[int]:
    """Prompts up to twice every length that the config names, and no longer than a request."""
    named = {5, 33}

    def add(found: Any) -> None:
        for name, value in found.items():
            if isinstance(value, dict):
                add(value)
            elif type(value) is int and ("position" in name or "window" in name):
                named.update((value, value + 1, 2 * value))

    add(values)
    most = min(longest, MOST_TOKENS)
    found = sorted({min(n, most) for n in named if n > 0})
    return [found[0], *found[1:][-MOST_LENGTHS:]]


def is_dynamic(values: dict[str, Any]) -> bool:
    """Beyond ``max_position_embeddings`` transformers rotates a whole prompt by its length."""
    kinds = (values.get("rope_type"), values.get("type"))
    inner = (x for x in values.values() if isinstance(x, dict))
    return "dynamic" in kinds or any(is_dynamic(x) for x in inner)


def saved_model(folder: Path, values: dict[str, Any]) -> Any:
    """transformers' model of a config, whose weights are stored beside the config as it is."""
    folder.mkdir(exist_ok=True)
    stored = folder / "config.json"
    stored.write_text(json.dumps(values))
    model = their_model(folder)
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.long))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    stored.write_text(json.dumps(values))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return model


def compare(case: Case) -> Result:
    """Load the case on both sides and compare all log-probabilities at each length."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        try:
            theirs = saved_model(folder, case.values)
        except Exception as error:  # whatever its code runs into
            return Result(case, "theirs", f"{type(error).__name__}: {error}")
        return _compared(case, folder, theirs)


def _compared(case: Case, folder: Path, theirs: Any) -> Result:
    try:
        loaded = load_pretrained(folder)
    except CheckpointError as error:
        path = [*case.field.split("."), *case.shown.split(" ")]
        if "longrope" in case.shown:  # with another share of a head there are too many factors
            path.append("short_factor")
        is_named = any(part in str(error) for part in path)
        return Result(
            case, "refused" if is_named else "unnamed", str(error).split("config.json: ")[-1]
        )
    except Exception as error:  # a refusal must be a CheckpointError
        return Result(case, "died", f"{type(error).__name__}: {error}")
    worst, where, longest = 0.0, 0, loaded.config.max_sequence_length
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 90, (1, MOST_TOKENS), generator=generator)
    if is_dynamic(case.values):
        longest = min(longest, case.values.get("max_position_embeddings", longest))
    for length in lengths(case.values, longest):
        with torch.no_grad():
            try:
                expected = theirs(ids[:, :length]).logits.log_softmax(-1)
            except Exception as error:
                return Result(case, "theirs", f"{length} tokens: {error}")
            found = loaded.model(
                ids[:, :length], torch.arange(length)[None], None, runtime_gather_output=True
            ).log_softmax(-1)
        difference = float((found - expected).abs().max())
        if not difference <= worst:
            worst, where = difference, length
    detail = f"{worst:.2g} at {where} tokens"
    if worst < TOLERANCE:
        return Result(case, "alike", detail)
    fields = case.field.split(".")
    reasons = (EXCUSED[of] for of in EXCUSED if of[0] == case.model_type and of[1] in fields)
    reason = next(reasons, None)
    return Result(case, "different", detail) if reason is None else Result(case, "excused", reason)
