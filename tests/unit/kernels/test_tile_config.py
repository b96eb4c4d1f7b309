"""Tile configs that were tuned on this machine: kept, read, and used before all others."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_async.cli.main import main
from megatron_async.errors import ConfigError
from megatron_async.kernels.gemm import tile_config
from megatron_async.kernels.gemm.tile_choice import choose
from megatron_async.kernels.gemm.tile_config import (
    ADD,
    FORMER_USER_FILE,
    NO_NORM,
    RMS_NORM,
    STORE,
    TUNED,
    USER_FILE,
    Entry,
    GemmProblem,
    TileConfig,
    load_tuned,
    user_file,
)
from megatron_async.models.fused.blocks.gemms import Gemm

PROBLEM = GemmProblem(8, 6144, 4096, RMS_NORM, STORE)
CONFIG = TileConfig(3, 1, 4, 1, 3)
WITH_TMA = TileConfig(6, 1, 1, 2, 10, stream_x=True, tma=True)
OF_MANY_ROWS = TileConfig(6, 1, 1, 2, 5, stream_x=True, tma=True, multicast=2)


def save(gpu: str, found: dict[GemmProblem, TileConfig]) -> Path:
    return tile_config.save_tuned(gpu, [Entry(*item, TUNED) for item in found.items()])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRON_ASYNC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_kept_is_there_again_beside_what_was_there(folder: Path) -> None:
    assert load_tuned("GPU") == {}
    other = GemmProblem(1, 6144, 4096, NO_NORM, ADD)
    assert save("GPU", {PROBLEM: CONFIG}) == folder / USER_FILE
    save("another GPU", {PROBLEM: WITH_TMA})
    save("GPU", {other: CONFIG})
    assert load_tuned("GPU") == {PROBLEM: CONFIG, other: CONFIG}
    assert load_tuned("another GPU") == {PROBLEM: WITH_TMA}
    save("GPU", {PROBLEM: WITH_TMA})
    assert load_tuned("GPU") == {PROBLEM: WITH_TMA, other: CONFIG}
    assert [path.name for path in folder.iterdir()] == [USER_FILE]


def entry(**fields: object) -> dict[str, object]:
    """A line of the table, with these fields in place of others."""
    return {**json.loads(Entry(PROBLEM, CONFIG, TUNED).to_json()), **fields}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[" * 100_000,
        json.dumps({"GPU": 3}),
        json.dumps({"GPU": [{"rows": 8, "n": 6144, "k": 4096, "source": "tuned"}]}),
        json.dumps({"GPU": [3]}),
        json.dumps({"GPU": [entry(colour="red")]}),
        json.dumps({"GPU": [entry(stages="3")]}),
        json.dumps({"GPU": [entry(row_tiles=0)]}),
        json.dumps({"GPU": [entry(split_k=-1)]}),
        json.dumps({"GPU": [entry(tma=1)]}),
        json.dumps({"GPU": [entry(rows=65)]}),
        json.dumps({"GPU": [entry(rows=129)]}),
        json.dumps({"GPU": [entry(multicast=True)]}),
        json.dumps({"GPU": [entry(multicast="2")]}),
        json.dumps({"GPU": [entry(multicast=-1)]}),
        json.dumps({"GPU": [entry(norm="batch_norm")]}),
        json.dumps({"GPU": [entry(epilogue=0)]}),
        json.dumps({"GPU": [entry(source="guessed")]}),
    ],
)
def test_a_file_that_is_damaged_is_named_and_not_used(
    text: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    (folder / USER_FILE).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_tuned("GPU") == load_tuned("GPU") == {}
    (said,) = caplog.messages
    assert str(folder / USER_FILE) in said and "megatron-async tune" in said
    save("GPU", {PROBLEM: CONFIG})
    assert load_tuned("GPU") == {PROBLEM: CONFIG}


def test_what_is_sound_in_a_damaged_file_is_used_and_stays(folder: Path) -> None:
    folder.mkdir()
    sound = entry(rows=4)
    text = json.dumps({"GPU": [entry(stages="3"), sound], "another": "x"})
    (folder / USER_FILE).write_text(text)
    assert load_tuned("GPU") == {PROBLEM._replace(rows=4): CONFIG}
    save("GPU", {PROBLEM: WITH_TMA})
    assert load_tuned("GPU") == {PROBLEM._replace(rows=4): CONFIG, PROBLEM: WITH_TMA}
    assert json.loads((folder / USER_FILE).read_text())["another"] == "x"


def test_a_config_of_many_rows_is_kept(folder: Path) -> None:
    problem = PROBLEM._replace(rows=128)
    save("GPU", {PROBLEM: CONFIG, problem: OF_MANY_ROWS})
    assert load_tuned("GPU") == {PROBLEM: CONFIG, problem: OF_MANY_ROWS}
    assert '"multicast": 2' in (folder / USER_FILE).read_text()


@pytest.mark.parametrize(
    "fields",
    [
        {"rows": 128},
        {"rows": 96, **OF_MANY_ROWS._asdict()},
        *(
            {"rows": 128, **OF_MANY_ROWS._replace(**wrong)._asdict()}
            for wrong in (
                {"multicast": 0},
                {"multicast": 3},
                {"multicast": 8},
                {"multicast": 10**9 + 7},
                {"stages": 1},
                {"row_tiles": 17},
                {"row_tiles": 10**9 + 7},
                {"warps_n": 2},
                {"warps_k": 2},
                {"split_k": 5},
                {"tma": False},
                {"stream_x": False},
                {"persistent": True},
            )
        ),
        {"row_tiles": 10**9 + 7, "split_k": 2},
        {"warps_n": 10**9 + 7, "split_k": 2},
        {"split_k": 16},
        {"stages": 99},
    ],
)
def test_a_config_that_no_kernel_has_is_left_out_at_once(
    fields: dict[str, int], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    (folder / USER_FILE).write_text(json.dumps({"GPU": [entry(**fields)]}))
    with caplog.at_level(logging.WARNING):
        assert load_tuned("GPU") == {}
    assert "no kernel can be built so" in caplog.text


def test_what_another_process_finds_is_seen(folder: Path) -> None:
    assert load_tuned("GPU") == {}
    folder.mkdir()
    (folder / USER_FILE).write_text(json.dumps({"GPU": [entry()]}))
    assert load_tuned("GPU") == {PROBLEM: CONFIG}
    (folder / USER_FILE).unlink()
    assert load_tuned("GPU") == {}


def test_the_file_can_be_read_by_all_whom_the_folder_lets_in(folder: Path) -> None:
    mask = os.umask(0o022)
    try:
        path = save("GPU", {PROBLEM: CONFIG})
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_config_that_cannot_be_built_any_more_is_left_out(folder: Path) -> None:
    folder.mkdir()
    entries = [entry(rows=4), entry(stages=99)]
    (folder / USER_FILE).write_text(json.dumps({"GPU": entries}))
    assert load_tuned("GPU") == {PROBLEM._replace(rows=4): CONFIG}


def test_a_cache_that_cannot_be_written_to_is_a_clear_error(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="MEGATRON_ASYNC_CACHE"):
        save("GPU", {PROBLEM: CONFIG})


def test_formats_of_weights_have_entries_of_their_own(folder: Path) -> None:
    e4m3, by_row = (PROBLEM._replace(scale_columns=columns) for columns in (128, PROBLEM.k))
    other = CONFIG._replace(stages=2)
    save("GPU", {PROBLEM: CONFIG, e4m3: other})
    assert load_tuned("GPU") == {PROBLEM: CONFIG, e4m3: other}
    lines = json.loads((folder / USER_FILE).read_text())["GPU"]
    assert [line.get("scale_columns") for line in lines] == [None, 128]
    found = load_tuned("GPU")
    assert tile_config.lookup(found, e4m3) == other and tile_config.lookup(found, by_row) is None
    all_norms = {
        problem._replace(norm=None, epilogue=None): CONFIG for problem in (PROBLEM, by_row)
    }
    assert tile_config.lookup(all_norms, by_row) == CONFIG
    assert tile_config.lookup(all_norms, e4m3) is None
    product = Gemm(
        6144, 4096, RMS_NORM, STORE, found={PROBLEM: CONFIG}, sm_count=132, scale_columns=128
    )
    chosen = choose(6144, 4096, 8, RMS_NORM, STORE, sm_count=132, scale_columns=128)
    assert product.case(8) == e4m3 and product.tiling(8) == chosen != CONFIG


@pytest.mark.parametrize("columns", [16, 100, -64, 64.0, "64", True])
def test_scales_that_no_kernel_has_are_no_entry(columns: object) -> None:
    line = json.loads(Entry(PROBLEM._replace(scale_columns=64), CONFIG, TUNED).to_json())
    assert Entry.from_json(line).problem.scale_columns == 64
    with pytest.raises((ValueError, TypeError)):
        Entry.from_json({**line, "scale_columns": columns})


def test_a_product_takes_what_was_tuned_before_what_is_known() -> None:
    product = Gemm(6144, 4096, RMS_NORM, STORE, found={PROBLEM: CONFIG}, sm_count=132)
    assert product.case(8) == PROBLEM and product.tiling(8) == CONFIG
    assert product.tiling(4) == choose(6144, 4096, 4, RMS_NORM, STORE, sm_count=132)
    fixed = Gemm(6144, 4096, RMS_NORM, STORE, WITH_TMA, found={PROBLEM: CONFIG}, sm_count=132)
    assert fixed.tiling(8) == WITH_TMA
    without_tma = Gemm(
        6144, 4096, RMS_NORM, STORE, tma=False, found={PROBLEM: WITH_TMA}, sm_count=132
    )
    tiling = without_tma.tiling(8)
    assert tiling is not None and not tiling.tma


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
    path = save("GPU", {PROBLEM: CONFIG})
    assert line() == f"cuda:0: GPU, 80 GiB; tile configs found by 'tune': 1, in {path}"


def test_entries_without_norm_or_epilogue_hold_for_all(folder: Path) -> None:
    folder.mkdir()
    line = entry()
    del line["norm"], line["epilogue"]
    (folder / USER_FILE).write_text(json.dumps({"GPU": [line]}))
    assert load_tuned("GPU") == {GemmProblem(8, 6144, 4096): CONFIG}


def test_a_file_of_an_earlier_version_is_named_once_and_stays(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    (folder / FORMER_USER_FILE).write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert load_tuned("GPU") == load_tuned("another GPU") == {}
    (said,) = caplog.messages
    assert FORMER_USER_FILE in said and "megatron-async tune" in said
    save("GPU", {PROBLEM: CONFIG})
    assert load_tuned("GPU") == {PROBLEM: CONFIG} and user_file().name == USER_FILE
    assert len(caplog.messages) == 1 and (folder / FORMER_USER_FILE).is_file()
