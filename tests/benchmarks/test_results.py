from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import figures, pull, readme, results
from benchmarks.frame import HEADER, header
from benchmarks.measured import ROOT, changed, code_of, digest

NAMES = sorted(path.stem for path in results.RESULTS.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_result_says_how_it_was_made_and_is_as_new_as_what_it_measures(name: str) -> None:
    faults = results.faults(results.load(name))
    excused = results.excused()
    assert bool(faults) == (name in excused), f"{name}: {faults}; make figures makes it again"
    assert excused.get(name, "a reason"), "an excuse gives its reason"


def test_nothing_is_excused_that_is_not_there() -> None:
    assert set(results.excused()) <= set(NAMES)


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
    whole = {**found, "uncommitted": [], "measures": {"benchmarks/pools.py": digest(ROOT / "benchmarks/pools.py")}}
    assert tuple(whole) == HEADER
    assert results.faults(whole) == []
    for key in HEADER:
        assert results.faults({name: value for name, value in whole.items() if name != key}), key
    for part, keys in (("machine", ("cpu", "cores", "sha_extensions")), ("versions", ("python", "torch", "nixl"))):
        for key in keys:
            less = {name: value for name, value in whole[part].items() if name != key}
            assert results.faults({**whole, part: less}) == [f"its header has no {part}.{key}"]
    assert results.faults({**whole, "uncommitted": [" M kvcache/pool/pages.py"]})
    assert results.faults({**whole, "measures": {"benchmarks/pools.py": "0" * 16}}) == [
        "benchmarks/pools.py has changed since"
    ]
    assert results.faults({**whole, "measures": {}})


def test_what_is_made_again_is_excused_no_longer(tmp_path: Path) -> None:
    measures = {"benchmarks/pools.py": digest(ROOT / "benchmarks/pools.py")}
    whole = {**header("a command"), "uncommitted": [], "measures": measures}
    (tmp_path / "new.json").write_text(json.dumps(whole))
    (tmp_path / "old.json").write_text(json.dumps({**whole, "measures": {"benchmarks/pools.py": "0" * 16}}))
    results.write_excuses({"new": "a reason", "old": 'another "reason"'}, tmp_path)
    results.remade(["new", "old"], tmp_path)
    assert results.excused(tmp_path) == {"old": 'another "reason"'}


def test_the_readmes_tables_are_what_the_results_say() -> None:
    text = readme.README.read_text()
    assert readme.rendered(text) == text, "python -m benchmarks.readme writes them anew"
    assert set(re.findall(r"<!-- figures: (\w+) -->", text)) == set(readme.TABLES)


def test_every_table_says_minimum_or_median_machine_and_commit() -> None:
    for make in readme.TABLES.values():
        text = "\n".join(make())
        assert re.search(r"[Mm]inim|median", text)
        assert "commit " in text
        assert "cores" in text
        assert "python -m benchmarks" in text


def test_a_changed_result_changes_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    text = readme.README.read_text()
    found = results.load("recommend")
    given = {**found, "rows": [{**row, "us_min": 12_345.0} for row in found["rows"]]}
    monkeypatch.setattr(readme, "load", lambda name: given if name == "recommend" else results.load(name))
    assert "12,345" in readme.rendered(text)
    given.clear()
    assert "choose among 8 replicas" not in readme.rendered(text)
