from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pagewire.cli import main
from pagewire.replay.plots import Row, sweep_capacities, sweep_replicas, write_plots
from scheduler_adapters.errors import ReplayError

TRACE = [[10 * (number % 7) + at for at in range(3)] for number in range(60)]


def test_sweeps_leave_out_sizes_that_do_not_fit_and_rows_name_their_settings() -> None:
    rows = sweep_capacities(TRACE, (2, 6, 30), ("none", "true"))
    assert [(row["blocks"], row["hints"]) for row in rows] == [(6, "none"), (6, "true"), (30, "none"), (30, "true")]
    assert rows[0]["hit_pct"] == rows[0]["lru_pct"] == 0.0
    assert rows[2]["hit_pct"] == rows[2]["optimum_pct"] == round(100 * 53 / 60, 2)
    split = sweep_replicas(TRACE, 30, (1, 4, 16), ("prefix", "round-robin"))
    assert [(row["replicas"], row["routing"]) for row in split] == [
        *((replicas, rule) for replicas in (1, 4) for rule in ("prefix", "round-robin")),
    ]
    assert split[0]["of_one_pool_pct"] == 100.0
    assert split[0]["window_load_mean"] is None
    assert split[2]["window_load_mean"] >= 1


def test_both_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder, noted = tmp_path / "new" / "plots", list[Row]()
    drawn = write_plots("mine", TRACE, 30, folder, noted.append, (6, 30), (1, 2))
    assert drawn == [folder / "mine_capacity.png", folder / "mine_replicas.png"]
    assert all(one.read_bytes().startswith(b"\x89PNG") and one.stat().st_size > 10_000 for one in drawn)
    assert len(noted) == 2 * 5 + 2 * 3
    assert write_plots("mine", TRACE, 1, tmp_path / "none", noted.append, (2,), (1,)) == []


def test_the_command_draws_into_the_given_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, asked = tmp_path / "mine.jsonl", list[tuple[object, ...]]()
    path.write_text("\n".join(json.dumps({"hash_ids": blocks}) for blocks in TRACE))

    def write(*given: object) -> list[Path]:
        asked.append(given[:4])
        return [tmp_path / "picture.png"]

    monkeypatch.setattr("pagewire.replay.command.write_plots", write)
    assert main(["replay", str(path), "--capacity", "30", "--plots", str(tmp_path / "plots")]) == 0
    assert asked == [("mine", TRACE, 30, tmp_path / "plots")]
    assert "drew" in capsys.readouterr().err


def test_without_matplotlib_it_says_so_before_it_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install 'pagewire\\[bench\\]'"):
        write_plots("name", TRACE, 30, tmp_path, lambda _: pytest.fail("swept"))


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    with pytest.raises(ReplayError, match="--plots"):
        write_plots("name", TRACE, 30, tmp_path / "file", lambda _: None)
