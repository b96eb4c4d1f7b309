"""Options of ``generate`` for sampling, ends and structure, from arguments to output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_async.cli.main import main
from megatron_async.cli.options.prompts import Job
from megatron_async.cli.options.sampling import SAMPLING, STRUCTURES
from megatron_async.cli.output.writers import JsonWriter
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.engine.requests.siblings import sibling_seed
from megatron_async.request.request import DynamicInferenceRequest, FinishReason
from megatron_async.sampling_params import SamplingParams

Capture = pytest.CaptureFixture[str]
COMMON = ("--device", "cpu", "--max-new-tokens", "6", "--block-count", "64")


def call(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of ``generate`` on the embedded model."""
    try:
        status = main(["generate", *COMMON, *arguments])
    except SystemExit as exit:
        status = int(exit.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The parameters of requests as they reach the engine, which serves them with plain ones."""
    params: list[SamplingParams] = []
    add = DynamicInferenceEngine.add_request

    def note(self: Any, number: int, prompt: Any, given: SamplingParams, **options: Any) -> Any:
        params.append(given)
        plain = SamplingParams(temperature=0.0, num_tokens_to_generate=1)
        return add(self, number, prompt, plain, **options)

    monkeypatch.setattr(DynamicInferenceEngine, "add_request", note)
    return params


def test_every_option_reaches_its_parameter(
    asked: list[SamplingParams], tmp_path: Path, capsys: Capture
) -> None:
    options = (
        *("--min-p", "0.1", "--repetition-penalty", "1.5", "--presence-penalty", "-1"),
        *("--frequency-penalty", "0.5", "--logit-bias", "42=-1.5", "7=2", "--logit-bias", "9=0"),
        *("--allowed-token-ids", "1", "2", "--bad-words", "as", "is", "--bad-words", "in"),
        *("--min-tokens", "2", "--ignore-eos", "--stop", "\n\n", "end", "--stop-token-ids", "3"),
        *("--include-stop-str-in-output", "--return-log-probs", "--top-n-logprobs", "5"),
        *("--skip-prompt-log-probs", "--log-probs-mode", "processed", "--n", "2"),
        *("--best-of", "3", "--top-k", "4", "--top-p", "0.9"),
    )
    expected: dict[str, Any] = {
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.5,
        "logit_bias": {42: -1.5, 7: 2.0, 9: 0.0},
        "allowed_token_ids": (1, 2),
        "bad_words": ("as", "is", "in"),
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_words": ("\n\n", "end"),
        "stop_token_ids": (3,),
        "include_stop_str_in_output": True,
        "return_log_probs": True,
        "top_n_logprobs": 5,
        "skip_prompt_log_probs": True,
        "log_probs_mode": "processed",
        "n": 2,
        "best_of": 3,
        "top_k": 4,
        "top_p": 0.9,
        "temperature": 1.0,
        "num_tokens_to_generate": 6,
    }
    # A line of a file sets the same by the same names; where it sets none, the options hold.
    line = {name: value for name, value in expected.items() if name in SAMPLING}
    line |= {"stop": ["\n\n", "end"], "max_new_tokens": 6}
    file = tmp_path / "prompts.jsonl"
    other = {"prompt": "b", "n": None, "num_speculative_tokens": 0}
    file.write_text(f"{json.dumps({'prompt': 'a', **line})}\n{json.dumps(other)}\n")
    assert call(capsys, "--prompt", "a", *options)[0] == 0
    assert call(capsys, "--prompt-file", str(file))[0] == 0
    by_option, by_line, without = (params.checked() for params in asked)
    assert by_option == by_line == SamplingParams(**expected).checked()
    own = SamplingParams(temperature=0.0, num_tokens_to_generate=6, num_speculative_tokens=0)
    assert without == own.checked()
    assert {name.replace("_schema", "") for name in STRUCTURES} == {
        *("json", "json_object", "regex", "choice", "grammar")
    }


def test_structures_are_given_as_text_or_as_files(
    asked: list[SamplingParams], tmp_path: Path, capsys: Capture
) -> None:
    schema, grammar = '{"type": "object"}', 'root ::= "a"'
    (tmp_path / "schema.json").write_text(schema)
    (tmp_path / "a.ebnf").write_text(grammar)
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a", "json_schema": {schema}}}\n{{"prompt": "b"}}')
    given: list[tuple[tuple[str, ...], dict[str, Any] | None]] = [
        (("--json-schema", schema), {"json": schema}),
        (("--json-schema", str(tmp_path / "schema.json")), {"json": schema}),
        (("--json-object",), {"json_object": True}),
        (("--regex", "a+"), {"regex": "a+"}),
        (("--choice", "yes", "no"), {"choice": ["yes", "no"]}),
        (("--grammar", str(tmp_path / "a.ebnf")), {"grammar": grammar}),
        ((), None),
    ]
    for options, structure in given:
        call(capsys, "--prompt", "a", *options)
        assert asked.pop().structured_outputs == structure
    call(capsys, "--prompt-file", str(file), "--regex", "a+")  # a line's own takes its place
    assert [params.structured_outputs for params in asked] == [
        {"json": {"type": "object"}},
        {"regex": "a+"},
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--min-p", "1.5"), "min_p=1.5 must lie between 0 and 1"),
        (("--n", "0"), "n=0 must be an integer of at least 1"),
        (("--n", "3", "--best-of", "2"), "best_of=2 must be at least n=3"),
        (("--min-tokens", "7"), "min_tokens=7 exceeds --max-new-tokens=6"),
        (("--stop", ""), "--stop has ''"),
        (("--allowed-token-ids", "99999"), "allowed_token_ids has token id 99999"),
        (("--top-n-logprobs", "21"), "top_n_logprobs=21 must be at most 20"),
        (("--logit-bias", "7"), "--logit-bias: invalid id_and_bias value: '7'"),
        (("--json-schema", "/no/such"), "--json-schema: '/no/such' cannot be read"),
        (("--regex", "a", "--choice", "b"), "--choice: not allowed with argument --regex"),
        (("--log-probs-mode", "x"), "--log-probs-mode"),
    ],
)
def test_bad_values_are_one_line(arguments: tuple[str, ...], said: str, capsys: Capture) -> None:
    status, out, err = call(capsys, "--prompt", "a", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("megatron-async: error: ") and err.count("\n") == 1
    assert said in err


def test_several_texts_of_a_prompt_are_its_choices(capsys: Capture) -> None:
    prompts = ("--prompt", "def f(x):", "import ", "--seed", "5", "--max-requests", "2")
    _, out, _ = call(capsys, *prompts, "--n", "3", "--json")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["prompt"] for record in records] == ["def f(x):", "import "]
    for record in records:
        choices = record["choices"]
        assert list(choices[0]) == ["text", "token_ids", "finish_reason", "stop_reason", "seed"]
        assert choices[0] == {name: record[name] for name in choices[0]}
        seeds = [choice["seed"] for choice in choices]
        assert seeds == [sibling_seed(record["seed"], index) for index in range(3)]
    assert len({choice["text"] for record in records for choice in record["choices"]}) > 2
    _, shown, _ = call(capsys, *prompts, "--n", "3")
    expected = [
        f"=== {number}/2, {index} of 3: {record['prompt']!r}\n{choice['text']}"
        for number, record in enumerate(records, 1)
        for index, choice in enumerate(record["choices"], 1)
    ]
    assert (
        shown.split("===")[1:]
        == "".join(text if text.endswith("\n") else f"{text}\n" for text in expected).split("===")[
            1:
        ]
    )


def test_one_text_is_streamed_whatever_is_asked_of_it(capsys: Capture) -> None:
    arguments = ("--prompt", "def f(x):", "--n", "1", "--ignore-eos", "--seed", "2")
    greedy = call(capsys, "--prompt", "def f(x):")[1]
    assert greedy == call(capsys, *arguments)[1]  # one text is no reason to sample
    (record,) = map(json.loads, call(capsys, *arguments, "--json")[1].splitlines())
    assert "choices" not in record and "generated_log_probs" not in record
    assert record["stop_reason"] is None and isinstance(record["seed"], int)
    assert call(capsys, *arguments)[1] == record["text"]


def test_log_probs_are_shown_where_they_were_asked_for() -> None:
    request = DynamicInferenceRequest(request_id=0, finish_reason=FinishReason.STOP)
    request.stop_reason, request.generated_log_probs = "\n\n", [-0.5]
    request.prompt_top_n_logprobs = [{"a": -0.25}]
    shown = json.loads(JsonWriter([Job("--prompt 1", "x")], 0).shown(0, request))
    assert shown["generated_log_probs"] == [-0.5] and shown["stop_reason"] == "\n\n"
    assert shown["prompt_top_n_logprobs"] == [{"a": -0.25}]
    assert not {"prompt_log_probs", "generated_top_n_logprobs", "choices"} & set(shown)
