"""What LMDeploy's tests of its HTTP API import: where the server is, and their own client."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from scripts.peer_suites.servers import SERVERS
from scripts.peer_suites.stand_ins import give, stand_for, stand_for_missing

CLIENT = "lmdeploy.serve.openai.api_client"


def _load_client(checkout: Path) -> None:
    """Load the file of their client, which needs nothing else of theirs."""
    path = checkout.joinpath(*CLIENT.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(CLIENT, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[CLIENT] = module
    spec.loader.exec_module(module)


def install(checkout: Path) -> None:
    """Start our server, and tell the tests where it is."""
    os.environ["LMDEPLOY_PORT"] = str(SERVERS.get([]).port)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    sys.path.insert(0, str(checkout / "autotest"))
    stand_for("lmdeploy")
    stand_for_missing("allure", "anthropic")
    give("lmdeploy.utils", get_logger=lambda name: None)
    _load_client(checkout)
    constant = importlib.import_module("utils.constant")
    one = {"BACKEND_LIST": ["async"], "RESTFUL_MODEL_LIST": ["tiny"]}
    vars(constant).update(one, RESTFUL_BASE_MODEL_LIST=["tiny"])
