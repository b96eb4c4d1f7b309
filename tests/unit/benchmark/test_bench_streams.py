"""The benchmark of asyncio streams counts all tokens and sees a loop that stands still."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_async import DynamicInferenceEngine, EngineConfig

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench_streams.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("bench_streams", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_streams_are_measured(script: Any) -> None:
    async def main(engine: DynamicInferenceEngine) -> dict[str, float]:
        async def stand_still() -> None:
            await asyncio.sleep(0.02)
            time.sleep(0.3)

        _, figures = await asyncio.gather(stand_still(), script.measure(engine, 4, 40))
        return dict(figures)

    config = EngineConfig(inference_async_scheduling=True, device="cpu")
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        figures = asyncio.run(main(engine))
        assert engine.counters.tokens_committed == 160
    assert figures["lag_ms_max"] > 250 > figures["lag_ms_p50"]
    assert figures["tokens_per_second"] > 0
