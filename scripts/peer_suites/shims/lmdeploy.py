"""What LMDeploy's tests of its HTTP API import: where the server is, and their own client."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from scripts.peer_suites.servers import SERVERS
from scripts.peer_suites.stand_ins import give, load, stand_for, stand_for_missing

CLIENT = "lmdeploy.serve.openai.api_client"


def install(checkout: Path) -> None:
    """Start our server, and tell the tests where it is."""
    os.environ["LMDEPLOY_PORT"] = str(SERVERS.get([]).port)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    sys.path.insert(0, str(checkout / "autotest"))
    stand_for("lmdeploy")
    stand_for_missing("allure", "anthropic")
    give("lmdeploy.utils", get_logger=lambda name: None)
    load(CLIENT, checkout.joinpath(*CLIENT.split(".")).with_suffix(".py"))
    constant = importlib.import_module("utils.constant")
    one = {"BACKEND_LIST": ["async"], "RESTFUL_MODEL_LIST": ["tiny"]}
    vars(constant).update(one, RESTFUL_BASE_MODEL_LIST=["tiny"])
