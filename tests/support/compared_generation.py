"""Stock ``generate`` next to the asynchronous one, and what must be equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_async.contrib.transformers import AsyncGenerate, async_stopping
from tests.support.late_streams import LateStreams


class Heard:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, tokens: Tensor) -> None:
        self.puts.append(tokens.reshape(-1).tolist())

    def end(self) -> None:
        self.ended += 1


def generate_seeded(model: Any, arguments: dict[str, Any], seed: int = 5) -> tuple[Any, Tensor]:
    """The result, and the random generator's state after it."""
    torch.manual_seed(seed)
    result = model.generate(**arguments)
    return result, torch.get_rng_state()


def asynchronously(
    model: Any, arguments: dict[str, Any], streams: LateStreams, ahead: int = 3
) -> tuple[Any, Tensor]:
    """By ``custom_generate``, or by the context where transformers drops an argument."""
    if "stop_strings" in arguments:
        with async_stopping(model, ahead, streams):
            return generate_seeded(model, arguments)
    custom = AsyncGenerate(ahead, streams)
    return generate_seeded(model, {**arguments, "custom_generate": custom})


def layers_of(cache: Any) -> list[Any]:
    return list(getattr(cache, "self_attention_cache", cache).layers)


def assert_same_cache(ours: Any, stock: Any) -> None:
    assert int(ours.get_seq_length()) == int(stock.get_seq_length())
    for left, right in zip(layers_of(ours), layers_of(stock), strict=True):
        assert torch.equal(left.keys, right.keys)
        assert torch.equal(left.values, right.values)
        assert int(left.get_seq_length()) == int(right.get_seq_length())


def assert_same_result(ours: Any, stock: Any) -> None:
    """Equal bits in everything that ``generate`` returned."""
    if isinstance(stock, Tensor):
        assert torch.equal(ours, stock)
        return
    assert ours.keys() == stock.keys()
    for name, value in stock.items():
        if name == "past_key_values":
            assert_same_cache(ours[name], value)
        else:
            assert_same_nested(ours[name], value)


def assert_same_nested(ours: Any, stock: Any) -> None:
    if isinstance(stock, Tensor):
        assert torch.equal(ours, stock)
    else:
        assert len(ours) == len(stock)
        for left, right in zip(ours, stock, strict=True):
            assert_same_nested(left, right)


def assert_generates_as_stock(
    model: Any, arguments: dict[str, Any], *, seed: int = 0, ahead: int = 3
) -> tuple[Any, LateStreams]:
    """Both ways with fresh streamers; returns stock's result and the streams used."""
    streams, heard, expected = LateStreams(seed), Heard(), Heard()
    listens = arguments.pop("streamer", False)
    with_streamer = {"streamer": expected} if listens else {}
    stock, stock_rng = generate_seeded(model, {**arguments, **with_streamer})
    with_streamer = {"streamer": heard} if listens else {}
    ours, rng = asynchronously(model, {**arguments, **with_streamer}, streams, ahead)
    assert_same_result(ours, stock)
    assert torch.equal(rng, stock_rng)
    assert (heard.puts, heard.ended) == (expected.puts, expected.ended)
    assert streams.closed > 0, "fell back to stock"
    return stock, streams
