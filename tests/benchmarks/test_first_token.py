from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import first_token, fleet_trace
from benchmarks.fleet_client import Asked
from benchmarks.fleet_trace import TraceRequest
from benchmarks.fleet_worker import Stamp

REQUEST = TraceRequest((1, 2), 2)


def stamps(*happened: tuple[float, str, str]) -> list[Stamp]:
    return [Stamp(at, "r", what, "prefill" if role == "p" else "decode", 1) for at, role, what in happened]


def test_parts_follow_each_other_from_the_arrival_to_the_second_token() -> None:
    asked = Asked("r", REQUEST, "decode", 10.0, [5, 6], [18.5, 33.5], "length", "", 33.5)
    parts = first_token.parts_of(
        asked,
        stamps(
            (11.0, "d", "asked"),
            (13.0, "p", "leasing"),
            (14.0, "p", "computing"),
            (15.0, "d", "offered"),
            (17.0, "p", "held"),
            (18.0, "d", "token"),
            (23.0, "d", "decoding"),
            (33.0, "d", "token"),
        ),
    )
    assert parts == {
        "asked": 1.0,
        "queue": 3.0,
        "prefill": 4.0,
        "hand-over": 1.0,
        "delivery": 0.5,
        "first token": 8.5,
        "pull": 5.0,
        "join": 10.0,
        "second token": 23.5,
    }
    inner = sum(parts[part] for part in ("queue", "prefill", "hand-over", "pull", "join"))
    assert inner + 0.5 == parts["second token"]  # The second token takes half a second on its way to the client.


def test_one_process_hands_nothing_over_and_one_token_has_no_second() -> None:
    alone = stamps((11.0, "p", "leasing"), (15.0, "d", "token"), (16.0, "d", "token"))
    asked = Asked("r", REQUEST, "decode", 10.0, [5, 6], [15.5, 16.5], "length", "", 16.5)
    assert first_token.parts_of(asked, alone) == {
        "queue": 1.0,
        "prefill": 4.0,
        "delivery": 0.5,
        "first token": 5.5,
        "join": 1.0,
        "second token": 6.5,
    }
    asked.times.pop()
    assert set(first_token.parts_of(asked, alone[:2])) == {"queue", "prefill", "delivery", "first token"}


def test_arrivals_follow_from_the_rate_and_the_seed() -> None:
    times = first_token.arrivals(2000, 4.0, 1)
    assert times == sorted(times) == first_token.arrivals(2000, 4.0, 1)
    assert 450 < times[-1] < 550


def test_without_the_trace_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_token, "FOLDER", tmp_path / "nowhere")
    monkeypatch.setattr(sys, "argv", ["first_token"])
    assert first_token.main() == 2
    assert "conversation_trace.jsonl: No such file" in capsys.readouterr().err


@pytest.mark.ci
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_fleets")
def test_both_ways_are_measured_part_by_part() -> None:
    requests = fleet_trace.synthetic_requests(8, seed=5)
    rows = {row["part"]: row for row in first_token.rows_of(first_token.measure(requests, 20.0, seed=0, rounds=2))}
    assert list(rows) == list(first_token.PARTS)
    assert all(row["disaggregated_ms_p50"] >= 0 for row in rows.values())
    assert [part for part, row in rows.items() if row["one_process_ms_p50"] is None] == ["asked", "hand-over", "pull"]
    assert rows["first token"]["n"] == 8
    assert rows["first token"]["disaggregated_ms_p50"] <= rows["second token"]["disaggregated_ms_p50"]
