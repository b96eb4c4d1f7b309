"""What stands below llama.cpp's tests of its server: their own client, and our process."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

from scripts.peer_suites.servers import SERVERS, NotServedError
from scripts.peer_suites.stand_ins import stand_for_missing

NOT_SERVED = ("server_embeddings", "server_reranking", "mmproj_url", "lora_files", "models_dir")
"""Settings of their servers that have no counterpart."""


NAMES = ("gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "davinci-002", "gpt-4.1")
"""Their server takes any name of a model."""


def options(settings: dict[str, Any]) -> list[str]:
    """This server's options for the settings of one of theirs, which says ``None`` to what it
    leaves to a default.

    Raises:
        NotServedError: for a setting that has no counterpart.
    """
    if there := [name for name in NOT_SERVED if settings.get(name)]:
        raise NotServedError(there[0])
    slots = settings["n_slots"] or 4
    found: list[str] = []
    if settings["n_ctx"]:
        found += ["--inference-max-seq-length", str(settings["n_ctx"] // slots)]
    if settings["api_key"]:
        found += ["--api-key", settings["api_key"]]
    if settings["model_alias"]:
        found += ["--served-model-name", settings["model_alias"], *NAMES]
    return found


PATHS = ("/chat/completions", "/completions", "/models", "/responses")
"""Paths of OpenAI's API that their server also has without a version; ours has it with one."""


def _with_version(ask: Any) -> Any:
    """A method of their client that asks below ``/v1`` for those paths."""

    @functools.wraps(ask)
    def asks(server: Any, method: str, path: str, *others: Any, **named: Any) -> Any:
        return ask(server, method, f"/v1{path}" if path in PATHS else path, *others, **named)

    return asks


def _settings(server: Any) -> dict[str, Any]:
    """All attributes of a server of theirs: those of its class, and those that a test has set."""
    return {**vars(type(server)), **vars(server)}


def _start(server: Any, timeout_seconds: float | None = None) -> None:
    ours = SERVERS.get(options(_settings(server)))
    server.server_host, server.server_port = "127.0.0.1", ours.port
    server.ready = True


def _stop(server: Any) -> None:
    """Nothing: it is shared."""


def install(checkout: Path) -> None:
    """Have their ``ServerProcess`` start ours."""
    sys.path.insert(0, str(checkout / "tools" / "server" / "tests"))
    stand_for_missing("anthropic", "wget", "huggingface_hub", "PIL")
    utils: Any = importlib.import_module("utils")
    utils.ServerProcess.start = _start
    utils.ServerProcess.stop = _stop
    for name in ("make_request", "make_stream_request"):
        setattr(utils.ServerProcess, name, _with_version(vars(utils.ServerProcess)[name]))
    if "load_all" in vars(utils.ServerPreset):  # it downloads the models of them all
        utils.ServerPreset.load_all = staticmethod(lambda: None)
