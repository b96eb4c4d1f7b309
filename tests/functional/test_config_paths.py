"""Fields of a config hold on every path of the engine and in every format that a model is stored
in; ``scripts/compare_config_fields.py --paths`` has all types."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.config_fields.compare import TOLERANCE
from tests.support.config_fields.routes import (
    MADE,
    ROUTES,
    SAVE,
    Subject,
    difference_on,
    is_stored_exactly,
    values_of,
)

AT_ONCE = 3
"""Ways that each type goes."""
LACKS = {("bamba", "layers that draft")}
"""A hybrid model of Hugging Face has no layers for multi-token prediction."""


@pytest.fixture(scope="module", params=MADE)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A type with the fields that were once wrong."""
    return Subject.of(values_of(request.param), tmp_path_factory.mktemp(request.param))


def drawn() -> list[tuple[str, str]]:
    """Types with the ways that they go; each way is gone by some of them."""
    ways = list(ROUTES)
    turned = (
        (kind, ways[(number + n) % len(ways)])
        for number, kind in enumerate(MADE)
        for n in range(AT_ONCE)
    )
    return [each for each in turned if each not in LACKS]


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(("subject", "way"), drawn(), indirect=["subject"])
def test_log_probs_are_transformers_on_every_path(
    subject: Subject, way: str, tmp_path: Path
) -> None:
    assert difference_on(subject, ROUTES[way], tmp_path) < TOLERANCE


@pytest.mark.parametrize("stored", SAVE)
def test_a_stored_model_is_the_same(subject: Subject, stored: str, tmp_path: Path) -> None:
    assert is_stored_exactly(subject.ours, stored, tmp_path)
