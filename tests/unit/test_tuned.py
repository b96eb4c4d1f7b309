"""Tilings that were found on this machine: kept, read, and used before all others."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_async.errors import ConfigError
from megatron_async.inference.cli.main import main
from megatron_async.kernels.gemm import tuned
from megatron_async.kernels.gemm.measured_tilings import choose
from megatron_async.kernels.gemm.tilings import ADD, NO_NORM, RMS_NORM, STORE, Tiling
from megatron_async.kernels.gemm.tuned import Case
from megatron_async.models.fused.decoder import Product

CASE = Case(8, 6144, 4096, RMS_NORM, STORE)
TILING = Tiling(3, 1, 4, 1, 3)
BOX = Tiling(6, 1, 1, 2, 10, stream=True, box=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_kept_is_there_again_beside_what_was_there(folder: Path) -> None:
    assert tuned.load("GPU") == {}
    other = Case(1, 6144, 4096, NO_NORM, ADD)
    assert tuned.save("GPU", {CASE: TILING}) == folder / tuned.FILE
    tuned.save("another GPU", {CASE: BOX})
    tuned.save("GPU", {other: TILING})
    assert tuned.load("GPU") == {CASE: TILING, other: TILING}
    assert tuned.load("another GPU") == {CASE: BOX}
    tuned.save("GPU", {CASE: BOX})
    assert tuned.load("GPU") == {CASE: BOX, other: TILING}
    assert [path.name for path in folder.iterdir()] == [tuned.FILE]


def entry(**fields: object) -> dict[str, object]:
    return {"case": CASE._asdict(), "tiling": {**TILING._asdict(), **fields}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        json.dumps({"GPU": 3}),
        json.dumps({"GPU": [{"case": CASE._asdict()}]}),
        json.dumps({"GPU": [3]}),
        json.dumps({"GPU": [entry(colour="red")]}),
        json.dumps({"GPU": [entry(stages="3")]}),
        json.dumps({"GPU": [entry(row_tiles=0)]}),
        json.dumps({"GPU": [entry(splits=-1)]}),
        json.dumps({"GPU": [entry(box=1)]}),
    ],
)
def test_a_file_that_is_damaged_is_named_and_not_used(
    text: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    (folder / tuned.FILE).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert tuned.load("GPU") == tuned.load("GPU") == {}
    (said,) = caplog.messages
    assert str(folder / tuned.FILE) in said and "megatron-async tune" in said
    tuned.save("GPU", {CASE: TILING})
    assert tuned.load("GPU") == {CASE: TILING}


def test_what_is_sound_in_a_damaged_file_is_used_and_stays(folder: Path) -> None:
    folder.mkdir()
    sound = {"case": CASE._replace(rows=4)._asdict(), "tiling": TILING._asdict()}
    text = json.dumps({"GPU": [entry(stages="3"), sound], "another": "x"})
    (folder / tuned.FILE).write_text(text)
    assert tuned.load("GPU") == {CASE._replace(rows=4): TILING}
    tuned.save("GPU", {CASE: BOX})
    assert tuned.load("GPU") == {CASE._replace(rows=4): TILING, CASE: BOX}
    assert json.loads((folder / tuned.FILE).read_text())["another"] == "x"


@pytest.mark.parametrize(
    "fields",
    [
        {"row_tiles": 10**9 + 7, "splits": 2},
        {"warps_n": 10**9 + 7, "splits": 2},
        {"splits": 16},
        {"stages": 99},
    ],
)
def test_a_tiling_that_no_kernel_has_is_left_out_at_once(
    fields: dict[str, int], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    (folder / tuned.FILE).write_text(json.dumps({"GPU": [entry(**fields)]}))
    with caplog.at_level(logging.WARNING):
        assert tuned.load("GPU") == {}
    assert "no kernel can be built so" in caplog.text


def test_what_another_process_finds_is_seen(folder: Path) -> None:
    assert tuned.load("GPU") == {}
    folder.mkdir()
    (folder / tuned.FILE).write_text(json.dumps({"GPU": [entry()]}))
    assert tuned.load("GPU") == {CASE: TILING}
    (folder / tuned.FILE).unlink()
    assert tuned.load("GPU") == {}


def test_the_file_can_be_read_by_all_whom_the_folder_lets_in(folder: Path) -> None:
    mask = os.umask(0o022)
    try:
        path = tuned.save("GPU", {CASE: TILING})
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_tiling_that_cannot_be_built_any_more_is_left_out(folder: Path) -> None:
    folder.mkdir()
    entries = [entry(), entry(stages=99)]
    entries[0]["case"] = {**CASE._asdict(), "rows": 4}
    (folder / tuned.FILE).write_text(json.dumps({"GPU": entries}))
    assert tuned.load("GPU") == {CASE._replace(rows=4): TILING}


def test_a_cache_that_cannot_be_written_to_is_a_clear_error(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="MEGATRON_ASYNC_CACHE"):
        tuned.save("GPU", {CASE: TILING})


def test_a_product_takes_what_was_found_before_what_is_known() -> None:
    product = Product(6144, 4096, RMS_NORM, STORE, found={CASE: TILING})
    assert product.case(8) == CASE and product.tiling(8) == TILING
    assert product.tiling(4) == choose(6144, 4096, 4, RMS_NORM, STORE)
    fixed = Product(6144, 4096, RMS_NORM, STORE, BOX, found={CASE: TILING})
    assert fixed.tiling(8) == BOX
    without_boxes = Product(6144, 4096, RMS_NORM, STORE, boxes=False, found={CASE: BOX})
    tiling = without_boxes.tiling(8)
    assert tiling is not None and not tiling.box


def test_info_says_what_was_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    properties = SimpleNamespace(name="GPU", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)

    def line() -> str:
        assert main(["info", "--json"]) == 0
        return str(json.loads(capsys.readouterr().out)["devices"][1])

    assert line() == "cuda:0: GPU, 80 GiB"
    path = tuned.save("GPU", {CASE: TILING})
    assert line() == f"cuda:0: GPU, 80 GiB; products cut as 'tune' found: 1, in {path}"
