"""Every program in the README and the pages runs unchanged, and prints the text that follows it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import vllm_features
from tests.generated_tables import PAGES as GENERATED
from tests.generated_tables import TABLES, tables_in, with_tables, without_tables
from tests.programs import ROOT, printed_by

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_WORDS = {"README.md": 1400, "docs": 27_300}
_PROGRAM = re.compile(
    r"^```python\n(.*?)^```\n\nIt prints(?: `([^`]+)`|\n\n((?:    [^\n]*\n)+))", re.MULTILINE | re.DOTALL
)


_LINK = re.compile(r"\]\((?!\w+:)([^)#]+)(?:#[^)]*)?\)|srcset=\"([^\"]+)\"|src=\"([^\"]+)\"")


class Program(NamedTuple):
    code: str
    printed: list[str]


def programs() -> dict[str, Program]:
    found: dict[str, Program] = {}
    for page in PAGES:
        for number, (code, line, lines) in enumerate(_PROGRAM.findall(page.read_text()), 1):
            found[f"{page.relative_to(ROOT)}-{number}"] = Program(code, (line or lines).split())
    return found


PROGRAMS = programs()


def test_every_program_says_what_it_prints() -> None:
    blocks = sum(page.read_text().count("```python\n") for page in PAGES)
    assert blocks == len(PROGRAMS) > 6


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_and_prints_what_the_page_says(name: str, tmp_path: Path) -> None:
    assert printed_by(PROGRAMS[name].code, tmp_path).split() == PROGRAMS[name].printed


def test_the_readmes_programs_are_short() -> None:
    lines = [len(program.code.splitlines()) for name, program in PROGRAMS.items() if name.startswith("README")]
    assert len(lines) == 2
    assert max(lines) <= 40


def words(*pages: Path) -> int:
    """Counts words like `wc -w`, including programs and table bars, but not tables that are generated from the code."""
    return sum(len(without_tables(page.read_text()).split()) for page in pages)


def test_the_pages_are_as_short_as_they_may_be() -> None:
    assert words(PAGES[0]) <= MOST_WORDS["README.md"]
    assert words(*PAGES[1:]) <= MOST_WORDS["docs"]


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.name)
def test_the_tables_of_a_page_are_those_of_the_code(page: Path) -> None:
    written = page.read_text()
    assert with_tables(written) == written, "the code has changed: run `python -m tests.generated_tables`"


def test_every_feature_of_vllm_names_tests_that_exist() -> None:
    assert not vllm_features.missing()


def test_every_table_is_on_a_page_and_is_counted_by_no_limit() -> None:
    found = [name for page in PAGES for name in tables_in(page.read_text())]
    assert sorted(found) == sorted(TABLES)
    for page in GENERATED:
        assert page in PAGES
        lines = [line for name in tables_in(page.read_text()) for line in TABLES[name]().splitlines()]
        assert len(lines) > 10
        assert "<!-- generated" not in without_tables(page.read_text())
        assert not [line for line in lines if line.startswith("| `") and line in without_tables(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_to_a_file(page: Path) -> None:
    """The site's build checks only links between its pages.

    This test also checks the README and links to other files.
    """
    links: list[tuple[str, str, str]] = re.findall(_LINK, page.read_text())
    for link in links:
        target: str = link[0] or link[1] or link[2]
        assert (page.parent / target).exists(), target


def test_every_make_target_has_its_help_line() -> None:
    done = subprocess.run(["make", "help"], capture_output=True, text=True, cwd=ROOT, check=True)
    listed = {line.split()[1] for line in done.stdout.splitlines()}
    assert {"help", "demo", "docs", "test", "check", "lint", "types", "bench", "clean"} <= listed
    for target in re.findall(r"^    make ([a-z-]+)", PAGES[0].read_text(), re.MULTILINE):
        assert target in listed
