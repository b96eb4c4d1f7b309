"""Rows that a grammar guides draft: with drafts that know it and err, with those of the grammar
itself, beside rows that nothing guides."""

from __future__ import annotations

import pytest

from tests.support.engines import DEPTHS
from tests.support.guided_rows import (
    forced_stretches_come_as_drafts,
    guided_rows_draft_and_are_those_of_the_oracle,
)

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize("depth", DEPTHS)
def test_guided_rows_draft_and_are_those_of_the_oracle(depth: int) -> None:
    guided_rows_draft_and_are_those_of_the_oracle(depth)


@pytest.mark.parametrize("depth", DEPTHS)
def test_forced_stretches_come_as_drafts(depth: int) -> None:
    forced_stretches_come_as_drafts(depth)
