"""What ``torch.profiler`` saw, as its Chrome trace has it; microseconds of its own clock."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


def events_of(profile: Any) -> list[Event]:
    """All events of a ``torch.profiler.profile`` that has been stopped."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profile.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
        return events


def device_work(events: Iterable[Event]) -> Iterator[Event]:
    """Kernels, copies and fills."""
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _DEVICE_CATEGORIES:
            yield event
