"""The errors a user can meet. Each message names the value and says what to change."""


class MegatronAsyncError(Exception):
    """Base of every error this package raises on purpose; the command line exits with status 2."""


class ConfigError(MegatronAsyncError, ValueError):
    """A configuration value is invalid, or two values contradict each other."""


class CacheTooLargeError(ConfigError):
    """The KV cache or the state of the slots does not fit into the device's memory."""


class RequestError(MegatronAsyncError, ValueError):
    """A request cannot be served as asked; other requests are not affected."""


class RequestTooLongError(RequestError):
    """Prompt and generation together exceed the maximum sequence length, or the whole cache."""


class EngineSuspendedError(MegatronAsyncError, RuntimeError):
    """The engine is suspended, and has nothing left to hand out: resume it first."""


class EngineStoppedError(MegatronAsyncError, RuntimeError):
    """The engine is closed, or an error in a step has ended it: build a new one."""


class EngineDeadError(MegatronAsyncError, RuntimeError):
    """The engine's process has died, is frozen or has not started yet; it may come back."""


class EngineGivenUpError(EngineDeadError):
    """The engine's process has died too often, and is not started again."""


class FrontEndDeadError(MegatronAsyncError, RuntimeError):
    """A front end of a server has died too often, and is not started again."""


class BusyError(MegatronAsyncError, RuntimeError):
    """Another call of the same kind is in progress; try again when it is over."""


class QueueFullError(MegatronAsyncError, RuntimeError):
    """As many requests wait as may; try again later."""


class ModelOutputError(MegatronAsyncError, RuntimeError):
    """The model gave NaN for a request, which has ended; the others go on."""


class ReentrantCallError(MegatronAsyncError, RuntimeError):
    """A call that would step or change an engine came from inside one of its steps; nothing has
    happened."""


class EngineThreadError(MegatronAsyncError, RuntimeError):
    """The engine's own thread runs its steps, so nobody else may; nothing has happened."""


class CheckpointError(MegatronAsyncError, ValueError):
    """A model directory is missing, corrupt, or of an architecture that is not supported."""


class IntegrityError(MegatronAsyncError, RuntimeError):
    """An internal invariant does not hold: a bug in this package, never a user's mistake."""
