"""What the command line makes of its arguments, without a model."""

from __future__ import annotations

import errno
import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.benchmark import command as bench
from megatron_async.cli.main import build_parser, main
from megatron_async.cli.options.options import (
    FLAGS,
    engine_config,
    name_options,
    resolve_scheduling,
)
from megatron_async.cli.options.prompts import read_jobs
from megatron_async.cli.output.table import format_table
from megatron_async.config.engine_config import EngineConfig
from megatron_async.errors import ConfigError
from megatron_async.models.description.shapes import SHAPES
from megatron_async.ranks.layout import Layout
from megatron_async.ranks.open_files import check_files
from megatron_async.sampling_params import SamplingParams

COMMANDS = ("generate", "chat", "serve", "verify", "demo", "info", "bench", "trace", "tune")


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The single line on stderr of a call that must end with status 2."""
    try:
        status = main(arguments)
    except SystemExit as exit:
        status = exit.code
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.startswith("megatron-async: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("asynchronous", "depth", "default", "expected"),
    [
        (None, None, False, 0),
        (None, None, True, 1),
        (True, None, False, 1),
        (False, None, True, 0),
        (None, 0, True, 0),
        (False, 0, True, 0),
        (None, 2, False, 2),
        (True, 4, False, 4),
    ],
)
def test_scheduling_options_give_a_depth(
    asynchronous: bool | None, depth: int | None, default: bool, expected: int
) -> None:
    assert resolve_scheduling(asynchronous, depth, default=default) == expected


@pytest.mark.parametrize(("asynchronous", "depth"), [(False, 2), (True, 0)])
def test_contradictory_scheduling_options_are_refused(asynchronous: bool, depth: int) -> None:
    with pytest.raises(ConfigError, match=f"--depth {depth}.*leave one of them out"):
        resolve_scheduling(asynchronous, depth, default=True)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["generate", "--prompt", "a", "--depth", "-1"], ["--depth", "'-1'", "between 0 and 64"]),
        (["generate", "--prompt", "a", "--depth", "65"], ["--depth", "'65'", "between 0 and 64"]),
        (["generate", "--prompt", "a", "--max-new-tokens", "0"], ["--max-new-tokens", "'0'"]),
        (["generate", "--prompt", "a", "--temperature", "nan"], ["--temperature", "'nan'"]),
        (["generate", "--prompt", "a", "--temperature", "-1"], ["--temperature", "'-1'"]),
        (["generate", "--prompt", "a", "--top-p", "1.5"], ["--top-p", "'1.5'", "at most 1"]),
        (["generate", "--prompt", "a", "--top-k", "x"], ["--top-k", "'x'", "integer"]),
        (["generate", "--prompt", "a", "--tempera", "1"], ["--tempera"]),
        (["generate", "--prompt", "a", "--dtype", "int8"], ["--dtype", "int8", "bfloat16"]),
        (
            ["generate", "--prompt", "a", "--inference-dynamic-batching-buffer-size-gb", "0"],
            ["--inference-dynamic-batching-buffer-size-gb", "above 0"],
        ),
        (
            ["generate", "--prompt", "a", "--inference-dynamic-batching-max-tokens", "8"],
            ["--inference-dynamic-batching-max-tokens=8", "--max-requests", "320"],
        ),
        (
            ["generate", "--prompt=a", "--no-inference-async-scheduling", "--depth=2"],
            ["--no-inference-async-scheduling", "--depth 2", "leave one"],
        ),
        (["generate"], ["--prompt TEXT", "--prompt-file"]),
        (["generate", "--prompt-file", "/no/such"], ["/no/such", "No such file"]),
        (["generate", "--prompt", "a", "--model", "/no/such"], ["/no/such"]),
        (
            ["generate", "--prompt=a", "--device=cpu", f"--block-count={10**9}"],
            ["--block-count=1000000000", "GiB; lower --block-count or --inference-dynamic"],
        ),
        (
            ["generate", "--prompt=a", f"--inference-dynamic-batching-block-size={2**70}"],
            [f"--inference-dynamic-batching-block-size={2**70}", "at most 2147483647"],
        ),
        (["trace", "--steps", "5"], ["--steps", "'5'"]),
        (["bench", "--workload", "ragged", "--new-tokens", "9"], ["--new-tokens", "decode"]),
        (["bench", "--temperature", "1e-7"], ["temperature=1e-07 is too small"]),
        (["bench", "--temperature", "1e9"], ["temperature=1000000000.0", "between 0 and 1e+06"]),
        (["verify", "--depths", "0"], ["'0'", "use 0,1"]),
        (["verify", "--depths", "1,x"], ["'x'"]),
        (["verify", "--requests", "0"], ["--requests", "'0'"]),
        (["generate", "--prompt=a", "--adaptive-speculation"], ["--num-speculative-tokens"]),
        (["verify", "--speculative-method", "ngram"], ["--num-speculative-tokens"]),
        (["demo", "--inference-async-scheduling", "--depth", "0"], ["--depth 0", "serial"]),
        ([], ["COMMAND", "--help"]),
        (["translate"], ["translate"]),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_of(arguments, capsys)
    for part in parts:
        assert part in line


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    assert exit.value.code == 0
    assert "usage: megatron-async" in capsys.readouterr().out


def test_engine_options_become_the_configuration() -> None:
    arguments = (
        "generate --prompt a --inference-dynamic-batching-max-requests 3 "
        "--inference-dynamic-batching-max-tokens 99 --inference-max-seq-length 50 "
        "--inference-dynamic-batching-buffer-size-gb 0.5 --prefill-chunk-tokens 32 "
        "--inference-dynamic-batching-block-size 16 --device cpu --dtype float32 "
        "--inference-dynamic-batching-num-cuda-graphs 2 --decode-only-cuda-graphs --debug "
        "--allow-non-finite-weights --gemm-autotune-seconds 9.5 --guided-automata-mb 3"
    )
    config = engine_config(build_parser().parse_args(arguments.split()), 2, random_seed=5)
    assert config == EngineConfig(
        depth=2,
        max_requests=3,
        max_tokens=99,
        max_sequence_length=50,
        block_size_tokens=16,
        buffer_size_gb=0.5,
        prefill_chunk_tokens=32,
        allow_non_finite_weights=True,
        random_seed=5,
        num_cuda_graphs=2,
        capture_mixed_steps=False,
        gemm_autotune_seconds=9.5,
        guided_automata_bytes=3 << 20,
        device="cpu",
        dtype="float32",
        debug=True,
    )


def test_engine_defaults_are_those_of_the_configuration() -> None:
    args = build_parser().parse_args(["generate", "--prompt", "a"])
    assert engine_config(args, 0) == EngineConfig(depth=0)


def test_errors_name_options_instead_of_fields() -> None:
    assert name_options("max_requests=0\n is low") == "--max-requests=0 is low"
    assert name_options("lower max_tokens.") == "lower --inference-dynamic-batching-max-tokens."
    for path in ("/tmp/max_tokens", "a/max_tokens/b", "max_tokens.json: none", "x-block_count"):
        assert name_options(path) == path
    fields = {*EngineConfig.__dataclass_fields__, *SamplingParams.__dataclass_fields__}
    assert set(FLAGS) <= fields


def test_prompts_come_in_the_order_given(tmp_path: Path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("one\\n\n\n  two \u2028 three\n", encoding="utf-8")
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(
        "\n".join(
            json.dumps(v) for v in ({"prompt": "four", "top_k": 3}, {"prompt": [5], "priority": -2})
        )
    )
    jobs = read_jobs(["zero"], [str(text), str(lines)])
    assert [job.prompt for job in jobs] == ["zero", "one\\n", "  two \u2028 three", "four", [5]]
    assert [job.sampling for job in jobs[3:]] == [{"top_k": 3}, {}]
    assert [job.priority for job in jobs] == [0, 0, 0, 0, -2]
    assert [job.source.rpartition("/")[2] for job in jobs] == [
        "--prompt 1",
        "prompts.txt:1",
        "prompts.txt:3",
        "prompts.jsonl:1",
        "prompts.jsonl:2",
    ]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "not valid JSON"),
        ("[1]", 'must be an object with "prompt"'),
        ('{"text": 3}', 'must be an object with "prompt"'),
        ('{"prompt": 3}', "give text or a list"),
        ('{"prompt": [NaN]}', "not valid JSON: NaN"),
        ('{"prompt": "a", "beams": 2}', "unknown field 'beams'"),
        *(
            (f'{{"prompt": "a", "priority": {value}}}', '"priority" is ')
            for value in ('"1"', "1.0", "true", "null", "[1]")
        ),
    ],
)
def test_a_bad_line_of_json_is_an_error_of_that_line(line: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{line}\n{{"prompt": "good"}}\n')
    bad, good = read_jobs([], [str(file)])
    assert bad.error is not None
    assert error in bad.error
    assert (good.prompt, good.error) == ("good", None)


def test_a_null_leaves_the_option_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "max_new_tokens": null, "temperature": null, "top_p": 0.5}')
    (job,) = read_jobs([], [str(file)])
    assert (job.sampling, job.error) == ({"top_p": 0.5}, None)


def test_the_standard_input_is_read_as_a_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffab\r\nc\u00e4\n".encode())
    assert [job.prompt for job in read_jobs([], [str(file)])] == ["ab", "c\u00e4"]
    with file.open(encoding="latin-1", newline="\n") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert [job.prompt for job in read_jobs([], ["-"])] == ["ab", "c\u00e4"]
        stdin.fileno()  # still open
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it where there is none
    with pytest.raises(ConfigError, match="--prompt-file -: the standard input is closed"):
        read_jobs([], ["-"])


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"\n\n"])
def test_a_file_without_prompts_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"prompts\.txt"):
        read_jobs([], [str(file)])


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from megatron_async.cli.main import build_parser; "
        "build_parser().format_help(); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_table_columns_line_up() -> None:
    assert format_table(("", "n"), [("a", 1), ("long", 23)]) == "       n\na      1\nlong  23"


@pytest.mark.parametrize("command", ("bench", "trace", "tune"))
def test_every_shape_can_be_asked_for(command: str) -> None:
    assert len(SHAPES) > 4
    for shape in SHAPES:
        assert build_parser().parse_args([command, "--shape", shape]).shape == shape


def test_a_bench_report_tells_the_command_that_measures_the_same() -> None:
    options = "--workload ragged --arrival-rate inf,40,0.1234567 --host-work-us 1234567.5"
    args = build_parser().parse_args(["bench", *options.split()])
    bench.resolve(args)
    command = bench.command_line(args)
    assert "--arrival-rate inf,40,0.1234567 " in command
    assert build_parser().parse_args(shlex.split(command)[1:]) == args


@pytest.mark.parametrize("name", [(), ("a module.py",)])
def test_too_few_open_files_are_not_taken_for_a_bad_standard_output(
    name: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opens_too_many(_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), *name)

    monkeypatch.setattr("megatron_async.cli.info.run", opens_too_many)
    assert "raise the limit (ulimit -n)" in error_of(["info"], capsys)


RANKS = ["--device", "cpu", "--tensor-model-parallel-size", "2"]
FILES = {
    "generate": (["generate", "--prompt", "a", *RANKS], "a rank of TP2 may need 80 open files"),
    "serve": (["serve", "--port", "0", *RANKS], "the server may need 64 open files"),
}


@pytest.mark.parametrize("most", [20, 25, 30, 40])
@pytest.mark.parametrize("command", FILES)
def test_too_few_open_files_are_told_before_any_process_is_started(
    command: str, most: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(*_: object, **__: object) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (most, most))
    monkeypatch.setattr(subprocess.Popen, "__init__", starts)
    arguments, said = FILES[command]
    error = error_of(arguments, capsys)
    assert said in error and f"the limit is {most}; raise it" in error


def test_a_server_with_ranks_needs_files_for_these_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    assert "a rank of TP2 may need 80 open files" in error_of(["serve", *RANKS], capsys)


@pytest.mark.parametrize(
    ("limits", "now"),
    [
        ((20, 100), (80, 100)),
        ((20, resource.RLIM_INFINITY), (80, resource.RLIM_INFINITY)),
        ((80, 80), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_a_limit_of_open_files_is_raised_where_the_system_lets_it(
    limits: tuple[int, int], now: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: given.append(limits))
    check_files(Layout(2))
    check_files(Layout(1))
    assert given == ([] if now is None else [now])
