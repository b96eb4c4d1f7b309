"""``megatron-async bench`` with drafts: plain and drafting steps of one run, next to each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_async.benchmark.measuring.loads import Load
from megatron_async.benchmark.model import BenchmarkModel
from megatron_async.benchmark.report import as_table
from megatron_async.checkpoint import load_pretrained
from megatron_async.cli.main import main
from megatron_async.errors import ConfigError
from megatron_async.sampling.synthetic_acceptance import synthetic_bits, threshold

Capture = pytest.CaptureFixture[str]
SMALL = ("--shape", "tiny-llama", "--device", "cpu", "--num-speculative-tokens")
DECODE = ("--prompt-tokens", "4", "--new-tokens", "72", "--rounds", "1")
RAGGED = (
    *("--workload", "ragged", "--requests", "6", "--max-requests", "4"),
    *("--prompt-range", "4,16", "--output-range", "24,30"),
)


def bench(path: Path, *options: str) -> dict[str, Any]:
    file = path / "report.json"
    assert main(["bench", *SMALL, *options, "--json", str(file)]) == 0
    report: dict[str, Any] = json.loads(file.read_text())
    return report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    options = ("1,2", *DECODE, "--batch-sizes", "8", "--depths", "0,1", "--synthetic-acceptance")
    return bench(tmp_path_factory.mktemp("drafts"), *options, "0.8")


def test_plain_and_drafting_steps_are_rows_of_one_run(report: dict[str, Any]) -> None:
    rows = report["results"]
    assert [(row["depth"], row["window"]) for row in rows] == [
        (depth, window) for depth in (0, 1) for window in (1, 2, 3)
    ]
    for row in rows:
        plain = rows[0] if row["depth"] == 0 else rows[3]
        serial = rows[row["window"] - 1]
        of_plain = row["step_ms_mean"] / plain["step_ms_mean"]
        assert row["step_ratio"] == pytest.approx(of_plain)
        faster = row["tokens_per_second"] / plain["tokens_per_second"]
        assert row["speedup_over_plain"] == pytest.approx(faster)
        assert row["speedup_over_serial"] == pytest.approx(
            serial["step_ms_mean"] / row["step_ms_mean"]
        )
        made = 1e3 * row["batch"] * row["tokens_per_step"] / row["step_ms_mean"]
        assert row["tokens_per_second"] == pytest.approx(made)


def test_drafts_are_accepted_at_the_synthetic_rate(report: dict[str, Any]) -> None:
    assert report["drafts"] == {
        "num_speculative_tokens": [1, 2],
        "speculative_method": "mtp",
        "draft_model": None,
        "mtp_layers": 2,
        "synthetic_acceptance": 0.8,
    }
    assert report["model"]["mtp_num_layers"] == 2
    for row in report["results"]:
        shares = row["acceptance_by_position"]
        assert shares == pytest.approx([0.8, 0.64][: row["window"] - 1], abs=0.08)
        assert row["tokens_per_step"] == pytest.approx(1 + sum(shares), abs=0.1)
        assert row["tokens_accepted"] <= row["tokens_drafted"]
    # It depends on nothing but seeds and positions.
    serial, deep = report["results"][:3], report["results"][3:]
    for name in ("tokens_accepted", "acceptance_by_position"):
        assert [row[name] for row in serial] == [row[name] for row in deep]


def test_the_table_says_that_acceptance_is_synthetic(report: dict[str, Any]) -> None:
    heading, header, *rows = as_table(report).splitlines()
    assert "synthetic acceptance 0.8 (cost only: the tokens mean nothing)" in heading
    assert header.split()[:6] == ["batch", "depth", "window", "tokens/step", "accepted", "ms/step"]
    assert [row.split()[2] for row in rows[:6]] == ["1", "2", "3"] * 2
    assert rows[0].split()[4] == "-" and rows[2].split()[4].count("/") == 1


@pytest.mark.parametrize("rate", (0.0, 0.3, 0.8, 1.0))
def test_synthetic_bits_have_the_rate_at_each_place(rate: float) -> None:
    positions = torch.arange(4000)[:, None] + torch.arange(1, 5)
    found = synthetic_bits(positions, torch.arange(-2000, 2000)) < threshold(rate)
    torch.testing.assert_close(
        found.double().mean(0), torch.full((4,), rate).double(), atol=0.03, rtol=0
    )
    together = (found[:, 0] & found[:, 1]).double().mean()
    assert float(together) == pytest.approx(rate**2, abs=0.03)


@pytest.mark.parametrize(
    "who",
    (
        ("--speculative-method", "ngram"),
        ("--draft-model", "random:tiny-llama"),
    ),
    ids=("ngram", "draft-model"),
)
def test_other_drafters_change_no_token_of_the_ragged_load(
    who: tuple[str, ...], tmp_path: Path
) -> None:
    report = bench(tmp_path, "2", *RAGGED, "--depths", "1", *who)
    plain, drafted = report["results"]
    assert (plain["window"], drafted["window"]) == (1, 3)
    assert plain["requests_different"] == drafted["requests_different"] == 0
    assert drafted["tokens_drafted"] > 0 and drafted["tokens_per_step"] >= 1
    # Random weights repeat themselves, and draft for themselves without error.
    assert drafted["tokens_accepted"] > 0
    assert drafted["steps"] < plain["steps"]
    assert drafted["speedup_over_plain"] == pytest.approx(
        drafted["output_tokens_per_second"] / plain["output_tokens_per_second"]
    )


def test_synthetic_tokens_are_not_compared(tmp_path: Path) -> None:
    options = ("1", *RAGGED, "--depths", "0", "--synthetic-acceptance", "1")
    _, drafted = bench(tmp_path, *options)["results"]
    assert drafted["requests_different"] is None and drafted["tokens_accepted"] > 0


def test_prompts_are_pieces_of_a_text(tmp_path: Path) -> None:
    text = list(range(100, 140))
    load = Load(prompt_tokens=8, prompt_file="some.py")
    prompts = [request.prompt for request in load.requests(512, 50, text)]
    assert {tuple(prompt) for prompt in prompts} <= {tuple(text[n : n + 8]) for n in range(33)}
    assert len({prompt[0] for prompt in prompts}) > 10
    model, none = BenchmarkModel.__new__(BenchmarkModel), "model has no tokenizer"
    object.__setattr__(model, "tokenizer", None)
    with pytest.raises(ConfigError, match=none):
        model.tokens_of("some.py", 8)
    object.__setattr__(model, "tokenizer", load_pretrained("tiny").tokenizer)
    file = tmp_path / "text.py"
    with pytest.raises(ConfigError, match="cannot be read"):
        model.tokens_of(str(file), 8)
    file.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="has 6 tokens and a prompt 8; lower --prompt-tokens"):
        model.tokens_of(str(file), 8)
    assert bytes(model.tokens_of(str(file), 6)) == b"x = 1\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mtp-layers", "1"), "--mtp-layers belongs to drafts; add --num-speculative-tokens"),
        (("--draft-model", "tiny"), "--draft-model belongs to drafts"),
        (("--synthetic-acceptance", "0.5"), "--synthetic-acceptance belongs to drafts"),
        (("--num-speculative-tokens", "0"), "between 1 and 64"),
        (("--num-speculative-tokens", "1", "--synthetic-acceptance", "1.5"), "at most 1"),
        (("--num-speculative-tokens", "1", "--mtp-layers", "1"), "gives a --shape layers"),
        (
            (
                "--num-speculative-tokens",
                "1",
                "--draft-model",
                "x",
                "--speculative-method",
                "ngram",
            ),
            "contradict each other",
        ),
        (("--num-speculative-tokens", "3", "--new-tokens", "50"), "with 3 drafts; use at least 56"),
        (
            ("--num-speculative-tokens", "1", "--shape", "tiny-llama", "--draft-model", "tiny"),
            "vocabulary",
        ),
        (("--num-speculative-tokens", "1", "--server", "http://x"), "does not go together"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: tuple[str, ...], message: str, capsys: Capture
) -> None:
    try:
        status = main(["bench", "--device", "cpu", *options])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ("generate", "verify", "serve", "demo", "trace"))
def test_synthetic_acceptance_is_for_bench_alone(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--synthetic-acceptance", "0.8"])
    assert stopped.value.code == 2
    assert "unrecognized arguments: --synthetic-acceptance" in capsys.readouterr().err
