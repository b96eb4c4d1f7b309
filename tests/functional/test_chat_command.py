"""``megatron-async chat`` with what is typed coming from a file."""

from __future__ import annotations

import copy
import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_async.checkpoint.path import model_directory
from megatron_async.cli.main import main
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.sampling_params import SamplingParams
from megatron_async.serving.chat.chat_template import ChatTemplates

Capture = pytest.CaptureFixture[str]
Chats = list[list[dict[str, str]]]


@pytest.fixture
def chats(monkeypatch: pytest.MonkeyPatch) -> Chats:
    """The messages of each chat that is sent to the model."""
    seen: Chats = []
    encode_chat = ChatTemplates.encode_chat

    def spy(self: ChatTemplates, tokenizer: Any, messages: Any) -> list[int]:
        seen.append(copy.deepcopy(messages))
        return encode_chat(self, tokenizer, messages)

    monkeypatch.setattr(ChatTemplates, "encode_chat", spy)
    return seen


def chat(monkeypatch: pytest.MonkeyPatch, capsys: Capture, typed: str, *options: str) -> Any:
    """Exit status, stdout and stderr, without the line on sampling that comes first there."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    capsys.readouterr()
    status = main(["chat", "--device", "cpu", "--temperature", "0", *options])
    captured = capsys.readouterr()
    first, _, err = captured.err.partition("\n")
    says_how = first.startswith("megatron-async: sampling with temperature=0.0 (--temperature), ")
    return status, captured.out, err if says_how else captured.err


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_answers_follow_from_the_whole_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, chats: Chats
) -> None:
    typed = "def add(a, b):\n\ndef sub(a, b):\n"
    status, out, err = chat(monkeypatch, capsys, typed, "--max-new-tokens", "24")
    assert (status, err) == (0, "")
    first, second = chats
    assert first == [said("user", "def add(a, b):")]
    assert second[:-1] == [*first, said("assistant", second[1]["content"])]
    assert second[-1] == said("user", "def sub(a, b):")

    templates = ChatTemplates.from_directory("tiny")
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=24)
    with DynamicInferenceEngine.from_pretrained("tiny") as engine:
        prompts = [templates.encode_chat(engine.model.tokenizer, each) for each in chats[:2]]
        texts = [request.generated_text for request in engine.generate(prompts, params)]
    assert out == "".join(f"{text}\n" for text in texts)
    assert second[1]["content"] == texts[0]


def test_commands_forget_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, chats: Chats
) -> None:
    typed = "a\n/system Be brief\nb\n/reset\nc\n/system\nd"
    options = ("--max-new-tokens", "2", "--system", "Hello")
    assert chat(monkeypatch, capsys, typed, *options)[0] == 0
    assert chats == [
        [said("system", "Hello"), said("user", "a")],
        [said("system", "Be brief"), said("user", "b")],
        [said("system", "Be brief"), said("user", "c")],
        [said("user", "d")],
    ]


@pytest.mark.parametrize("depth", ["0", "2"])
def test_interrupt_ends_the_answer_and_not_the_program(
    depth: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture, chats: Chats
) -> None:
    steps = 0
    step_modern = DynamicInferenceEngine.step_modern

    def interrupted(self: DynamicInferenceEngine) -> dict[str, Any]:
        nonlocal steps
        steps += 1
        if steps == 12:
            signal.raise_signal(signal.SIGINT)
        return step_modern(self)

    monkeypatch.setattr(DynamicInferenceEngine, "step_modern", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    typed, options = "def f(x):\nclass A:\n", ("--max-new-tokens", "40", "--depth", depth)
    status, out, err = chat(monkeypatch, capsys, typed, *options)
    assert (status, err) == (0, "")
    assert signal.getsignal(signal.SIGINT) is handler
    cut = chats[1][1]["content"]
    assert 0 < len(cut) < 13  # a byte a token
    whole = out.removeprefix(f"{cut}\n")
    assert whole != out and len(whole.encode()) > 30


def test_message_without_room_is_reported_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, chats: Chats
) -> None:
    options = ("--max-new-tokens", "4", "--inference-max-seq-length", "32")
    status, out, err = chat(monkeypatch, capsys, f"{'x' * 40}\ndef f():\n", *options)
    assert status == 0 and out.count("\n") >= 1
    assert err.startswith("megatron-async: error: ") and "/reset" in err and "41" in err
    assert chats[1] == [said("user", "def f():")]


def test_model_without_a_template_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(model_directory("tiny") / name)
    status, out, err = chat(monkeypatch, capsys, "a\n", "--model", str(tmp_path))
    assert (status, out) == (2, "")
    assert "no chat template" in err and err.count("\n") == 1
    template = tmp_path / "other.jinja"
    template.write_text("{{ messages[-1].content }}")
    options = ("--model", str(tmp_path), "--chat-template", str(template))
    status, out, _ = chat(monkeypatch, capsys, "a\n", *options, "--max-new-tokens", "3")
    assert status == 0 and out


def first_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture, *options: str) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--device", "cpu", *options]) == 0
    return capsys.readouterr().err.splitlines()[0]


def test_the_first_line_says_how_tokens_are_sampled_and_by_whose_word(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    for file in model_directory("tiny").iterdir():
        (tmp_path / file.name).symlink_to(file)
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "max_new_tokens": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    model = ("--model", str(tmp_path), "--top-p", "0.8", "--seed", "7")
    said = first_line(monkeypatch, capsys, *model)
    for part in ("temperature=0.7 (default)", "top_p=0.8 (--top-p)", "seed=7 (--seed)",
                 "change it with --temperature, --top-p", "with --generation-config"):  # fmt: skip
        assert part in said, said
    said = first_line(monkeypatch, capsys, *model, "--generation-config")
    for part in ("temperature=0.6 (generation_config.json)", "top_p=0.8 (--top-p)", "top_k=20 (",
                 "num_tokens_to_generate=9 (generation_config.json)"):  # fmt: skip
        assert part in said, said


def test_a_model_that_does_not_sample_answers_greedily_by_its_own_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    asked: list[SamplingParams] = []
    add_request = DynamicInferenceEngine.add_request

    def spy(self: DynamicInferenceEngine, key: Any, prompt: Any, params: SamplingParams) -> Any:
        asked.append(params)
        return add_request(self, key, prompt, params)

    monkeypatch.setattr(DynamicInferenceEngine, "add_request", spy)
    for file in model_directory("tiny").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 5}')
    for options in ((), ("--generation-config",), ("--generation-config", "--temperature", "2")):
        monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
        options = ("--model", str(tmp_path), "--max-new-tokens", "2", *options)
        assert main(["chat", "--device", "cpu", *options]) == 0
    assert [(params.temperature, params.top_p) for params in asked] == [(0.7, 0.95), (0, 0), (2, 0)]
    assert {params.num_tokens_to_generate for params in asked} == {2}
