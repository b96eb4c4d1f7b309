"""Tokens that rows of structured outputs bring, with drafts and without: the figures of
docs/structured-output.md.

python -m tests.support.guided_tokens [MODEL]: arguments of ten functions, as in public schemas of
function calling, greedily and at temperature 1.
"""

from __future__ import annotations

import sys
import time
from typing import Any
from unittest.mock import patch

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.runner.model_runner import ModelRunner
from megatron_async.sampling_params import SamplingParams
from tests.support.engines import config_at


def _function(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": {**required, **optional}, "required": [*required],
        "additionalProperties": False,
    }  # fmt: skip


DAY = {"type": "string", "format": "date"}
TEXT, WHOLE, NUMBER, YES = (
    {"type": "string", "maxLength": 20}, {"type": "integer", "minimum": 0, "maximum": 999},
    {"type": "number", "minimum": -90, "maximum": 90}, {"type": "boolean"},
)  # fmt: skip
SCHEMAS = {
    "get_current_weather": _function(
        {"location": TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}}
    ),
    "search_flights": _function(
        {"origin": TEXT, "destination": TEXT, "departure_date": DAY},
        cabin_class={"enum": ["economy", "premium_economy", "business", "first"]},
    ),
    "create_calendar_event": _function(
        {"title": TEXT, "start_time": {"type": "string", "format": "date-time"}},
        attendees={"type": "array", "items": TEXT, "maxItems": 2}, all_day=YES,
    ),
    "send_email": _function({"recipient": TEXT, "subject": TEXT, "body": TEXT, "urgent": YES}),
    "find_nearby_restaurants": _function(
        {"latitude": NUMBER, "longitude": NUMBER, "radius_meters": WHOLE},
        cuisine={"enum": ["italian", "japanese", "mexican", "indian"]},
    ),
    "execute_sql_query": _function({"database_name": TEXT, "query": TEXT, "read_only": YES}),
    "update_ticket_status": _function(
        {"ticket_id": WHOLE, "status": {"enum": ["open", "in_progress", "resolved", "closed"]}}
    ),
    "convert_currency": _function(
        {"amount": WHOLE, "from_currency": {"enum": ["USD", "EUR", "GBP"]},
         "to_currency": {"enum": ["USD", "EUR", "GBP"]}}
    ),
    "set_thermostat": _function(
        {"device": _function({"room": TEXT, "floor": WHOLE}), "target_temperature": WHOLE}
    ),
    "get_stock_price": _function({"ticker_symbol": TEXT, "include_history": YES}),
}  # fmt: skip


def measured(
    engine: DynamicInferenceEngine, drafts: int, method: str, *, guesses: bool
) -> tuple[list[list[int]], float, float]:
    """Tokens, tokens that a row brought in the mean, and seconds."""
    config = config_at(
        1, num_speculative_tokens=drafts, speculative_method=method, max_requests=20,
        max_sequence_length=512, batch_invariant=True,
    )  # fmt: skip
    params = [
        SamplingParams(
            temperature=temperature, seed=7, num_tokens_to_generate=200,
            structured_outputs={"json": schema, "disable_any_whitespace": True},
        )
        for schema in SCHEMAS.values()
        for temperature in (0.0, 1.0)
    ]  # fmt: skip
    prompts = [f"# arguments of {name}\n" for name in SCHEMAS for _ in range(2)]
    with (
        patch.object(ModelRunner, "takes_guesses", guesses),
        engine.with_config(config) as drafting,
    ):
        started = time.perf_counter()
        requests = drafting.generate(prompts, params)
        seconds = time.perf_counter() - started
    tokens = [request.generated_tokens for request in requests]
    rows = sum(len(set(map(id, request.steps))) for request in requests)
    return tokens, sum(map(len, tokens)) / rows, seconds


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    with DynamicInferenceEngine.from_pretrained(model, config_at(0)) as engine:
        plain = measured(engine, 0, "mtp", guesses=False)
        print(f"without drafts: {plain[1]:.2f} tokens a row, {plain[2]:.1f} s")
        for method in ("grammar", "ngram", "mtp"):
            for drafts in (2, 4):
                for guesses in (False, True)[method == "grammar" :]:
                    tokens, each, seconds = measured(engine, drafts, method, guesses=guesses)
                    assert tokens == plain[0], "other tokens than without drafts"
                    print(f"{method}, {drafts} drafts, forced ones {guesses}: {each:.2f}", end="")
                    print(f" tokens a row, {seconds:.1f} s")


if __name__ == "__main__":
    main()
