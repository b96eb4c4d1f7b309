"""SGLang's tests that are mixed into a class with a server, mixed into one with ours."""

from __future__ import annotations

import unittest
from typing import Any

import openai
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.json_mode_kit import JSONModeMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin

from scripts.peer_suites.servers import SERVERS
from scripts.peer_suites.shims.sglang import NAMES


class _Served(unittest.TestCase):
    model = NAMES[0]
    base_url: str
    process: Any
    client: openai.OpenAI

    @classmethod
    def setUpClass(cls) -> None:
        server = SERVERS.get(["--served-model-name", *NAMES])
        cls.base_url, cls.process = server.url, server.process
        cls.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


class TestApiContract(BasicAPIContractMixin, _Served):
    """Endpoints, and the shape of their answers."""


class TestJsonConstrained(JSONConstrainedMixin, _Served):
    """Answers of a JSON schema."""


class TestJsonMode(JSONModeMixin, _Served):
    """Answers in JSON, whole and in streams."""


class TestMatchedStop(MatchedStopMixin, _Served):
    """What an answer says of its end."""
