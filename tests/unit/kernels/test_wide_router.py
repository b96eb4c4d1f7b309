"""The router of many rows against its reference in torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_async.kernels import trial
from megatron_async.kernels.moe.reference import NO_EXPERT, Routing, route, router_logits
from megatron_async.kernels.moe.settings import RouterSettings
from megatron_async.models.moe.compute import routing_of
from tests.support.compiled_kernels import HOPPER, compiles, compiling_for
from tests.support.interpreter import HAS_TRITON, compiled, on_devices

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not built for this platform")

if HAS_TRITON:
    from megatron_async.kernels.moe.routing import wide_triton
    from megatron_async.kernels.moe.routing.wide_triton import route_many

QWEN = {"pre_softmax": True, "normalize": True}
DEEPSEEK = {
    "score_function": "sigmoid", "normalize": True, "num_groups": 3, "kept_groups": 2,
    "group_score_experts": 2, "scaling_factor": 2.5,
}  # fmt: skip
CASES: Any = ((12, 3, QWEN), (9, 2, DEEPSEEK), (5, 2, {}))
LARGE: Any = (
    (128, 8, 2048, QWEN),
    (32, 4, 2880, {}),
    (256, 8, 7168, DEEPSEEK | {"num_groups": 8, "kept_groups": 4}),
    (512, 10, 2048, QWEN),
)


class Router:
    """Drawn rows and parameters; some rows are dead."""

    def __init__(
        self, settings: RouterSettings, rows: int, size: int, device: str, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator(device).manual_seed(rows)

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, device=device, dtype=dtype)

        self.settings, experts = settings, settings.num_experts
        self.hidden, self.weight = drawn(rows, size), drawn(experts, size) / size**0.5
        self.bias, self.expert_bias = drawn(experts), drawn(experts).float()
        self.live = torch.arange(rows, device=device) % 5 != 3

    def run(self, **options: Any) -> Routing:
        return route_many(self.hidden, self.weight, self.settings, **options)

    def check(self, limit: float, **options: Any) -> None:
        """The best are chosen, and have the weights that they would have."""
        given = {"bias": self.bias, "expert_bias": self.expert_bias, "live": self.live}
        given = {name: given[name] for name in options}
        found = self.run(**given)
        live = given.pop("live", None)
        logits = router_logits(self.hidden, self.weight, given.pop("bias", None))
        best = route(logits, self.settings, live=live, **given)
        same = route(logits, self.settings, live=live, chosen=found.ids, **given)
        torch.testing.assert_close(found.weights, same.weights, rtol=limit, atol=limit)
        if live is not None:
            assert (found.ids[~live] == NO_EXPERT).all() and (found.ids[live] >= 0).all()
        # Of rows in which two experts are closer than the sums are exact a few choose the other.
        others = (found.ids != best.ids).any(1).float().mean()
        assert others <= (0 if found.ids.device.type == "cpu" else 0.02)


@on_devices
@pytest.mark.parametrize("case", range(len(CASES)))
def test_small_routers(device: str, case: int) -> None:
    experts, top_k, fields = CASES[case]
    settings = RouterSettings(num_experts=experts, top_k=top_k, **fields)
    router = Router(settings, 21, 72, device, torch.float32)
    router.check(1e-5, bias=True, live=True, **({"expert_bias": True} if case == 1 else {}))
    if case == 0:
        router.check(1e-5)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=compiled)])
@pytest.mark.parametrize("rows", [65, 128, 1000, 5000])
@pytest.mark.parametrize("case", range(len(LARGE)))
def test_large_routers(device: str, case: int, rows: int) -> None:
    experts, top_k, size, fields = LARGE[case]
    settings = RouterSettings(num_experts=experts, top_k=top_k, **fields)
    router = Router(settings, rows, size, device, torch.bfloat16)
    router.check(1e-3, live=True, **({"expert_bias": True} if case == 2 else {"bias": True}))
    first, second = router.run(), router.run()
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_a_layer_asks_it_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what was chosen before, and for what it does not take."""
    settings = RouterSettings(num_experts=4, top_k=2, **QWEN)
    asked: list[int] = []
    monkeypatch.setattr(trial, "GROUPED_EXPERTS", True)
    monkeypatch.setattr(wide_triton, "route_many", lambda x, *_, **__: asked.append(len(x)))

    def ask(
        rows: int, *, dtype: torch.dtype = torch.bfloat16, chosen: Tensor | None = None
    ) -> None:
        hidden = torch.randn(rows, 32).to(torch.bfloat16).as_subclass(OnGpu)
        weight = torch.randn(4, 32).to(dtype)
        router = SimpleNamespace(weight=weight, bias=None, expert_bias=None)
        layer = SimpleNamespace(router=router, settings=settings)
        routing_of(layer, hidden, live=None, chosen=chosen)

    ask(65)
    ask(64)
    ask(66, dtype=torch.float32)
    ask(67, chosen=torch.zeros(67, 2, dtype=torch.int32))
    assert asked == [65]


@compiles
@pytest.mark.sweep
@pytest.mark.parametrize("rows", [128, 5000])
@pytest.mark.parametrize("case", range(len(LARGE)))
def test_it_fits_a_gpu(case: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_triton, "uses_pdl", lambda device: True)
    experts, top_k, size, fields = LARGE[case]

    def meta(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    settings = RouterSettings(num_experts=experts, top_k=top_k, **fields)
    with compiling_for(HOPPER) as found:
        route_many(
            meta(rows, size), meta(experts, size), settings, bias=meta(experts),
            expert_bias=meta(experts, dtype=torch.float32), live=meta(rows, dtype=torch.bool),
        )  # fmt: skip
    (kernel,) = found
    assert kernel.shared <= 101_376 and ".local" not in kernel.ptx
