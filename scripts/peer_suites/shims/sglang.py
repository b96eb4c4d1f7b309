"""What SGLang's tests of its HTTP API import: its server's starter, and names of its package."""

from __future__ import annotations

import subprocess
import unittest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from scripts.peer_suites.servers import SERVERS, NotServedError, free_port
from scripts.peer_suites.shims.tiny import tokenizer
from scripts.peer_suites.stand_ins import give, load, stand_for

MODEL = "meta-llama/Llama-3.2-1B-Instruct"
NAMES = (MODEL, "default", "meta-llama/Llama-3.1-8B-Instruct", "gpt-3.5-turbo")
"""Their server takes any name of a model."""

KITS = ("basic_api_contract", "json_constrained", "json_mode", "matched_stop")
"""Files of tests to be mixed into classes that have a server: those that ask OpenAI's endpoints.
``from_sglang.py`` has the classes."""

SAME = {
    "--context-length": "--inference-max-seq-length",
    "--max-total-tokens": "--inference-dynamic-batching-max-tokens",
}
WITHOUT_EFFECT = {
    "--device": 1,
    "--enable-metrics": 0,
    "--grammar-backend": 1,
    "--mem-fraction-static": 1,
    "--disable-cuda-graph": 0,
}
"""Options that change nothing which a client of the embedded model sees, and how many values each
has."""


def options(arguments: list[str]) -> list[str]:
    """This server's options for SGLang's.

    Raises:
        NotServedError: for an option that has no counterpart.
    """
    found: list[str] = []
    left = list(arguments)
    while left:
        name, joined, value = left.pop(0).partition("=")
        if name in WITHOUT_EFFECT:
            del left[: WITHOUT_EFFECT[name] if not joined else 0]
        elif name in SAME:
            found += [SAME[name], value or left.pop(0)]
        else:
            raise NotServedError(name)
    return found


def popen_launch_server(
    model: str,
    base_url: str,
    timeout: float = 0,
    api_key: str | None = None,
    other_args: Any = (),
    **others: Any,
) -> subprocess.Popen[bytes]:
    """Their starter: a server at the port that a test has chosen, in place of the one there."""
    wanted = options([str(argument) for argument in other_args])
    wanted += ["--api-key", api_key] if api_key else []
    wanted += ["--served-model-name", *dict.fromkeys([model, *NAMES])]
    return SERVERS.get_alone([*wanted, "--port", str(urlsplit(base_url).port)]).process


def _load_kits(checkout: Path) -> None:
    """From a checkout, or an unpacked wheel."""
    inside = checkout / "python"
    home = inside if inside.is_dir() else checkout
    for kit in KITS:
        name = f"sglang.test.kits.{kit}_kit"
        path = home.joinpath(*name.split(".")).with_suffix(".py")
        if path.exists():
            load(name, path)


def install(checkout: Path) -> None:
    """Make the stand-ins importable, in this process alone, and the kits themselves."""
    stand_for("sglang")
    give("sglang.srt.utils", kill_process_tree=lambda *processes, **named: None)
    give("sglang.srt.utils.hf_transformers_utils", get_tokenizer=tokenizer)
    give("sglang.utils", terminate_process=lambda process: None)
    for name in ("register_cuda_ci", "register_amd_ci", "register_cpu_ci", "register_npu_ci"):
        give("sglang.test.ci.ci_register", **{name: lambda *arguments, **named: None})
    models = {f"DEFAULT{kind}MODEL_NAME_FOR_TEST": MODEL for kind in ("_", "_SMALL_")}
    give(
        "sglang.test.test_utils",
        **models,
        DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH=0,
        DEFAULT_URL_FOR_TEST=f"http://127.0.0.1:{free_port()}",
        CustomTestCase=unittest.TestCase,
        popen_launch_server=popen_launch_server,
    )
    _load_kits(checkout)
