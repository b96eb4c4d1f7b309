"""The code in guide.md runs, and the benchmark says what it needs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from megatron_async.contrib import transformers as contrib
from megatron_async.contrib.transformers.benchmarks import bench, plot, rows

FOLDER = Path(contrib.__file__).parent


def test_the_code_of_the_page_runs_in_order() -> None:
    page = (FOLDER / "guide.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "guide.md", "exec"), names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_reports_nothing_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="needs a GPU"):
        bench.main(["random:gpt2"])
    assert not capsys.readouterr().out


def test_a_row_keeps_what_it_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "row.json"
    trial = ["--device", "cpu", "--tiny", "--dtype", "float32", "--tokens", "4", "--runs", "1"]
    for name in ("gpt2-captured", "stop-checks"):
        assert bench.main([*trial, "--row", name, "--json", str(file)]) == 0
        found = json.loads(file.read_text())
        assert found["row"] == name and {"stock", "ours"} <= found.keys()
        assert found["most"] == rows.ROWS[name].most(found["stock"])
        assert found["holds"] == (found["ours"] <= found["most"])
        assert capsys.readouterr().out == f"{rows.line_of(found)}\n"


def test_the_table_goes_on_after_a_row_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """if 1:
        import json, pathlib, sys
        name, file = sys.argv[sys.argv.index("--row") + 1], sys.argv[sys.argv.index("--json") + 1]
        pathlib.Path(file).write_text(json.dumps({"row": name, "unit": "u", "stock": 2.0}))
        if name == "gpt2-captured": sys.exit("no memory\\nis left")
    """
    script = tmp_path / "script.py"
    script.write_text(program)
    monkeypatch.setattr(bench, "__file__", str(script))
    file = tmp_path / "table.json"
    names = ["gpt2-stopping", "gpt2-captured", "llama8b-batch"]
    arguments = ["--table", "--device", "cpu", "--budget", "600", "--json", str(file)]
    assert bench.main([*arguments, "--rows", *names]) == 1
    found = json.loads(file.read_text())["rows"]
    assert [row["row"] for row in found] == names
    assert all(row["stock"] == 2.0 for row in found)
    errors = [row.get("error") for row in found]
    assert errors == [None, "status 1: is left", None]
    assert capsys.readouterr().out.count("FAILED") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py", "table.json"]
    endless = [sys.executable, "-c", "import time; time.sleep(3600)"]
    assert rows.run_child(endless, 0.01) == "its 0.01 seconds are over"
    assert rows.share([(0, 4), (2, 6), (8, 10)]) == 0.8
    assert len(rows.ROWS) == 5


def test_the_sweep_prepares_all_and_times_each_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """if 1:
        import json, pathlib, sys
        given = sys.argv[1:]
        named = lambda name: given[given.index(name) + 1]
        with (pathlib.Path(__file__).parent / "calls").open("a") as calls:
            print(json.dumps("--json" in given), file=calls)
        model = next(word for word in given if word.startswith("random:"))
        if "--json" in given:
            row = {"model": model, "batch": int(named("--batch"))}
            found = {"baseline": 4.0, "all": 2.0}.items()
            rows = [row | {"variant": v, "ms_per_token": t} for v, t in found]
            pathlib.Path(named("--json")).write_text(json.dumps(rows))
        if "llama" in model and named("--batch") == "2": sys.exit("no memory")
    """
    script, file = tmp_path / "script.py", tmp_path / "sweep.json"
    script.write_text(program)
    monkeypatch.setattr(bench, "__file__", str(script))
    arguments = ["--sweep", "--tiny", "--device", "cpu", "--batch", "1", "2", "--json", str(file)]
    assert bench.main([*arguments, "--jobs", "2"]) == 1
    found = json.loads(file.read_text())
    assert len(found) == 4 * 2 + 1 and [row.get("error") for row in found].count(None) == 8
    said = capsys.readouterr().out
    assert said.count("2.00 times with all") == 4 and "was not prepared: status 1" in said
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == [False] * 4 + [True] * 4


def test_figures_are_plotted_and_those_of_a_cpu_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, variants, image = (tmp_path / name for name in ("t.json", "v.json", "out.png"))
    row = {"row": "gpt2-captured", "unit": "ms/token", "stock": 1.2, "ours": 0.5, "most": 0.6}
    table.write_text(json.dumps({"rows": [row | {"device": "H"}, {"row": "x", "error": "no"}]}))
    of_one = {"model": "random:gpt2", "batch": 1, "device": "H"}
    each = [
        of_one | {"variant": "baseline", "ms_per_token": 4.0},
        of_one | {"variant": "captured", "ms_per_token": 0.5},
        of_one | {"variant": "all", "error": "no"},
    ]
    variants.write_text(json.dumps(each))
    first, second = plot.panels_of({"rows": [row]}) + plot.panels_of(each)
    assert first.limit == 0.6 and [bar[1] for bar in first.bars] == [1.2, 0.5]
    assert [bar[0] for bar in second.bars] == ["baseline", "captured"]
    assert second.bars[0][2] != second.bars[1][2]
    pytest.importorskip("matplotlib")
    assert plot.main([str(table), str(variants), "-o", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    table.write_text(json.dumps({"rows": [row | {"device": "cpu"}]}))
    assert plot.main([str(table), "-o", str(tmp_path / "no.png")]) == 2
    table.write_text(json.dumps({"rows": []}))
    assert plot.main([str(table), "-o", str(tmp_path / "no.png")]) == 2
    assert capsys.readouterr().err.count("plot: ") == 2
