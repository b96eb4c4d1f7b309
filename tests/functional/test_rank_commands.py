"""Every command over two ranks, that rank 0 has started or torchrun: it ends well, or says in one
line why not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron_async.cli.main import main
from megatron_async.ranks.rendezvous import meeting
from tests.support.child_environment import child_environment
from tests.support.patience import PATIENCE_SECONDS
from tests.support.real_server import url_in

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAYOUTS = {
    "TP2": ("tiny", "--tensor-model-parallel-size"),
    "PP2": ("tiny", "--pipeline-model-parallel-size"),
    "EP2": ("tiny-moe", "--expert-model-parallel-size"),
}
FEW = "--prompt-tokens 8 --new-tokens 24 --depths 1 --rounds 1"
COMMANDS = {
    "generate": (
        "--prompt abc --max-new-tokens 4 --depth 2 --record run --quantization fp8 "
        "--quantize-activations --kv-cache-dtype fp8", "4 tokens in",
    ),
    "bench": (FEW, "host: reference work"),
    "trace": ("--prompt-tokens 8 --steps 6 -o trace.json", "open it at"),
    "verify": (
        "--scenario random --requests 12 --max-requests 4 --depths 1", "equal at every depth"
    ),
}  # fmt: skip


def run(folder: Path, how: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(TORCHRUN if how == "torchrun" else ()), "-m", "megatron_async"]
    return subprocess.run(
        [*command, *words],
        env=child_environment(OMP_NUM_THREADS="1"),
        cwd=folder,
        timeout=PATIENCE_SECONDS,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.sweep(of=24)
@pytest.mark.parametrize("how", ("alone", "torchrun"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_on_two_ranks(command: str, layout: str, how: str, tmp_path: Path) -> None:
    model, option = LAYOUTS[layout]
    words, says = COMMANDS[command]
    place = ("--model", model, "--device", "cpu", option, "2")
    ended = run(tmp_path, how, command, *place, *words.split())
    assert ended.returncode == 0 and says in ended.stdout, ended.stdout
    assert "Warning" not in ended.stdout and "Traceback" not in ended.stdout
    assert ("bubble" in ended.stdout) == (layout == "PP2" and command in ("bench", "trace"))
    if command == "generate":
        again = run(tmp_path, how, "replay", "run", "--device", "cpu", option, "2")
        assert again.stdout.endswith("repeated exactly: 1 requests, 1 commands, depth 2\n")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("generate --prompt x --tensor-model-parallel-size 4", "sizes are those of TP4: start 4"),
        ("generate --prompt x", "sizes are those of one rank: start 1"),
        ("bench --expert-model-parallel-size 2 " + FEW, "but the model has no experts"),
        ("trace --tensor-model-parallel-size 2 --steps 9999", "--prompt-tokens 64, --steps 9999"),
        ("generate --model /no --prompt x --tensor-model-parallel-size 2", "/no: not a directory"),
        ("tune --model tiny --tensor-model-parallel-size 2", "start it by itself"),
    ],
)
def test_what_cannot_be_is_said_in_a_line_under_torchrun(
    words: str, says: str, tmp_path: Path
) -> None:
    ended = run(tmp_path, "torchrun", *words.split(), "--device", "cpu")
    ours = [line for line in ended.stdout.splitlines() if line.startswith("megatron-async: error:")]
    assert ended.returncode and any(says in line for line in ours), ended.stdout
    assert 1 <= len(ours) <= 2  # each rank may find it
    # torchrun itself has a traceback.
    assert "megatron_async/" not in ended.stdout.replace("-m megatron_async", "")


@pytest.mark.slow
def test_a_server_under_torchrun_lets_requests_end(tmp_path: Path) -> None:
    """The launcher sends SIGTERM to all ranks: those other than 0 leave it to the server."""
    words = "serve --model tiny --device cpu --tensor-model-parallel-size 2 --port 0"
    command = [sys.executable, *TORCHRUN, "-m", "megatron_async", *words.split()]
    environment = child_environment(OMP_NUM_THREADS="1")
    with (
        subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as process,
        httpx.Client(timeout=PATIENCE_SECONDS) as http,
    ):
        try:
            assert process.stderr is not None
            url = url_in(map(bytes.decode, process.stderr))
            while http.get(f"{url}/health").status_code != 200:
                time.sleep(0.05)
            body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
            with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                last = [line for line in lines if line][-2:]
            assert '"finish_reason":"length"' in last[0] and last[1] == "data: [DONE]"
            process.wait(PATIENCE_SECONDS)
        finally:
            process.kill()


def test_tune_measures_on_one_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "environment_store", starts_nothing)
    assert main(["tune", "--model", "tiny", "--tensor-model-parallel-size", "2"]) == 2
    said = capsys.readouterr().err
    assert "tune measures on one GPU" in said and said.count("\n") == 1


def test_one_rank_is_measured_without_the_variables_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would wait for the others."""
    from megatron_async.benchmark.measuring import one_rank

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    found = one_rank._environment_of_one()
    assert not {name for name in found if "RANK" in name or "TORCHELASTIC" in name}
    assert "PATH" in found and "MASTER_ADDR" not in found


def starts_nothing(*arguments: Any) -> None:
    raise AssertionError("other ranks were waited for")
