"""What vLLM's tests of its HTTP API import: its server's starter, and names of its package."""

from __future__ import annotations

import base64
import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import openai
import pytest
import transformers

from megatron_async import __version__
from scripts.peer_suites.servers import SERVERS, NotServedError
from scripts.peer_suites.shims.tiny import tokenizer
from scripts.peer_suites.stand_ins import AbsentError, give, load, stand_for, stand_for_missing

MOST_LENGTH = 2048
"""The tokens of the embedded model's longest sequence."""

SAME = {
    "--api-key": "--api-key",
    "--api-server-count": "--api-server-count",
    "--chat-template": "--chat-template",
    "--data-parallel-size": "--replicas",
    "--max-num-batched-tokens": "--inference-dynamic-batching-max-tokens",
    "--tensor-parallel-size": "--tensor-model-parallel-size",
}
"""vLLM's options with a value, and ours that mean the same."""

FLAGS = {
    "--enable-sleep-mode": "--enable-sleep-mode",
    "--no-async-scheduling": "--no-inference-async-scheduling",
    "--no-enable-prefix-caching": "--no-enable-prefix-caching",
    "--skip-tokenizer-init": "--skip-tokenizer-init",
}

WITHOUT_EFFECT = {
    "--attention-backend": 1,
    "--chat-template-content-format": 1,
    "--disable-log-stats": 0,
    "--dtype": 1,
    "--enable-auto-tool-choice": 0,
    "--enable-chunked-prefill": 0,
    "--enable-lora": 0,
    "--enable-prefix-caching": 0,
    "--enable-prompt-tokens-details": 0,
    "--enable-request-id-headers": 0,
    "--enable-tokenizer-info-endpoint": 0,
    "--enforce-eager": 0,
    "--gpu-memory-utilization": 1,
    "--load-format": 1,
    "--max-cpu-loras": 1,
    "--max-lora-rank": 1,
    "--max-num-seqs": 1,
    "--max-logprobs": 1,
    "--max-loras": 1,
    "--quantization": 1,
    "--reasoning-parser": 1,
    "--revision": 1,
    "--seed": 1,
    "--structured-outputs-config.backend": 1,
    "--tokenizer": 1,
    "--trust-remote-code": 0,
    "--uvicorn-log-level": 1,
}
"""Options that change nothing which a client of the embedded model sees, and how many values each
has."""

FORMATS = {"hermes": "hermes", "llama3_json": "llama3"}


def _value(name: str, value: str) -> list[str]:
    match name:
        case "--max-model-len":
            shorter = value.isdecimal() and int(value) < MOST_LENGTH
            return ["--inference-max-seq-length", value] if shorter else []
        case "--tool-call-parser" if value in FORMATS:
            return ["--tool-call-format", FORMATS[value]]
        case _ if name in SAME:
            return [SAME[name], value]
    raise NotServedError(name)


def options(model: str, arguments: list[str]) -> list[str]:
    """This server's options for vLLM's.

    Names of adapters become further names of the model: a client sees no other difference.

    Raises:
        NotServedError: for an option that has no counterpart.
    """
    found: list[str] = []
    names, left = [model], list(arguments)
    while left:
        name, joined, value = left.pop(0).partition("=")
        name = name.replace("_", "-")
        if name in FLAGS:
            found.append(FLAGS[name])
        elif name in WITHOUT_EFFECT:
            del left[: WITHOUT_EFFECT[name] if not joined else 0]
        elif name == "--lora-modules":
            while left and not left[0].startswith("--"):
                names.append(left.pop(0).partition("=")[0])
        elif name == "--served-model-name":
            names = [value or left.pop(0)]
        else:
            found += _value(name, value or (left.pop(0) if left else ""))
    return [*found, "--served-model-name", *dict.fromkeys(names)]


class RemoteOpenAIServer:
    """A server for the ``with`` block of a fixture. It is shared, and lives on afterwards."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: dict[str, str] | None = None,
        **others: Any,
    ) -> None:
        wanted = options(model, [str(argument) for argument in vllm_serve_args])
        env = env_dict or {}
        if env.get("VLLM_SERVER_DEV_MODE") == "1":
            wanted.append("--server-dev-mode")
        if "VLLM_API_KEY" in env:
            wanted += ["--api-key", env["VLLM_API_KEY"]]
        server = SERVERS.get(wanted)
        self.url_root = server.url
        self.host, self.port, self.proc = "127.0.0.1", server.port, server.process
        self.show_hidden_metrics = False

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *raised: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts)])

    def _client(self, kind: Any, named: dict[str, Any]) -> Any:
        known = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return kind(**{**known, "timeout": 120, **named})

    def get_client(self, **named: Any) -> openai.OpenAI:
        return self._client(openai.OpenAI, named)  # type: ignore[no-any-return]

    def get_async_client(self, **named: Any) -> openai.AsyncOpenAI:
        return self._client(openai.AsyncOpenAI, named)  # type: ignore[no-any-return]


RL = "tests.entrypoints.rl.conftest"


@contextlib.contextmanager
def _rl_server(extra_args: Iterable[str] = (), **others: Any) -> Iterator[str]:
    arguments, env = ["--enable-sleep-mode", *extra_args], {"VLLM_SERVER_DEV_MODE": "1"}
    with RemoteOpenAIServer("m", arguments, env_dict=env) as server:
        yield server.url_root


def _load_rl(checkout: Path) -> None:
    """What their tests of trainers' endpoints share, with our server in place of theirs."""
    path = checkout.joinpath(*RL.split(".")).with_suffix(".py")
    if path.exists():
        vars(load(RL, path))["server"] = _rl_server


class _Nothing:
    """Every method answers that it is not so: vLLM's platform, and its hub of adapters."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **named: False


def _needs_gpus(**counts: int) -> pytest.MarkDecorator:
    return pytest.mark.skip(reason=f"needs GPUs: {counts}")


class _ModelConfig:
    """Knows the embedded model's vocabulary, and is no configuration of theirs beyond that."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return len(tokenizer())

    def __getattr__(self, name: str) -> Any:
        raise AbsentError(f"ModelConfig.{name}")


class _Hub:
    def snapshot_download(self, *arguments: Any, **named: Any) -> str:
        return "no-files"


def install(checkout: Path) -> None:
    """Make the stand-ins importable, in this process alone."""
    stand_for("vllm")
    stand_for_missing(
        "anthropic", "jsonschema", "librosa", "lm_eval", "openai_harmony", "soundfile"
    )
    sys.modules.setdefault("pybase64", base64)
    give("jsonschema", validate=lambda instance, schema: jsonschema_rs.validate(schema, instance))
    give("vllm.config", ModelConfig=_ModelConfig)
    give("vllm.platforms", current_platform=_Nothing())
    give("vllm.transformers_utils.repo_utils", hf_api=_Hub)
    for home in ("vllm.tokenizers", "vllm.transformers_utils.tokenizer"):
        give(home, get_tokenizer=tokenizer)
    vars(transformers)["AutoTokenizer"] = SimpleNamespace(from_pretrained=tokenizer)
    give("vllm.envs", VLLM_USE_RUST_FRONTEND=False)
    give("vllm.version", __version__=__version__)
    given: dict[str, Any] = {"RemoteOpenAIServer": RemoteOpenAIServer, "VLLM_PATH": checkout}
    give("tests.utils", **given, ROCM_EXTRA_ARGS=[], multi_gpu_only=_needs_gpus)
    _load_rl(checkout)
