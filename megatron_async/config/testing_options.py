"""Knobs for tests and ``bench``: what changes timing, or what tokens mean, and serves nobody."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_async.errors import ConfigError, shown

NAME = "testing"


@dataclass(frozen=True, kw_only=True, slots=True)
class TestingOptions:
    """The field ``testing`` of an ``EngineConfig``.

    Attributes:
        jitter_seed: CPU only: sleep random times around device work.
        speculative_step_costs: (rows, window, seconds) of decode steps for
            ``adaptive_speculation``, in place of what it would measure: the header of a recorded
            run has them.
        automata_at_once: tables of grammars are made where requests are added, and not in the
            background: the first request of a grammar waits for its table, and has it.
        synthetic_acceptance: drafts count as right at this rate, and tokens mean nothing.

    Raises:
        ConfigError: a value is out of range.
    """

    __test__: ClassVar[bool] = False
    """pytest collects no class of this name."""

    jitter_seed: int | None = None
    speculative_step_costs: tuple[tuple[int, int, float], ...] | None = None
    automata_at_once: bool = False
    synthetic_acceptance: float | None = None

    def __post_init__(self) -> None:
        seed, rate = self.jitter_seed, self.synthetic_acceptance
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise ConfigError(f"jitter_seed={shown(seed)} must be an integer")
        if not isinstance(self.automata_at_once, bool):
            said = f"automata_at_once={shown(self.automata_at_once)} must be True or False"
            raise ConfigError(said)
        is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
        if rate is not None and not (is_number and 0 <= rate <= 1):
            raise ConfigError(f"synthetic_acceptance={shown(rate)} must be between 0 and 1")
        self._check_step_costs()

    def _check_step_costs(self) -> None:
        """Make them Python's own numbers."""
        if self.speculative_step_costs is None:
            return
        name = "speculative_step_costs"
        try:
            costs = tuple(
                (int(rows), int(window), float(seconds))
                for rows, window, seconds in self.speculative_step_costs
            )
        except (TypeError, ValueError):
            raise ConfigError(f"{name} must be (rows, window, seconds) tuples of numbers") from None
        if not costs or any(min(cost) <= 0 or math.isinf(cost[2]) for cost in costs):
            raise ConfigError(f"{name} must have rows, window and finite seconds above 0")
        object.__setattr__(self, name, costs)

    def check_windows(self, windows: set[int]) -> None:
        """Raises :class:`ConfigError` unless the step costs, if any, have each window's."""
        costs = self.speculative_step_costs or ()
        for rows in {cost[0] for cost in costs}:
            missing = windows - {cost[1] for cost in costs if cost[0] == rows}
            if missing:
                raise ConfigError(
                    f"speculative_step_costs has no seconds for {rows} rows and windows "
                    f"{sorted(missing)}; add them"
                )


def as_testing_options(value: object) -> TestingOptions:
    """Return the options of a mapping, as a recorded run and rank 0 have them.

    Raises:
        ConfigError: it is no mapping, or has an unknown field or a wrong value.
    """
    if isinstance(value, TestingOptions):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{NAME}={shown(value)} must be a TestingOptions, or its fields")
    try:
        return TestingOptions(**value)
    except TypeError as error:
        raise ConfigError(f"{NAME}={shown(value)}: {error}") from None
