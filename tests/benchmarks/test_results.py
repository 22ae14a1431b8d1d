# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures, pull, readme, results
from benchmarks.frame import HEADER, header
from benchmarks.measured import ROOT, changed, code_of, digest

RESULTS = ROOT / "docs" / "results.md"
NAMES = sorted(path.stem for path in results.RESULTS.glob("*.json"))


def test_every_result_says_how_it_was_made() -> None:
    lacking = {name: faults for name in NAMES if (faults := results.faults(results.load(name)))}
    assert lacking == {}


def test_make_figures_makes_every_result() -> None:
    assert sorted(name for step in figures.STEPS for name in step.made) == NAMES
    assert sum(step.seconds for step in figures.STEPS if step.group in ("manager", "pull")) < 20 * 60


def test_comments_and_docstrings_make_no_result_old(tmp_path: Path) -> None:
    text = '"""What."""\n\n# why\ndef f(a):\n    """Doc\n    string."""\n    return a  # here\n'
    assert code_of(text) == "def f(a):\n    return a"
    file = tmp_path / "package" / "one.py"
    file.parent.mkdir()
    file.write_text(text)
    measures = {"package": digest(file.parent), "package/one.py": digest(file)}
    file.write_text(text.replace("# why", "# why else").replace("What.", "What else."))
    assert changed(measures, tmp_path) == []
    file.write_text(text.replace("return a ", "return -a "))
    assert changed(measures, tmp_path) == ["package", "package/one.py"]
    file.rename(tmp_path / "package" / "two.py")
    assert changed(measures, tmp_path) == ["package", "package/one.py"]


def test_a_header_with_a_part_missing_is_noticed() -> None:
    found = header("a command")
    assert found["measures"].keys() >= {"kvcache", "benchmarks/pulls", f"benchmarks/{Path(pull.__file__).name}"}
    whole: dict[str, Any] = {
        **found,
        "uncommitted": [],
        "measures": {"benchmarks/pools.py": digest(ROOT / "benchmarks/pools.py")},
    }
    assert tuple(whole) == HEADER
    assert results.faults(whole) == []
    for key in HEADER:
        assert results.faults({name: value for name, value in whole.items() if name != key}), key
    for part, keys in (("machine", ("cpu", "cores", "sha_extensions")), ("versions", ("python", "torch", "nixl"))):
        for key in keys:
            less = {name: value for name, value in whole[part].items() if name != key}
            assert results.faults({**whole, part: less}) == [f"its header has no {part}.{key}"]
    assert results.faults({**whole, "measures": {}})
    assert results.changed_since(whole) == []
    assert results.changed_since({**whole, "uncommitted": [" M kvcache/pool/pages.py"]}) == [results.UNKNOWN]
    assert results.changed_since({"rows": []}) == [results.UNKNOWN]
    other = {**whole["measures"], "kvcache": "0" * 16}
    assert results.changed_since({**whole, "measures": other}) == ["kvcache"]


def test_a_result_older_than_the_code_is_marked_on_the_page_and_makes_no_test_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = RESULTS.read_text()

    def marked(measures: dict[str, str]) -> str:
        monkeypatch.setattr(
            readme, "load", lambda name: {**results.load(name), "uncommitted": [], "measures": measures}
        )
        return readme.rendered(text)

    new = marked({"benchmarks/pools.py": digest(ROOT / "benchmarks/pools.py")})
    old = marked({"kvcache": "0" * 16, "transfer": "1" * 16})
    assert readme.without_marks(new) == new
    assert old.count("The code has changed since.") > 3
    assert readme.without_marks(old) == new == readme.without_marks(text)


def test_the_tables_of_the_pages_are_what_the_results_say() -> None:
    text = "".join(page.read_text() for page in readme.PAGES)
    made = readme.without_marks(readme.rendered(text))
    assert made == readme.without_marks(text), "run `python -m benchmarks.readme` to write the tables again"
    assert sorted(re.findall(r"<!-- figures: (\w+) -->", text)) == sorted(readme.TABLES)


def test_the_readme_has_six_figures_beside_another_program_and_says_what_else_is_true() -> None:
    rows = readme.six_figures()[2:]
    assert len(rows) == 6
    figure = r"[\d,.]+ (?:µs|ms|bytes)"
    for row in rows:
        assert re.fullmatch(rf"\| [^|]+ \| {figure} \| {figure}, [^|]+ \| [^|]+ \|", row), row


def test_every_table_says_minimum_or_median_machine_and_commit() -> None:
    for name, make in readme.TABLES.items():
        if name == "six":
            continue
        text = "\n".join(make())
        assert re.search(r"[Mm]inim|median", text) or name == "answers", "answers are counted"
        assert "commit " in text
        assert "cores" in text
        assert "(R)" not in text
        assert "python -m benchmarks" in text


def test_a_changed_result_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    text = RESULTS.read_text()
    found = results.load("recommend")
    given = {**found, "rows": [{**row, "us_min": 12_345.0} for row in found["rows"]]}
    monkeypatch.setattr(readme, "load", lambda name: given if name == "recommend" else results.load(name))
    assert "12,345" in readme.rendered(text)
    given.clear()
    assert "choose among 8 replicas" not in readme.rendered(text)
