"""The logs of a front end, as lines of JSON."""

from __future__ import annotations

import json
import logging
from typing import Any

from megatron_async.processes import standard_error
from megatron_async.processes.watching import supervision

logger = logging.getLogger("megatron_async.serving")
"""Has a line for each request; the loggers of the modules here are below it."""


class JsonFormatter(logging.Formatter):
    """A log record as one line of JSON; ``extra={"fields": {...}}`` adds to it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_as_json() -> None:
    """Requests, and what goes wrong, as lines of JSON on stderr, for which nobody waits."""
    standard_error.unblock(standard_error.said_as_json)
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    for name in ("megatron_async", "uvicorn", "opentelemetry"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(logging.WARNING)
    for each in (logger, supervision.logger):
        each.setLevel(logging.INFO)
