"""One engine as its coordinator asks it, and where it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_async.errors import ConfigError, EngineStoppedError
from megatron_async.megatron_api.coordinator.states import EngineState, EngineStates
from megatron_async.megatron_api.coordinator.tables import COORDINATOR
from megatron_async.megatron_api.names import check_keywords
from megatron_async.request.request import DynamicInferenceRequest, RequestFuture
from megatron_async.sampling_params import SamplingParams
from megatron_async.scheduler.request_state import HOLDING

if TYPE_CHECKING:
    from megatron_async.megatron_api.coordinator.coordinator import Coordinator


class EngineService:
    """What an engine has for the clients of a coordinator. Without one it costs nothing.

    Args:
        engine: a ``megatron_api.DynamicInferenceEngine``.

    Attributes:
        states: where the engine stands, and what waits for that.
        ledger: what trainers ask about requests that have ended, by uid; None keeps none.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._coordinator: Coordinator | None = None
        self.states = EngineStates()

    @property
    def listens(self) -> bool:
        """Clients are answered."""
        return self._coordinator is not None and self._coordinator.is_alive

    @property
    def state(self) -> EngineState:
        """As clients have said; an engine that its caller has suspended is so too."""
        if self.states.state is EngineState.RUNNING and self._engine.suspended:
            return EngineState.SUSPENDED
        return self.states.state

    def listen(self, host: str | None, port: int | None, given: dict[str, Any]) -> str:
        """Let the engine's thread step it, and answer clients at the address that is returned.

        Args:
            given: further arguments of ``start_listening_to_data_parallel_coordinator``.

        Raises:
            ConfigError: it does already, or an argument cannot be served.
        """
        from megatron_async.megatron_api.coordinator.coordinator import Coordinator

        check_keywords("start_listening_to_data_parallel_coordinator()", COORDINATOR, given)
        if self.listens and self.states.state is not EngineState.STOPPED:
            assert self._coordinator is not None
            raise ConfigError(f"the engine listens already, at {self._coordinator.address}")
        if self._engine.suspended:
            raise ConfigError("the engine is suspended; resume() it before clients come")
        if self._coordinator is not None:
            self._coordinator.close()
        coordinator = Coordinator(self, self.states, host, port)
        try:
            self._engine.start()
        except BaseException:
            coordinator.close()
            raise
        self.states.begin()
        self._coordinator = coordinator
        coordinator.start()
        return coordinator.address

    def close(self) -> None:
        """The engine is closed: answer what has ended, and no more."""
        if self._coordinator is not None:
            self._coordinator.close()
            self.states.end(EngineStoppedError("the engine is closed; build a new one"))

    # --- what a coordinator asks --------------------------------------------------------------

    @property
    def log_probs_mode(self) -> str | None:
        """The ``log_probs_mode`` of requests that do not say one."""
        mode: str | None = self._engine.settings.log_probs_mode
        return mode

    @property
    def ledger(self) -> dict[str, Any] | None:
        """See the class."""
        if not self._engine.local_metadata_ledger_enabled:
            return None
        ledger: dict[str, Any] = self._engine.local_metadata_ledger
        return ledger

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        opened: Callable[[DynamicInferenceRequest], None],
    ) -> RequestFuture:
        """Queue a request under an id that is free; raises :class:`RequestError`."""
        future: RequestFuture = self._engine.requests.add(
            None, prompt, params, opened=lambda key, request: opened(request)
        )[1]
        return future

    def abort_request(self, request_id: int) -> None:
        """End a request at the next step."""
        self._engine.abort_request(request_id)

    def between_steps(self, action: Callable[[], None]) -> None:
        """Take what is in flight, and call ``action`` before anything is launched."""
        lock = self._engine.lock
        try:
            with lock.gate, lock.mutex, lock.entry(), lock:
                self._engine.drain_for_weights()
                action()
        finally:
            self._engine.weights_changed()

    def holds_cache(self, request_id: int) -> bool:
        """Whether a request has keys and values; between two steps."""
        key = self._engine.outputs.key_of(request_id)
        sequence = self._engine.scheduler.table.sequences.get(key)
        return sequence is not None and sequence.state in HOLDING

    def suspend(self) -> None:
        """Commit what is in flight and launch nothing."""
        self._engine.suspend()

    def forget_computed(self) -> None:
        """What was computed before new weights is not used again, as far as it is configured."""
        self._engine.forget_computed()

    def go_on(self) -> None:
        """Launch again."""
        self._engine.go_on()

    def stop(self) -> None:
        """End the engine's thread."""
        self._engine.stop()

    def observe(self, observer: Any) -> Callable[[], None]:
        """Tell ``observer`` of commits; the result ends it."""
        forget: Callable[[], None] = self._engine.observe(observer)
        return forget
