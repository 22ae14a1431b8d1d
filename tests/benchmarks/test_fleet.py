from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks import fleet, fleet_trace
from benchmarks.fleet_client import Asked
from benchmarks.fleet_trace import TraceError, TraceRequest
from benchmarks.fleet_worker import PHASES, Stamp
from scheduler_adapters.hf.runner import load_model
from scheduler_adapters.hf.tiny import BOS


def lines(path: Path, *records: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_prompts_share_pages_where_the_trace_shares_blocks(tmp_path: Path) -> None:
    trace = lines(
        tmp_path / "trace.jsonl",
        {"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]},
        {"timestamp": 7, "input_length": 1536, "output_length": 1, "hash_ids": [0, 1, 3]},
    )
    first, second = fleet_trace.read_requests(trace, 2)
    assert [len(first.prompt), first.new] == [35, 16]  # The numbers are 1100 / 32 and 500 / 32, rounded up.
    assert [len(second.prompt), second.new] == [48, 1]
    assert first.prompt[:32] == second.prompt[:32]
    assert first.prompt[32:] != second.prompt[32:35]
    assert max(first.prompt + second.prompt) < BOS
    assert fleet_trace.ideal_hit_rate([first, second]) == 2 / 5  # full pages


def test_a_trace_that_cannot_be_used_says_which_line(tmp_path: Path) -> None:
    good = {"input_length": 600, "output_length": 3, "hash_ids": [4, 5]}
    with pytest.raises(TraceError, match=r"trace.jsonl: No such file"):
        fleet_trace.read_requests(tmp_path / "trace.jsonl", 1)
    with pytest.raises(TraceError, match=r"line 2: 600 tokens do not fit 1 blocks of 512 tokens"):
        fleet_trace.read_requests(lines(tmp_path / "a", good, {**good, "hash_ids": [4]}), 2)
    with pytest.raises(TraceError, match=r"line 1: .*hash_ids"):
        fleet_trace.read_requests(lines(tmp_path / "b", {**good, "hash_ids": []}), 1)
    with pytest.raises(TraceError, match="has 1 requests, and 2 are needed"):
        fleet_trace.read_requests(lines(tmp_path / "c", good), 2)


def test_without_the_trace_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet, "FOLDER", tmp_path / "nowhere")
    monkeypatch.setattr(sys, "argv", ["fleet"])
    assert fleet.main() == 2
    assert "conversation_trace.jsonl: No such file" in capsys.readouterr().err


def test_a_tenth_of_the_requests_is_cancelled_each_in_a_reachable_phase() -> None:
    requests = [TraceRequest((1,), number % 5 + 1) for number in range(1000)]
    plan = fleet.plan_of(requests, random.Random(1))
    assert len(plan) == 100
    assert {planned.phase for planned in plan.values()} == set(PHASES)
    wanted = {name: requests[int(name[1:])].new for name in plan}
    assert all(wanted[name] > 2 for name, planned in plan.items() if planned.phase == "decode")
    assert all(wanted[name] > 1 for name, planned in plan.items() if planned.phase == "pull")
    assert plan == fleet.plan_of(requests, random.Random(1))


def test_a_cancellation_in_the_queue_of_decode_may_fall_into_the_prefill() -> None:
    cancel = Stamp(3.0, "r", "cancel queue", "decode", 7)
    assert fleet.cancelled_in([cancel]) == "queue"
    assert fleet.cancelled_in([Stamp(2.0, "r", "leasing", "prefill", 7), cancel]) == "prefill"
    assert fleet.cancelled_in([Stamp(2.0, "r", "leasing", "prefill", 6), cancel]) == "queue"  # an earlier attempt
    assert fleet.cancelled_in([Stamp(4.0, "r", "leasing", "prefill", 7), cancel]) == "queue"
    assert fleet.cancelled_in([Stamp(3.0, "r", "cancel pull", "decode", 7)]) == "pull"


def test_silences_are_counted_between_two_times() -> None:
    assert fleet.longest_gap([1.0, 2.0, 5.0, 9.0], 1.5, 6.0) == 3.0
    assert fleet.longest_gap([], 1.0, 4.0) == 3.0
    assert fleet.longest_gap([1.0], 4.0, 2.0) == 0.0
    one = Asked("r", TraceRequest((1,), 2), "d", 1.0, [5, 6], [2.0, 7.0], "length", "", 7.0)
    assert fleet.longest_wait([one], 3.0, 4.0) == 5.0
    assert fleet.longest_wait([one], 8.0, 9.0) == 0.0


def test_wrong_tokens_and_silent_failures_are_named() -> None:
    model = load_model(None)
    request = TraceRequest((1, 2, 3), 4)
    right = fleet.reference_tokens(model, request.prompt, request.new)
    ends: dict[str, tuple[list[int], str, str]] = {
        "right": (right, "length", ""),
        "cut": (right[:2], "cancelled", ""),
        "lost": (right[:1], "error", "killed"),
        "silent": (right[:1], "error", ""),
        "short": (right[:2], "length", ""),
        "other": ([(right[0] + 1) % BOS], "cancelled", ""),
    }
    asked = [Asked(name, request, "d", 0.0, tokens, [], end, error) for name, (tokens, end, error) in ends.items()]
    verdicts = fleet.judge(model, asked)
    assert [name for name, verdict in verdicts.items() if verdict == "equal"] == ["right", "cut", "lost"]
    assert "says not why" in verdicts["silent"]


@pytest.mark.ci
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("forked_fleets")
def test_a_small_fleet_loses_two_processes_and_no_page() -> None:
    requests = fleet_trace.synthetic_requests(24, seed=3)
    ran = fleet.run(requests, seed=3)
    found = fleet.figures(requests, 3, ran, fleet.judge(load_model(None), ran.asked))
    assert fleet.is_good(found), found
    assert found["equal"] + sum(found["cancelled"].values()) + sum(found["failed"].values()) == 24
    assert [kill["killed"].split("-")[0] for kill in found["kills"]] == ["prefill", "decode"]
    assert all("was killed" in reason for reason in found["failed"])
    assert found["rounding_ties"] == found["pages_held"] == found["malformed"] == 0
