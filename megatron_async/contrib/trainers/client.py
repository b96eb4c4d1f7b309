"""A client of the server, by the routes that trainers call. It needs the standard library alone."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from megatron_async.errors import BusyError, EngineDeadError, MegatronAsyncError, RequestError

if TYPE_CHECKING:
    from torch import Tensor

MOST_AT_ONCE = 1024
"""Requests for texts of one client."""
CONTROLS_AT_ONCE = 16
"""Further calls of one client, which do not wait for texts: a call may be what these wait for."""
AGAIN_SECONDS = 0.2
"""Between two tries of a request that the server cannot take now."""
_LATER = frozenset({429, 503})
_ERRORS: Mapping[int, type[MegatronAsyncError]] = {409: BusyError, 503: EngineDeadError}


class Client:
    """Calls one server.

    Args:
        url: such as ``"http://10.0.0.1:8000"``.
        api_key: an administrator's, where the server has keys.
        patience: seconds for which a request is sent again that the server cannot take now.
    """

    def __init__(self, url: str, api_key: str | None = None, patience: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._patience = patience
        # No proxy: the server is on a network of the trainer's own.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._rollouts = ThreadPoolExecutor(MOST_AT_ONCE, "rollouts")
        self._controls = ThreadPoolExecutor(CONTROLS_AT_ONCE, "controls")

    def post(self, path: str, body: Mapping[str, Any] | None = None, **fields: Any) -> Any:
        """The answer's JSON.

        Raises:
            RequestError: the server refuses it, and says why.
            BusyError, EngineDeadError: it cannot take it now.
        """
        return self._answer("POST", path, {**(body or {}), **fields})

    def get(self, path: str) -> Any:
        """The answer's JSON, or its text; raises as :meth:`post`."""
        return self._answer("GET", path, None)

    async def asking(self, path: str, body: Mapping[str, Any]) -> Any:
        """:meth:`post` in a thread of this client's, whatever number of texts it waits for."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._controls, self.post, path, body)

    def close(self) -> None:
        """Wait for nobody any more."""
        for threads in (self._rollouts, self._controls):
            threads.shutdown(wait=False, cancel_futures=True)

    def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        end = time.monotonic() + self._patience
        data = None if body is None else json.dumps(body).encode()
        while True:
            request = urllib.request.Request(self.url + path, data, self._headers, method=method)
            try:
                with self._opener.open(request) as answer:
                    return _value(answer.read())
            except urllib.error.HTTPError as error:
                if error.code not in _LATER or time.monotonic() > end:
                    said = _said(error.read())
                    raise _ERRORS.get(error.code, RequestError)(f"{path}: {said}") from None
            except (OSError, http.client.HTTPException) as error:  # the answer may be cut off
                why = getattr(error, "reason", error)
                raise EngineDeadError(f"{self.url} does not answer: {why}") from error
            time.sleep(AGAIN_SECONDS)

    # --- what trainers do ---------------------------------------------------------------------

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        rid: str | None = None,
        log_probs: bool = True,
        top: int = 0,
        mode: str = "processed_logprobs",
    ) -> dict[str, Any]:
        """What ``/generate`` answers for one prompt of token ids."""
        body = {"input_ids": list(prompt), "sampling_params": dict(sampling)}
        more = {"rid": rid, "return_logprob": log_probs, "top_logprobs_num": top}
        more["logprobs_mode"] = mode
        loop, asked = asyncio.get_running_loop(), {**body, **more}
        found: dict[str, Any] = await loop.run_in_executor(
            self._rollouts, self.post, "/generate", asked
        )
        return found

    def send_bucket(self, tensors: Mapping[str, Tensor], version: str | None = None) -> None:
        """Send a bucket of an update that :meth:`end_update` ends. The server copies the tensors,
        which it shares memory with, before this returns."""
        from megatron_async.contrib.trainers.shared_tensors import serialized

        with serialized(tensors) as text:
            self.post(
                "/update_weights_from_tensor", serialized_named_tensors=[text],
                flush_cache=False, weight_version=version,
            )  # fmt: skip

    def end_update(self) -> None:
        """Have the server take all that has come, and forget cached prefixes."""
        self.get("/flush_cache")

    def release(self) -> None:
        """Have the server give the memory of weights and KV cache back."""
        self.post("/release_memory_occupation")

    def restore(self, tags: Sequence[str] | None = None) -> None:
        """Have it take the memory of ``"weights"`` or ``"kv_cache"`` again, or of both."""
        self.post("/resume_memory_occupation", tags=None if tags is None else list(tags))

    def abort(self, rid: str | None = None) -> int:
        """End a request with what it has, or all of them; returns how many there were."""
        aborted: int = self.post("/abort_request", rid=rid, abort_all=rid is None)["aborted"]
        return aborted


def _value(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def _said(data: bytes) -> str:
    value = _value(data)
    try:
        return str(value["error"]["message"])
    except (TypeError, KeyError):
        return str(value)[:500]
