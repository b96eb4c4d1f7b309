"""The documents say what the code is."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import pytest

from megatron_async.engine.stepping.loop import DecodeLoop

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_async"
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((PACKAGE / "contrib").rglob("*.md")),
)
BESIDE = (
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *ROOT.glob("deploy/*.md"),
)
"""Pages that the index need not name."""
DESIGN = (ROOT / "docs" / "design.md").read_text()
INTERNALS = {p.stem: p.read_text() for p in (ROOT / "docs" / "internals").glob("*.md")}
DETAILED = "\n".join((DESIGN, *INTERNALS.values()))


def test_design_shows_the_loop_as_it_is() -> None:
    (shown,) = re.findall(r"^```python\n(.*?)^```$", DESIGN, re.MULTILINE | re.DOTALL)
    assert shown == textwrap.dedent(inspect.getsource(DecodeLoop.step))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as they are linked to."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", (*PAGES, *BESIDE), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", (*PAGES, *BESIDE), ids=lambda page: page.name)
def test_lines_are_wrapped(page: Path) -> None:
    if page.name.startswith("performance"):
        pytest.skip("it is a record of measurements, which is left as it was written")
    lines = [line for line in page.read_text().splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 100] == []


def test_the_three_pages_of_performance_link_to_each_other() -> None:
    names = {"benchmarking.md", "performance.md", "performance-log.md"}
    for name in names:
        links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "docs" / name).read_text())
        assert names - {name} <= set(links), name


def test_files_that_design_names_exist() -> None:
    named = set(re.findall(r"`([\w./]+/[\w.]*)`", DETAILED))
    assert len(named) > 100
    assert [n for n in named if not ((ROOT / n).exists() or (PACKAGE / n).exists())] == []


@pytest.mark.parametrize("page", [DESIGN, INTERNALS["modules"]], ids=["design", "modules"])
def test_table_of_modules_is_that_of_the_package(page: str) -> None:
    (table,) = re.findall(r"^\| module \| what it owns \|\n(.*?)\n(?:\n|\Z)", page, re.M | re.S)
    folders: set[str] = set()
    for line in table.splitlines()[1:]:
        _, names, owns, _ = line.split("|")
        found = re.findall(r"`(\w+)/`", names)
        folders.update(found)
        if len(found) == 1:
            named = set(re.findall(r"`(\w+)`", owns)) - {"verify", "bench", "trace", "tune"}
            assert named <= {path.stem for path in (PACKAGE / found[0]).rglob("*.py")}
    assert folders == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def test_classes_that_design_names_exist() -> None:
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    named = set(re.findall(r"`([A-Z]\w*[a-z]\w*)[`.]", DETAILED)) - {"CUDAGraph"}
    assert len(named) > 10
    assert [name for name in named if f"class {name}" not in source] == []


@pytest.mark.parametrize(("page", "most"), [("README.md", 130), ("docs/design.md", 350)])
def test_pages_that_people_read_first_are_short(page: str, most: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= most


def test_map_of_the_design_has_short_cells() -> None:
    cells = DESIGN.split("## Map\n")[1].split("\nArrows ")[0].splitlines()
    assert len(cells) > 20 and [cell for cell in cells if len(cell) > 110] == []


def test_index_links_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    links = re.findall(r"\]\(([^)#]+)\)", index.read_text())
    linked = {(index.parent / link).resolve() for link in links}
    assert [page.name for page in PAGES if page not in linked | {index}] == []


def test_figures_of_the_front_page_are_those_of_performance() -> None:
    """Each row: floor, this engine, share of the floor, and the others, as in the targets' row."""
    front, measured = (page.read_text() for page in (PAGES[0], ROOT / "docs" / "performance.md"))
    rows = re.findall(r"^\| ([\w.-]+) \| (\d+) \| (.*) \|$", front, re.MULTILINE)
    assert len(rows) >= 4
    for shape, batch, cells in rows:
        line = measured[measured.index(f"| {shape} | {batch} | ") :].split("\n", 1)[0]
        floor, _, _, _, depth1, _, _, share, _ = line.split(" | ")[2:]
        others = dict(re.findall(r"([\w-]+) ([\d.]+)", line.split(" | ")[3]))
        expected = [floor, f"**{depth1}**", share]
        expected += [others.get(name, "not measured") for name in ("vLLM", "Megatron-core")]
        assert cells.split(" | ") == expected
