"""The errors a user can meet. Each message names the value and says what to change."""

MOST_CHARACTERS = 1200
"""A message about a file has at most this many characters. A file may hold a megabyte where a word
is expected."""


MOST_SHOWN = 200
"""Characters of a wrong value that a message shows, unless it says otherwise."""


def shown(value: object, most: int = MOST_SHOWN) -> str:
    """A value on one line, however large it is."""
    try:
        text = " ".join(repr(value).splitlines())
    except ValueError:  # an integer of more digits than Python converts
        return "a number of too many digits"
    except Exception:  # of its class's own
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= most else f"{text[:most]}..."


def legible(message: str) -> str:
    """``message`` on one line of at most about :data:`MOST_CHARACTERS`, without characters that
    steer a terminal or cannot be written."""
    if len(message) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        message = f"{message[:half]} [...] {message[-half:]}"
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in message
    )


class MegatronAsyncError(Exception):
    """Base of every error this package raises on purpose; the command line exits with status 2."""


class ConfigError(MegatronAsyncError, ValueError):
    """A configuration value is invalid, or two values contradict each other."""


class CacheTooLargeError(ConfigError):
    """The KV cache or the state of the slots does not fit into the device's memory."""


class ModelTooLargeError(ConfigError):
    """A model's weights do not fit into the device's memory."""


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


class ReplicaDiedError(EngineDeadError):
    """The replica that served a request has died, as ``deaths`` in all. ``may_try_again``: with
    another one, if nobody has seen anything of it yet."""

    def __init__(self, message: str, *, deaths: int, may_try_again: bool) -> None:
        super().__init__(message)
        self.deaths = deaths
        self.may_try_again = may_try_again


class RankDiedError(MegatronAsyncError, RuntimeError):
    """A rank of the model's group has died or failed, and the group has ended with it: build a new
    engine."""


class EngineStalledError(EngineDeadError):
    """The engine's process is there and takes no step, though requests wait for one."""


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

    def __init__(self, message: str) -> None:
        super().__init__(legible(message))


class IntegrityError(MegatronAsyncError, RuntimeError):
    """An internal invariant does not hold: a bug in this package, never a user's mistake."""


def error_named(name: str, message: str) -> MegatronAsyncError | None:
    """The error of this package whose class has a name; None if there is none."""
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, MegatronAsyncError)):
        return None
    return kind(message)
