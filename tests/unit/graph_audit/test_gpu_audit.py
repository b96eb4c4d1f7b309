"""The audit over CUDA graphs, whose own nodes say which addresses they hold."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.errors import IntegrityError
from tests.support.audited import audited_engine, model_of, state_of, tokens
from tests.support.engines import config_at, greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
PROMPTS = [[100, 101, 102, 32], [40] * 70]


def go_through_all(engine: DynamicInferenceEngine) -> None:
    """Updates, sleeps, wake-ups by tags and a reset."""
    audit, state = engine.runner.audit, state_of(engine)
    assert audit is not None and audit.graphs > 5, "all graphs are there before the first step"
    expected = tokens(engine)
    engine.update_weights(state_of(engine, 0.5))
    engine.sleep(1)
    engine.wake_up()
    engine.update_weights(state)
    assert tokens(engine) == expected
    engine.sleep(2)
    engine.wake_up(["weights"])
    engine.update_weights(state)
    engine.wake_up(["kv_cache"])
    engine.reset()
    assert tokens(engine) == expected
    assert audit.checks == 9


@pytest.mark.parametrize("kind", ["dense", "experts", "hybrid", "MTP", "draft model"])
def test_engines_of_each_kind_pass(kind: str) -> None:
    draft = kind == "draft model"
    with audited_engine("dense" if draft else kind, device="cuda", draft=draft) as engine:
        go_through_all(engine)


@pytest.mark.parametrize("drafts", [0, 2])
def test_fused_blocks_pass(drafts: int) -> None:
    config = config_at(
        2, device="cuda", dtype="bfloat16", max_requests=4, block_count=40,
        max_sequence_length=256, num_speculative_tokens=drafts, enable_sleep_mode=True,
        audit_graphs=True,
    )  # fmt: skip
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        expected = [each.generated_tokens for each in engine.generate(PROMPTS, greedy(8))]
        go_through_all(engine)
        found = [each.generated_tokens for each in engine.generate(PROMPTS, greedy(8))]
        assert found == expected


def test_a_parameter_that_lies_elsewhere_is_named() -> None:
    with audited_engine("dense", device="cuda") as engine:
        weight = model_of(engine).get_parameter(FC1)
        old, weight.data = weight.data, weight.data.clone()
        with pytest.raises(IntegrityError, match=rf"model\.{FC1} is at .*and graph \d+"):
            engine.update_weights(state_of(engine))
        del old


LAUNCH_BUFFER_POINTER, LAUNCH_BUFFER_SIZE = 1, 2
"""``CU_LAUNCH_PARAM_BUFFER_POINTER`` and ``_SIZE`` of the driver."""


def words_of(graph: torch.cuda.CUDAGraph) -> Iterator[int]:
    """All 8-byte words in the parameters of a graph's kernels."""
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        assert result[0] == driver.CUresult.CUDA_SUCCESS, result[0]
        return result[1] if len(result) == 2 else result[1:]

    raw = driver.CUgraph(graph.raw_cuda_graph())
    _, count = checked(driver.cuGraphGetNodes(raw))
    nodes, _ = checked(driver.cuGraphGetNodes(raw, count))
    for node in nodes:
        if checked(driver.cuGraphNodeGetType(node)) != (
            driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        ):
            continue
        for content in contents_of(checked(driver.cuGraphKernelNodeGetParams(node))):
            for at in range(0, len(content) - 7, 8):
                yield int.from_bytes(content[at : at + 8], "little")


def contents_of(parameters: Any) -> Iterator[bytes]:
    """The parameters of a kernel: each by itself, or all in one buffer, as cuBLAS launches some."""
    from cuda.bindings import driver

    array = ctypes.POINTER(ctypes.c_void_p)
    if not int(parameters.kernelParams or 0):
        extra = ctypes.cast(int(parameters.extra or 0), array)
        for at in range(0, 20 if extra else 0, 2):
            kind = extra[at] or 0
            if kind == LAUNCH_BUFFER_POINTER:
                buffer = extra[at + 1]
            elif kind == LAUNCH_BUFFER_SIZE:
                size = ctypes.cast(extra[at + 1], ctypes.POINTER(ctypes.c_size_t))[0]
            else:
                break
        if extra:
            yield ctypes.string_at(buffer, size)
        return
    pointers = ctypes.cast(int(parameters.kernelParams), array)
    # Of a library that is loaded late a node has the kernel, and no function.
    kernel, info = parameters.func, driver.cuFuncGetParamInfo
    if not int(kernel):
        kernel, info = parameters.kern, driver.cuKernelGetParamInfo
    for number in range(1000):
        status, *place = info(kernel, number)
        if status != driver.CUresult.CUDA_SUCCESS or not pointers[number]:
            break
        yield ctypes.string_at(pointers[number], place[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_address_of_a_graphs_kernels_was_missed(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the graphs' kernels hold of the engine's tensors the capture has shown."""
    graphs: list[torch.cuda.CUDAGraph] = []
    make = functools.partial(torch.cuda.CUDAGraph, keep_graph=True)

    def kept() -> torch.cuda.CUDAGraph:
        graphs.append(make())
        return graphs[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", kept)
    config = config_at(
        1, device="cuda", dtype=dtype, max_requests=2, block_count=40, max_sequence_length=256,
        audit_graphs=True,
    )  # fmt: skip
    with DynamicInferenceEngine.from_pretrained("tiny", config) as engine:
        audit = engine.runner.audit
        assert audit is not None and len(graphs) == audit.graphs
        named: dict[str, Tensor] = audit._live().tensors
        found = {word for graph in graphs for word in words_of(graph)}
        seen = audit._memory.held
        missed, met = [], set()
        for word in found:
            owners = [n for n, p in audit._names.items() if p.begin <= word < p.end]
            met |= {name for name in owners if named[name].is_cuda}
            # Some kernels hold where a tensor ends, which is where the next one may begin.
            if owners and not any(p.begin <= word <= p.end for p in seen):
                missed.append((hex(word), owners[0]))
        assert missed == []
        # A layer also has the norm of the next one, and a tensor one name: compare addresses.
        read = {named[name].data_ptr() for name in met}
        parameters = model_of(engine).named_parameters()
        used = {name: each.data_ptr() for name, each in parameters if "mtp." not in name}
        assert [name for name, address in used.items() if address not in read] == []
