"""Tests of other projects' servers, from checkouts of theirs, against this server.

    python -m scripts.peer_suites --vllm PATH --sglang PATH --triton PATH [-k WORDS]

Those tests run that talk to a server over HTTP; ours has the embedded model. What they import of
their own project is stood for. ``expected.toml`` says which failures are known, and why; the exit
status is 1 if there are others. pytest-asyncio must be installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.peer_suites.suites import SUITES, Suite
from scripts.peer_suites.verdicts import (
    EXPECTED,
    Ended,
    Verdicts,
    judge,
    read_expected,
    read_report,
)

ROOT = Path(__file__).parents[2]
TEST_SECONDS = 300


def run(suite: Suite, checkout: Path, selection: str, expected: Path) -> Verdicts:
    """Run a suite's tests in a process of their own.

    A run that pytest itself gives up, or that has no tests, counts as an unexpected failure.
    """
    tests = suite.tests(checkout)
    if not tests:
        ended = [Ended("the run itself", "failed", f"{checkout} has no such tests")]
        return judge(suite.name, ended, [])
    with tempfile.TemporaryDirectory() as folder:
        report, settings = Path(folder, "report"), Path(folder, "pytest.ini")
        report.touch()
        settings.write_text("[pytest]\n")
        paths = [str(checkout), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "PEER_SUITE": suite.shim,
            "PEER_CHECKOUT": str(checkout),
            "PEER_REPORT": str(report),
        }
        command = [sys.executable, "-P", "-m", "pytest", "-p", "scripts.peer_suites.plugin"]
        command += ["-p", "no:cacheprovider", "-q", "--tb=short", f"--timeout={TEST_SECONDS}"]
        command += ["--rootdir", str(checkout / suite.folder), "-c", str(settings)]
        command += ["--continue-on-collection-errors", *suite.arguments(checkout)]
        command += ["-k", selection, *tests]
        ran = subprocess.run(command, cwd=checkout / suite.folder, env=env, stdout=sys.stderr)
        ended = read_report(report)
    if ran.returncode not in (0, 1):
        ended.append(Ended("the run itself", "failed", f"pytest ended with {ran.returncode}"))
    return judge(suite.name, ended, read_expected(expected))


def main(argv: list[str] | None = None) -> int:
    """Run the suites whose checkouts are given; 1 if a test fails that is not expected to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for suite in SUITES:
        parser.add_argument(f"--{suite.name}", type=Path, dest=suite.name, metavar="PATH")
    parser.add_argument("-k", default="", dest="selection", help="as pytest's")
    parser.add_argument("--expected", type=Path, default=EXPECTED, help="which failures are known")
    options = vars(parser.parse_args(argv))
    wanted = [(suite, options[suite.name]) for suite in SUITES if options[suite.name]]
    if not wanted:
        parser.error("give the checkout of at least one project")
    found = []
    for suite, checkout in wanted:
        found.append(run(suite, checkout.resolve(), options["selection"], options["expected"]))
        print(found[-1].table(), flush=True)
    return int(any(each.unexpected for each in found))


if __name__ == "__main__":
    sys.exit(main())
