"""Megatron's spellings on the command line, and its flags without a meaning here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import megatron_async
from megatron_async.checkpoint.path import load_tokenizer
from megatron_async.cli.main import build_parser, main
from megatron_async.cli.options.megatron_flags import FLAGS, value_counts
from megatron_async.cli.options.options import engine_config, resolve_scheduling
from megatron_async.cli.options.prompts import read_jobs
from megatron_async.errors import CheckpointError

TINY = Path(megatron_async.__file__).parent / "assets" / "tiny"


def test_flags_with_a_meaning_are_options_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    helps = ""
    for command in ("generate", "serve", "verify"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        helps += capsys.readouterr().out
    words = set(helps.replace(",", " ").split())
    for name, entry in FLAGS.items():
        assert (name in words) is (entry.outcome == "works"), name


def test_each_flag_of_the_tables_is_megatrons() -> None:
    assert FLAGS.keys() - value_counts().keys() == set()
    assert len(value_counts()) > 1000


def test_spellings_are_those_of_our_options() -> None:
    theirs = [
        *("generate", "--load", "M", "--prompts", "a", "b", "--num-tokens-to-generate", "5"),
        *("--top_k", "2", "--top_p", "0.5", "--stop-words", "x", "y", "--bf16"),
        *("--inference-dynamic-batching-async-sched-mode", "async"),
        *("--inference-dynamic-batching-max-requests", "3"),
        *("--inference-dynamic-batching-num-cuda-graphs", "-1"),
        *("--inference-dynamic-batching-paused-buffer-size-gb", "0.5"),
        "--inference-dynamic-batching-track-paused-request-events",
        *("--inference-dynamic-batching-logprobs-mode", "processed_logprobs"),
    ]
    ours = [
        *("generate", "--model", "M", "--prompt", "a", "b", "--max-new-tokens", "5"),
        *("--top-k", "2", "--top-p", "0.5", "--stop", "x", "y", "--dtype", "bfloat16"),
        *("--inference-async-scheduling", "--max-requests", "3"),
        *("--log-probs-mode", "processed"),
    ]
    args, wanted = map(build_parser().parse_args, (theirs, ours))
    wanted.paused_buffer_size_gb, wanted.track_paused_request_events = 0.5, True
    assert vars(args) == vars(wanted)
    config = engine_config(args, 1)
    assert config.paused_buffer_size_gb == 0.5 and config.track_paused_request_events
    serial = ["verify", "--inference-dynamic-batching-async-sched-mode", "legacy"]
    with pytest.raises(SystemExit):  # verify compares depths
        build_parser().parse_args(serial)
    serial[0] = "serve"
    asynchronous = build_parser().parse_args(serial).inference_async_scheduling
    assert resolve_scheduling(asynchronous, None, default=True) == 0


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        status = main(["generate", "--prompt", "x", *arguments])
    except SystemExit as ended:
        status = ended.code
    err = capsys.readouterr().err
    assert status == 2 and err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bogus", "3"], "unrecognized arguments: --bogus 3 "),
        (["--swiglu", "--micro-batch-size=4", "--wat=1"], "unrecognized arguments: --wat=1 "),
        (["--micro-batch-size", "4", "5"], "unrecognized arguments: 5 "),
        (["--context-parallel-size", "2"], "--context-parallel-size 2 is not supported"),
        (["--model-provider", "bert"], "which; use gpt or mamba"),
        (["--drain-between-batches"], "run the command once for each batch"),
        (["--host", "0.0.0.0"], "--host is no option of this command"),
        (["--inference-dynamic-batching-async-sched-mode", "x"], "must be legacy or async"),
    ],
)
def test_what_cannot_be_ignored_is_an_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in error_of(arguments, capsys)


def test_flags_of_megatron_are_errors_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--micro-batch-size", "4"])
    assert "unrecognized arguments: --micro-batch-size 4" in capsys.readouterr().err


def test_a_prompt_file_of_megatron_is_read(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"text": "a", "chatgpt_output_token_length": 3, "top_k": 2}, {"prompt": "b"}]
    lines += [{"text": 3}, {"prompt": "c", "who": 1}]
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second, third, fourth = read_jobs([], [str(file)])
    assert (first.prompt, first.sampling, first.error) == ("a", {"top_k": 2}, None)
    assert second.prompt == "b" and third.error == 'must be an object with "prompt", or with "text"'
    assert "unknown field 'who'" in str(fourth.error)
    (first,) = read_jobs([], [str(file)], most=1, lengths=True)
    assert first.sampling == {"top_k": 2, "max_new_tokens": 3}


def test_generate_takes_the_arguments_of_a_megatron_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    status = main(
        [
            *("generate", "--load", "tiny", "--tokenizer-model", str(TINY / "tokenizer.json")),
            *("--prompts", "def f(", "import os", "--num-tokens-to-generate", "8"),
            *("--top_k", "1", "--termination-id", "-1", "--return-log-probs"),
            *("--top-n-logprobs", "2"),
            *("--micro-batch-size", "1", "--use-mcore-models", "--disable-chunked-prefill"),
            *("--no-load-optim", "--tensor-model-parallel-size", "1", "--use-checkpoint-args"),
            *("--output-path", str(output)),
        ]
    )
    out, err = capsys.readouterr()
    assert status == 0
    first = err.splitlines()[0]
    assert first == (
        "megatron-async: warning: ignored, without a meaning here: --micro-batch-size, "
        "--use-mcore-models, --no-load-optim, --use-checkpoint-args"
    )
    results = json.loads(output.read_text())
    assert list(results) == ["0", "1"]
    assert results["1"]["input_prompt"] == "import os"
    assert results["0"]["generated_text"] in out
    assert len(results["0"]["generated_tokens"]) == 8
    assert len(results["0"]["logprobs"]) == len("def f(") - 1 + 8
    top = results["0"]["top_n_logprobs"][0]
    assert len(top) == 2 and results["0"]["generated_text"].startswith(next(iter(top)))
    for wrong in (TINY / "config.json", tmp_path):
        with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
            load_tokenizer("random:qwen0.6b", wrong)
    assert load_tokenizer("random:qwen0.6b", TINY).vocab_size == load_tokenizer(TINY).vocab_size
