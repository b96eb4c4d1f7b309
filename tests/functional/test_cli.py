"""The command line from arguments to output, on a small random model and on ``tiny``."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from megatron_async.checkpoint import save_native
from megatron_async.cli.main import main
from megatron_async.cli.output.writers import JsonWriter
from megatron_async.engine.engine import DynamicInferenceEngine
from megatron_async.megatron_compat import TRIED, installed
from megatron_async.models.build import build_model
from megatron_async.models.description.config import ModelConfig
from megatron_async.request.request import DynamicInferenceRequest
from megatron_async.verify import decode as decode_module
from megatron_async.verify.scenarios import TABLE
from megatron_async.verify.workload import Witnesses

END = 256
MAX_LENGTH = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a byte-level model of random weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    directory = tmp_path_factory.mktemp("model")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    config = ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_hidden_size=48,
        vocab_size=264,
        max_sequence_length=MAX_LENGTH,
    )
    torch.manual_seed(0)
    gpt = build_model(config, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    save_native(directory, gpt, config, eos_token_ids=[END])
    return str(directory)


Capture = pytest.CaptureFixture[str]


def call(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command line."""
    capsys.readouterr()
    status = main([*arguments, "--device", "cpu"])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def generate_json(capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    status, out, _ = call(capsys, "generate", "--json", *arguments)
    assert status == 0
    return [json.loads(line) for line in out.splitlines()]


def run_program(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "megatron_async", *arguments],
        capture_output=True,
        text=True,
        **options,
    )


SAMPLED = ("--max-new-tokens", "30", "--temperature", "1", "--seed", "3")


def test_generate_gives_one_object_for_each_prompt_in_order(model: str, capsys: Capture) -> None:
    prompts = ["def f(x):", "a", "import os"]
    records = generate_json(capsys, "--model", model, "--prompt", *prompts, *SAMPLED)
    assert [record["prompt"] for record in records] == prompts
    for record in records:
        names = ["prompt", "text", "token_ids", "finish_reason", "stop_reason", "seed"]
        assert list(record) == [*names, "counters", "steps"]
        assert record["finish_reason"] in ("stop", "length")
        assert record["counters"]["committed"] == len(record["token_ids"]) <= 30


def test_depth_changes_no_output(model: str, capsys: Capture) -> None:
    arguments = ("--model", model, "--prompt", "def f(x):", "a", *SAMPLED)
    serial = generate_json(capsys, *arguments, "--depth", "0")
    for scheduling in (["--inference-async-scheduling"], ["--depth", "2"]):
        records = generate_json(capsys, *arguments, *scheduling)
        for record, reference in zip(records, serial, strict=True):
            unlike = {"counters": None, "steps": None}  # these say what a depth does
            assert record | unlike == reference | unlike


def test_discarded_tokens_are_counted_in_the_json(model: str, capsys: Capture) -> None:
    """The counters are written when they are final, after the forwards past the end."""
    arguments = ("--model", model, "--prompt", "ab", "b", "cde", "def f():", "--depth", "2")
    sampling = ("--max-new-tokens", "200", "--temperature", "1.5", "--seed", "3")
    records = generate_json(capsys, *arguments, *sampling)
    stopped = [record for record in records if record["finish_reason"] == "stop"]
    assert stopped
    for record in stopped:
        counters = record["counters"]
        assert counters["discarded"] > 0
        assert counters["launched"] == counters["committed"] + counters["discarded"]


def test_drafts_change_no_output_and_are_counted(model: str, capsys: Capture) -> None:
    arguments = ("--model", model, "--prompt", "aaaaaaa", "def f(x): x x x", *SAMPLED)
    plain = generate_json(capsys, *arguments)
    drafts = ("--num-speculative-tokens", "2", "--speculative-method", "ngram", "--depth", "1")
    drafted = generate_json(capsys, *arguments, *drafts)
    assert [r["token_ids"] for r in drafted] == [r["token_ids"] for r in plain]
    for record in drafted:
        counters = record["counters"]
        launched, discarded = counters["launched"], counters["discarded"]
        # The prompt's own row has no drafts.
        assert counters["drafted"] == 2 * (launched - discarded - 1) > 0
        assert counters["accepted"] == sum(counters["accepted_by_position"])
    assert all(r["counters"]["drafted"] == 0 for r in plain)
    asked = [sum(r["counters"][name] for r in drafted) for name in ("accepted", "drafted")]
    _, _, err = call(capsys, "generate", *arguments, *drafts)
    assert f"; {asked[0]} of {asked[1]} drafts accepted (" in err and "tokens a row and step" in err
    assert "drafts" not in call(capsys, "generate", *arguments)[2]


def test_one_prompt_is_streamed_as_it_is(model: str, capsys: Capture) -> None:
    arguments = ("--model", model, "--prompt", "def f(x):", *SAMPLED)
    (record,) = generate_json(capsys, *arguments)
    status, out, err = call(capsys, "generate", *arguments)
    assert (status, out) == (0, record["text"])
    assert "1 request" in err
    assert "30 tokens" in err


def test_several_texts_follow_headers(model: str, capsys: Capture) -> None:
    arguments = ("--model", model, "--prompt", "def f(x):", "a", *SAMPLED)
    texts = [record["text"].rstrip("\n") for record in generate_json(capsys, *arguments)]
    _, out, _ = call(capsys, "generate", *arguments)
    expected = f"=== 1/2: 'def f(x):'\n{texts[0]}\n=== 2/2: 'a'\n{texts[1]}\n"
    assert out == expected


def test_bad_prompts_do_not_stop_the_others(model: str, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "prompts.jsonl"
    long = "x" * (MAX_LENGTH + 1)
    lines = (
        '{"prompt": "good", "max_new_tokens": 5}',
        '{"prompt": ',
        json.dumps({"prompt": long}),
        '{"prompt": "a", "top_p": 7}',
        '{"prompt": "a", "max_new_tokens": 100000}',
        '{"prompt": [1, 2, 3], "max_new_tokens": 4}',
    )
    file.write_text("\n".join(lines))
    status, out, err = call(
        capsys, "generate", "--json", "--model", model, "--prompt-file", str(file)
    )
    assert status == 2
    records = [json.loads(line) for line in out.splitlines()]
    assert ["error" in record for record in records] == [False, True, True, True, True, False]
    assert [len(records[n]["token_ids"]) for n in (0, 5)] == [5, 4]
    errors = [line for line in err.splitlines() if line.startswith("megatron-async: error: ")]
    assert len(errors) == 4
    for number, error in enumerate(errors, 2):
        assert f"prompts.jsonl:{number}: " in error
    assert "not valid JSON" in errors[0]
    assert f"has {len(long)} tokens" in errors[1]
    assert f"at most {MAX_LENGTH - 1}" in errors[1]
    assert "top_p=7" in errors[2]
    assert "100000 to generate" in errors[3]


def test_prompts_of_lower_priority_go_first(
    model: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    finish = JsonWriter.finish

    def watched(self: JsonWriter, request: DynamicInferenceRequest) -> None:
        ended.append(request.request_id)
        finish(self, request)

    monkeypatch.setattr(JsonWriter, "finish", watched)
    file = tmp_path / "prompts.jsonl"
    priorities = (3, 0, -1)
    lines = [
        json.dumps({"prompt": f"x{n}", "priority": priority, "max_new_tokens": 4})
        for n, priority in enumerate(priorities)
    ]
    file.write_text("\n".join([*lines, '{"prompt": "y", "priority": 1000001}']))
    options = ("--model", model, "--prompt-file", str(file), "--max-requests", "1")
    status, out, err = call(capsys, "generate", "--json", *options)
    assert status == 2
    assert "prompts.jsonl:4: priority=1000001 must be" in err
    records = [json.loads(line) for line in out.splitlines()][:3]
    assert [record["prompt"] for record in records] == ["x0", "x1", "x2"]
    assert ended == [2, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--prompt", ""], ["--prompt 1", "empty"]),
        (["--prompt", "x" * 300], ["300 tokens", "256", "at most 255"]),
        (["--prompt", "a", "--max-new-tokens", "999"], ["999", "generate at most 255"]),
        (
            ["--prompt", "a", "--block-count", "1", "--inference-max-seq-length", "256"],
            ["--block-count", "2 KV blocks"],
        ),
        (["--prompt", "a", "--inference-max-seq-length", "999"], ["999", "256"]),
    ],
)
def test_a_single_bad_prompt_is_one_line(
    model: str, arguments: list[str], parts: list[str], capsys: Capture
) -> None:
    status, out, err = call(capsys, "generate", "--model", model, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("megatron-async: error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def test_a_single_bad_prompt_has_its_line_of_json(model: str, capsys: Capture) -> None:
    status, out, err = call(capsys, "generate", "--json", "--model", model, "--prompt", "")
    assert status == 2
    (record,) = [json.loads(line) for line in out.splitlines()]
    assert (record["prompt"], record["text"]) == ("", None)
    assert "--prompt 1: " in record["error"] and f"error: {record['error']}\n" in err


def test_default_length_is_cut_to_what_the_model_allows(model: str, capsys: Capture) -> None:
    prompt = "x" * (MAX_LENGTH - 10)
    (record,) = generate_json(capsys, "--model", model, "--prompt", prompt)
    assert len(record["token_ids"]) <= 10


def test_verify_passes_and_reports_its_witnesses(model: str, capsys: Capture) -> None:
    status, out, _ = call(capsys, "verify", "--model", model, "--json", "--depths", "1,2")
    report = json.loads(out)
    assert status == 0
    assert report["ok"] is True
    assert [entry["depth"] for entry in report["depths"]] == [0, 1, 2]
    for entry in report["depths"]:
        assert entry["equal"]
        assert all(count > 0 for name, count in entry["witnesses"].items() if name != "discarded")
        assert (entry["witnesses"]["discarded"] > 0) == (entry["depth"] > 0)


def test_verify_is_the_same_for_the_same_seed(model: str, capsys: Capture) -> None:
    def witnesses(seed: str) -> Any:
        few = ("--requests", "8")
        arguments = ("--model", model, "--json", "--depths", "1", "--seed", seed, *few)
        report = json.loads(call(capsys, "verify", *arguments)[1])
        return [entry["witnesses"] for entry in report["depths"]]

    assert witnesses("1") == witnesses("1") != witnesses("2")


def test_verify_fails_when_nothing_had_to_wait(model: str, capsys: Capture) -> None:
    arguments = ("--model", model, "--requests", "6", "--depths", "1")
    status, out, err = call(capsys, "verify", *arguments)
    assert status == 1
    assert "FAILED" in out
    assert "waited for a slot" in err


def test_verify_names_the_log_that_keeps_steps_from_overlapping(
    model: str, capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "megatron_async")  # and back, as the command sets it
    arguments = ("--model", model, "--requests", "12", "--depths", "1")
    logged = ("--inference-logging-step-interval", "1")
    status, _, err = call(capsys, "verify", *arguments, *logged)
    assert status == 1
    assert "depth 1: no token was sampled past" in err
    assert "raise --inference-logging-step-interval, as a logged step is a barrier" in err


def test_verify_fails_when_a_token_differs(
    model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = decode_module.decode

    def faulty(engine: Any, works: Any, **options: Any) -> Any:
        decoded = real(engine, works, **options)
        if engine.depth == 1:
            decoded.requests[3].generated_tokens[1] ^= 1
        return decoded

    monkeypatch.setattr(decode_module, "decode", faulty)
    eight = ("--model", model, "--depths", "1", "--requests", "8")
    status, out, err = call(capsys, "verify", *eight)
    assert status == 1
    assert "FAILED" in out
    assert "depth 1, request 3: from token 1 on" in err
    assert "--batch-invariant" not in err
    arguments = ("--model", model, "--depths", "1", "--dtype", "bfloat16", "--requests", "4")
    assert "--batch-invariant" in call(capsys, "verify", *arguments)[2]
    assert "--batch-invariant" not in call(capsys, "verify", *arguments, "--batch-invariant")[2]


def test_each_witness_is_missed_by_name() -> None:
    seen = Witnesses(finished_early=1, discarded=0, waited=1, crossed_blocks=0, chunked_prefills=1)
    assert len(seen.missing(0)) == 1
    assert len(seen.missing(1)) == 2


def test_verify_runs_the_scenarios_that_are_named(model: str, capsys: Capture) -> None:
    names = ["shared-prefix-evicted", "memory-pressure"]
    arguments = ("--model", model, "--depths", "2", "--scenario", ",".join(names))
    status, out, err = call(capsys, "verify", *arguments, "--json")
    report = json.loads(out)
    assert (status, err) == (0, "")
    assert report["ok"] is True
    assert sorted(scenario["name"] for scenario in report["scenarios"]) == sorted(names)
    for scenario in report["scenarios"]:
        assert [entry["depth"] for entry in scenario["depths"]] == [0, 2]
        for entry in scenario["depths"]:
            assert entry["equal"]
            assert entry["witnesses"]["evict"] > 0
            assert entry["counters"]["evictions"] == entry["witnesses"]["evict"]


def test_verify_shows_a_line_for_each_scenario(model: str, capsys: Capture) -> None:
    arguments = ("--model", model, "--depths", "1", "--scenario", "random,suspend")
    status, out, err = call(capsys, "verify", *arguments, "--requests", "14")
    assert (status, err) == (0, "")
    header, random, suspend, verdict = out.splitlines()
    assert header.split()[:2] == ["scenario", "requests"]
    assert random.split()[:3] == ["random", "14", "0,1"]
    assert suspend.split()[:3] == ["suspend", "4", "0,1"]
    assert "evict 1" in suspend
    assert verdict == "equal at every depth"


def test_scenarios_alone_load_the_model_that_drafts(model: str, capsys: Capture) -> None:
    drafts = ("--num-speculative-tokens", "2", "--draft-model", model)
    arguments = ("--model", model, "--depths", "1", "--scenario", "pause-and-resume", *drafts)
    status, out, err = call(capsys, "verify", *arguments)
    assert (status, err) == (0, "")
    assert out.splitlines()[1].split()[:3] == ["pause-and-resume", "4", "0,1"]


def test_verify_fails_when_a_scenario_does_not_show_its_witness(
    model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DynamicInferenceEngine, "evict_request", lambda self, request_id: True)
    arguments = ("--model", model, "--depths", "1", "--scenario", "evict-and-recompute")
    status, out, err = call(capsys, "verify", *arguments)
    assert status == 1
    assert "FAILED" in out
    for depth in (0, 1):
        assert f"depth {depth}: evict-and-recompute: no request was evicted\n" in err


def test_list_scenarios_needs_no_model(capsys: Capture) -> None:
    status, out, err = call(capsys, "verify", "--list-scenarios", "--model", "/no/such")
    assert (status, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines()]
    assert names == ["random", *(scenario.name for scenario in TABLE)]


def test_an_unknown_scenario_is_named_with_those_there_are(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["verify", "--scenario", "suspend,everythign"])
    assert exit.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "'everythign' is not a scenario" in err
    for name in ("random", "all", *(scenario.name for scenario in TABLE)):
        assert name in err


def test_scenarios_refuse_depths_they_are_not_made_for(capsys: Capture) -> None:
    status, out, err = call(capsys, "verify", "--scenario", "suspend", "--depths", "9")
    assert (status, out) == (2, "")
    assert "--depths 9" in err
    assert "at most 8" in err
    drafts = ("--depths", "5", "--num-speculative-tokens", "4")
    status, out, err = call(capsys, "verify", "--scenario", "suspend", *drafts)
    assert (status, out) == (2, "")
    assert "--depths 5: scenarios are made for at most 20 tokens in flight" in err


def test_prefixes_are_shared_unless_turned_off(model: str, capsys: Capture) -> None:
    prompts = ("--prompt", "def f(x):", "def f(x):y")
    arguments = ("--model", model, *prompts, *SAMPLED, "--inference-dynamic-batching-block-size=4")

    def cached(*more: str) -> int:
        records = generate_json(capsys, *arguments, "--prefill-chunk-tokens", "4", *more)
        return sum(record["counters"]["cached"] for record in records)

    assert cached("--max-requests", "1") == 8
    assert cached("--max-requests", "1", "--no-enable-prefix-caching") == 0


def test_demo_shows_texts_and_that_they_are_equal(model: str, capsys: Capture) -> None:
    status, out, _ = call(capsys, "demo", "--model", model, "--max-new-tokens", "40")
    assert status == 0
    assert "def is_palindrome(text):" in out
    assert "asynchronously depth 1" in out
    assert "Equal: all" in out


def test_demo_without_a_tokenizer_says_what_to_use(
    model: str, tmp_path: Path, capsys: Capture
) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(model) / name, tmp_path)
    status, _, err = call(capsys, "demo", "--model", str(tmp_path))
    assert status == 2 and err.count("\n") == 1
    assert f"--model {tmp_path} has no tokenizer" in err and "use verify" in err


def test_info_names_versions_and_devices(capsys: Capture) -> None:
    assert main(["info", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["megatron-core"] == installed().version
    assert report["megatron_core"] == {
        "version": installed().version,
        "tried": list(TRIED),
        "note": None,
        "model_class": report["megatron_core"]["model_class"],
    }
    assert report["devices"][0].startswith("cpu: ")
    assert set(report["optional"]) == {
        "triton",
        "cuda-bindings",
        "transformer-engine",
        "apex",
        "transformers",
    }


def test_interrupt_ends_without_a_traceback(
    model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = DynamicInferenceEngine.step_modern
    closed = []

    def interrupted(engine: DynamicInferenceEngine) -> dict[str, Any]:
        if engine.counters.steps_launched == 5:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(DynamicInferenceEngine, "step_modern", interrupted)
    close = DynamicInferenceEngine.close
    monkeypatch.setattr(DynamicInferenceEngine, "close", lambda self: closed.append(close(self)))
    status, out, err = call(capsys, "generate", "--model", model, "--prompt", "a", "--depth", "1")
    assert status == 130
    assert out != ""
    assert err == "\nmegatron-async: interrupted\n"
    assert closed == [None]


def test_closed_pipe_is_quiet(model: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = ("generate", "--model", model, "--prompt", "a")
    done = subprocess.run(
        [sys.executable, "-m", "megatron_async", *command],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert done.returncode == 141
    lines = done.stderr.splitlines()
    if torch.version.cuda is not None:  # its torch logs when the machine has no CUDA
        lines = [line for line in lines if "No CUDA runtime is found" not in line]
    assert lines == []


def test_tiny_writes_python_and_logs_its_steps_on_stderr(tmp_path: Path) -> None:
    """From any directory, as a stranger would start it; 'tiny' is the default model."""
    command = ("generate", "--prompt", "class Stack:\n    def __init__(self):")
    options = ("--inference-async-scheduling", "--inference-logging-step-interval", "4")
    done = run_program(*command, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "    " in done.stdout
    assert "self" in done.stdout
    assert "steps overlapped" in done.stderr
    assert "step 4: " in done.stderr
    assert "step 8: " in done.stderr


def test_tiny_verifies_at_every_depth(capsys: Capture) -> None:
    status, out, err = call(capsys, "verify", "--requests", "16")
    assert status == 0, err
    assert "equal at every depth" in out


def test_info_says_which_blocks_of_a_model_are_fused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--model", "tiny"]) == 0
    said = capsys.readouterr().out.split("decode steps of tiny\n")[1]
    assert said.strip()
    assert main(["info", "--model", "tiny", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "off" in report["decode_coverage"]
    plain, drafting = report["kv_cache"]
    assert (plain["mtp_layers"], drafting["mtp_layers"]) == (0, 2)
    assert f"{drafting['token_bytes']:,} bytes a token: {drafting['layers']} layers" in said
    assert plain["layers"] + 2 == drafting["layers"]


def test_info_prints_the_spec_of_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--model", "tiny", "--json"]) == 0
    engine = json.loads(capsys.readouterr().out)["engine"]
    assert engine["sizes"]["max_requests"] == engine["limits"]["max_requests"] == 64
    assert engine["drafting"] == ["nothing", 0, False, False]
    assert engine["layout"] == {"tensor": 1, "pipeline": 1, "expert": 1}
    assert main(["info", "--model", "tiny"]) == 0
    said = f"64 requests of up to {engine['sizes']['max_sequence_length']:,} tokens, "
    assert said in capsys.readouterr().out
