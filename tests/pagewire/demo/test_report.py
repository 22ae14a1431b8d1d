import sys
from typing import Any

import msgspec
import pytest

from pagewire.demo.report import Figures, Reporter
from scheduler_adapters.errors import MissingExtraError
from scheduler_adapters.hf.runner import load_model

FIGURES = Figures(
    requests=3,
    tokens_equal=True,
    ties=0,
    prompt_tokens=1234,
    cached_tokens=617,
    hit_rate=0.5,
    pages_pulled=7,
    bytes_pulled=7000,
    gbps=1.5,
    ttft_ms_p50=12.34,
    tpot_ms_p50=5.678,
    leaked_pages=0,
)


def shown(capsys: pytest.CaptureFixture[str], **changes: Any) -> dict[str, str]:
    Reporter().table(msgspec.structs.replace(FIGURES, **changes), "where", ["a note with [brackets]"])
    lines = capsys.readouterr().out.splitlines()
    assert "a note with [brackets]" in lines
    pairs = (line.strip().rsplit("  ", 1) for line in lines if "  " in line.strip())
    return {name.strip(): value.strip() for name, value in pairs}


def test_the_table_shows_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys) == {
        "requests": "3",
        "prompt tokens": "1,234",
        "cached tokens": "617",
        "hit rate": "50.0%",
        "pages pulled": "7",
        "bytes pulled": "7,000",
        "GB/s while pulling": "1.50",
        "time to first token, p50": "12.3 ms",
        "time per token, p50": "5.68 ms",
        "pages left held": "0",
        "equal to the model's own generate": "yes",
    }


@pytest.mark.parametrize("width", [20, 60])
def test_no_title_is_cut_or_broken(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    title = "Prefill of pages of 16 tokens to decode of pages of 16 tokens, over NIXL"
    Reporter().table(FIGURES, title, [])
    assert capsys.readouterr().out.splitlines()[0] == title


def test_ties_are_listed_separately_and_a_difference_is_a_no(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, ties=2)["equal to the model's own generate"] == "yes, 2 by a rounding tie"
    assert shown(capsys, tokens_equal=False)["equal to the model's own generate"] == "NO"


def test_progress_is_one_plain_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter().phase("serving", 2) as show:
        show(1, "on its way")
        show(2, "")
    assert capsys.readouterr().out == "serving ...\n"


def test_progress_counts_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Reporter().phase("serving", 2) as show:
        show(2, "none on its way")
    assert "2/2" in capsys.readouterr().out


@pytest.mark.parametrize(("package", "needs"), [("rich.console", Reporter), ("transformers", lambda: load_model(None))])
def test_a_missing_package_names_the_extra(package: str, needs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=r"pagewire\[serve\]"):
        needs()
