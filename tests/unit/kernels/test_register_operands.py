"""Code in which a product's registers are written too early is told from code that waits."""

from __future__ import annotations

import pytest

from tests.support.register_operands import written_too_early

LOOP = """
    mov.b32 %r9, 0;
$L__BB0_1:
    {first}
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r1, %r2}}, [%r9];
    @%p2 ld.shared.b32 %r3, [%r9+64];
    wgmma.mma_async.sync.aligned.m64n8k16 {{%f1,%f2}}, {{%r1,%r2}}, %rd1, %p1, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16 {{%f1,%f2}}, {{%r3,%r4}}, %rd2, %p1, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned {pending};
    st.shared.b32 [%r9], %r3;
    @%p3 bra $L__BB0_1;
"""


@pytest.mark.parametrize(("pending", "count"), [(0, 0), (1, 1), (2, 2)])
def test_products_in_flight_keep_their_registers(pending: int, count: int) -> None:
    early = written_too_early(LOOP.format(pending=pending, first=""))
    assert len(early) == count and all("ld" in line for line in early)
    waits = "wgmma.wait_group.sync.aligned 0;"
    assert not written_too_early(LOOP.format(pending=pending, first=waits))
