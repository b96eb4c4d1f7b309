"""What a capture shows of the memory that it holds, and how places are compared."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.graph_audit.audit import _Cover, _Union
from megatron_async.graph_audit.graph_memory import GraphMemory, Place
from megatron_async.kernels.compile import TensorMap
from megatron_async.kernels.launch_watch import watch
from tests.support.interpreter import on_devices


def held(memory: GraphMemory) -> dict[int, int]:
    """Bytes by address."""
    return {place.begin: place.bytes for place in memory.held}


def test_tensors_that_come_in_are_held_and_those_that_are_made_are_not() -> None:
    a, b, out = torch.ones(6), torch.ones(3, 2), torch.zeros(3)
    index = torch.tensor([2, 0])

    def work() -> None:
        made = a.view(3, 2) + b
        made.mul_(torch.tensor([1.0, 2.0]))
        torch.sum(made, 1, out=out)
        torch.cat([out[index], a[1:3]])

    memory = GraphMemory()
    run = memory.watched(work, "sum")
    assert not memory.held and not memory.graphs
    run()
    assert memory.graphs == 1 and out.tolist() == [6.0, 6.0, 6.0]
    assert {each.data_ptr() for each in (a, b, out, index)} <= held(memory).keys()
    assert held(memory)[a[1:3].data_ptr()] == 8
    assert {h.graph for h in memory.held.values()} == {"graph 0 (sum)"}
    before = dict(memory.held)
    run()  # a replay has the addresses of the first run
    assert memory.held == before and len(held(memory)) == 5 and memory.graphs == 1


def test_a_descriptor_counts_unless_the_capture_made_its_tensor() -> None:
    given, kept = torch.ones(8, 4), list[Tensor]()

    def described(tensor: Tensor) -> TensorMap:
        return TensorMap(None, tensor.data_ptr(), tensor.nbytes)

    def work() -> None:
        made = torch.zeros(8, 4)
        kept.append(made)
        assert watch.seen is not None
        watch.seen([described(given[2:]), described(made), described(made[1:7])])

    memory = GraphMemory()
    memory.watched(work, "work")()
    assert held(memory) == {given.data_ptr(): 8 * 16, given[2:].data_ptr(): 6 * 16}


def test_a_strided_tensor_reaches_from_its_first_element_to_its_last() -> None:
    whole = torch.zeros(4, 10, dtype=torch.int16)
    assert Place.of(whole[1:3, 2:5]) == (whole.data_ptr() + 24, whole.data_ptr() + 24 + 26)
    assert Place.of(whole[:0]) is None and Place.of(whole.to("meta")) is None


def test_memory_is_freed_when_its_last_tensor_goes() -> None:
    given = [torch.ones(5)]
    memory = GraphMemory()
    memory.watched(lambda: given[0].sum(), "sum")()
    (found,) = memory.held.values()
    assert not found.is_freed
    view, given[0] = given[0][1:], torch.ones(1)
    assert not found.is_freed
    del view
    assert found.is_freed


@on_devices
def test_launches_of_triton_are_seen(device: str) -> None:
    pytest.importorskip("triton")
    from megatron_async.kernels.norm.swiglu import swiglu

    x, found = torch.randn(4, 64, device=device), list[Tensor]()
    memory = GraphMemory()
    memory.watched(lambda: found.append(swiglu(x)), "swiglu")()
    assert held(memory) == {x.data_ptr(): x.nbytes}
    assert watch.seen is None
    given: list[Any] = []
    watch.seen = given.extend
    try:
        swiglu(x)
    finally:
        watch.seen = None
    assert next(each.data_ptr() for each in given if isinstance(each, Tensor)) == x.data_ptr()


def places(rng: random.Random, count: int) -> list[Place]:
    begins = [rng.randrange(1, 60) for _ in range(count)]
    return [Place(begin, begin + rng.randrange(1, 12)) for begin in begins]


def test_cover_and_union_are_those_of_each_byte() -> None:
    rng = random.Random(5)
    yes = no = 0
    for _ in range(300):
        many = places(rng, rng.randrange(8))
        cover, union, joined = _Cover(many), _Union(many), _Union(many, joins=True)
        taken = {byte for place in many for byte in range(*place)}
        for place in places(rng, 10):
            meets = bool(taken & set(range(*place)))
            assert joined.has(place) == taken.issuperset(range(*place))
            assert union.meets(place) == meets
            if meets:
                first = union.first(place)
                assert first in many
            has = any(p.begin <= place.begin and place.end <= p.end for p in many)
            assert cover.has(place) == has
            yes, no = yes + has, no + (not has)
    assert yes > 100 < no
