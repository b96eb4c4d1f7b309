"""Requests made of an application's OpenAPI description, and what must hold for their answers."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

SECONDS = 120.0


def explore(
    app: FastAPI, *, examples: int, key: str, paths: list[str] | None = None
) -> Counter[tuple[str, str, int]]:
    """Send each operation valid and invalid requests; raises what does not hold.

    Args:
        examples: of each kind for each operation.
        key: lets them in.
        paths: of the operations; None for all.

    Returns:
        how often each operation answered valid and invalid requests with which status.
    """
    headers = {"authorization": f"Bearer {key}"}
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers=headers)
    statuses: Counter[tuple[str, str, int]] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        if paths is not None and operation.path not in paths:
            continue
        _explore(operation, False, examples, headers, statuses)
        if list(operation.body):
            _explore(operation, True, examples, headers, statuses)
    return statuses


def _explore(
    operation: Any,
    is_negative: bool,
    examples: int,
    headers: dict[str, str],
    statuses: Counter[tuple[str, str, int]],
) -> None:
    modes = schemathesis.GenerationMode
    mode = modes.NEGATIVE if is_negative else modes.POSITIVE

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and not is_negative:
            _mend(case.body)
        response = case.call(headers=headers, timeout=SECONDS)
        statuses[operation.label, mode.value, response.status_code] += 1
        _check(case, response, headers)

    ask()


def _mend(body: dict[str, Any]) -> None:
    """Make a valid request one that is more often served: what the description does not say."""
    for name in ("model", "previous_response_id", "conversation", "background", "stream_options"):
        body.pop(name, None)
    for name, value in body.items():
        if isinstance(value, list) and name.endswith(("_ids", "tokens", "prompt")):
            body[name] = [int(each) % 256 if isinstance(each, float | int) else each
                          for each in value]  # fmt: skip
    for message in body.get("messages") or ():
        if not message.get("content"):
            message["content"] = "a"
    if body.get("tools"):
        name = f"f{len(json.dumps(body['tools']))}"
        function = {"name": name, "parameters": {"type": "object", "properties": {}}}
        is_flat = "input" in body
        flat = {"type": "function", **function}
        body["tools"] = [flat if is_flat else {"type": "function", "function": function}]
        body["tool_choice"] = "required" if len(name) % 2 else "auto"
    else:
        body.pop("tool_choice", None)


def _check(case: Any, response: Any, headers: dict[str, str]) -> None:
    if response.headers["content-type"][0].startswith("text/event-stream"):
        events = [line[6:] for line in response.text.splitlines() if line[:6] == "data: "]
        assert events, case.body
        assert '"error":{' not in response.text, (case.body, response.text)
        for event in events:
            assert event == "[DONE]" or isinstance(json.loads(event), dict)
        return
    # The description does not say all that a request must be.
    case.validate_response(response, excluded_checks=[positive_data_acceptance], headers=headers)
