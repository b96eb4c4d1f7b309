"""Weights that are stored in fewer bits than they are served in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FIELD = "quantization_config"
MODELOPT_FILE = "hf_quant_config.json"


def is_plain(directory: Path, values: Mapping[str, Any]) -> bool:
    """Whether nothing says that weights of ``directory`` are quantized, whose ``config.json`` has
    ``values``."""
    return values.get(FIELD) is None and not (directory / MODELOPT_FILE).exists()
