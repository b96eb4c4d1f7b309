"""What a process and its parent tell each other, whatever it does."""

from __future__ import annotations

import msgspec

from megatron_async.errors import EngineDeadError, MegatronAsyncError, error_named


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End in good order; the second one does not wait for requests."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A process is alive; ``doing``: what, as long as it does not serve."""

    doing: str = ""


class Preparing(msgspec.Struct, frozen=True, tag=True):
    """A process that serves begins something during which it may be silent for as long as one that
    starts, until it sends :class:`Started` again."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """A process serves."""


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """A process cannot serve what it was asked to: a class of ``megatron_async.errors``, why."""

    error: str
    message: str

    @classmethod
    def because(cls, error: MegatronAsyncError) -> NotStarted:
        """Say so of an error."""
        return cls(type(error).__name__, str(error))

    def to_error(self) -> MegatronAsyncError:
        """Return the error again."""
        return error_named(self.error, self.message) or EngineDeadError(self.message)
