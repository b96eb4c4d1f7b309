"""Which instructions of a kernel write registers that an earlier product may still read.

Hopper's ``wgmma`` with its first operand in registers reads them until a ``wgmma.wait_group`` says
that it has ended; PTX ISA, "wgmma.mma_async", leaves undefined what it reads if they are written
before.
"""

from __future__ import annotations

import re

_REGISTER = re.compile(r"%\w+")
_LABEL = re.compile(r"(\$L__BB\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);")
_WRITTEN = re.compile(r"(?:@!?%\w+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%\w+)\s*,")
_WRITES_NOTHING = ("st.", "cp.", "red.", "stmatrix.", "bar.", "prefetch")


def written_too_early(ptx: str) -> list[str]:
    """Instructions in the loops of ``ptx`` that write registers of a product in flight."""
    lines = [line.split("//")[0].strip() for line in ptx.splitlines()]
    begins = {found[1]: at for at, line in enumerate(lines) if (found := _LABEL.match(line))}
    early: list[str] = []
    for end, line in enumerate(lines):
        branch = _BRANCH.search(line)
        if branch is not None and begins.get(branch[1], end) < end:
            early += _of_loop(lines[begins[branch[1]] : end])
    return early


def _of_loop(body: list[str]) -> list[str]:
    early, in_flight, begun = [], list[set[str]](), set[str]()
    for line in (*body, *body):  # the second time round, what the first has left runs
        if line.startswith("wgmma.mma_async"):
            lists = re.findall(r"\{([^}]*)\}", line)
            begun |= set(_REGISTER.findall(lists[1])) if len(lists) > 1 else set()
        elif line.startswith("wgmma.commit_group"):
            in_flight.append(begun)
            begun = set()
        elif line.startswith("wgmma.wait_group"):
            pending = int(line.rstrip(";").split()[-1])
            in_flight = in_flight[len(in_flight) - pending :] if pending else []
        elif (found := _WRITTEN.match(line)) and not line.startswith(_WRITES_NOTHING):
            written = set(_REGISTER.findall(found[1]))
            early += [line for operand in in_flight if operand & written]
    return early
