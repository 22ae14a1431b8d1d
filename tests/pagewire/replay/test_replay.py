from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from pagewire.cli import main
from pagewire.replay.replay import ReplayError, load_trace, optimum_hits, reference_lru_hits, replay


def trace_of(seed: int, requests: int = 120) -> list[list[int]]:
    """Returns a trace of growing conversations and of prompts that occur once. As in every trace, equal ids mean equal
    prefixes.
    """
    rng, ids = random.Random(seed), itertools.count(1)
    open_ones: list[list[int]] = [[next(ids)]]
    found = []
    for _ in range(requests):
        past = rng.choice(open_ones)
        cut = rng.randint(0, len(past))
        blocks = [*past[:cut], *(next(ids) for _ in range(rng.randint(1, 4)))][:9]
        open_ones = [*open_ones[-12:], blocks]
        found.append(blocks)
    return found


@pytest.mark.parametrize("capacity", [9, 14, 30, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_the_manager_hits_as_often_as_the_reference_lru(seed: int, capacity: int) -> None:
    trace = trace_of(seed)
    result = replay(trace, capacity)
    assert result.hits == result.reference_lru_hits <= result.optimum_hits
    assert result.block_refs == sum(map(len, trace))
    assert result.hit_rate == result.hits / result.block_refs
    assert result.gap_closed == (None if result.optimum_hits == result.hits else 0.0)


def test_with_room_for_all_blocks_every_policy_hits_all_repeated_blocks() -> None:
    trace, seen, wanted = trace_of(1), set[int](), 0
    for blocks in trace:
        wanted += sum(block in seen for block in blocks)
        seen.update(blocks)
    result = replay(trace, 1000)
    assert result.hits == result.optimum_hits == wanted > 100
    assert result.evictions == 0


def best(trace: list[list[int]], capacity: int, resident: frozenset[int] = frozenset()) -> int:
    """Returns the number of hits if the best possible blocks are kept after each request."""
    if not trace:
        return 0
    blocks, rest = trace[0], trace[1:]
    run = 0
    while run < len(blocks) and blocks[run] in resident:
        run += 1
    others, room = sorted(resident - set(blocks)), capacity - len(blocks)
    kept = itertools.combinations(others, min(room, len(others)))
    return run + max(best(rest, capacity, frozenset(choice) | set(blocks)) for choice in kept)


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_the_best_of_all_choices(seed: int) -> None:
    trace = [blocks[:3] for blocks in trace_of(seed, 9)]
    assert optimum_hits(trace, 4) == best(trace, 4) >= reference_lru_hits(trace, 4)


def test_replicas_split_the_capacity() -> None:
    trace = trace_of(3)
    one, two = replay(trace, 40), replay(trace, 40, replicas=2)
    assert two.requests == one.requests
    assert 0 < two.hits <= one.hits


@pytest.mark.parametrize("host", [20, 40, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_a_host_tier_hits_as_often_as_a_pool_of_its_size(seed: int, host: int) -> None:
    trace = trace_of(seed)
    result = replay(trace, 9, host_blocks=host)
    assert result.hits == reference_lru_hits(trace, host)
    assert 0 < result.restored <= result.hits


def long_trace(requests: int = 1500) -> list[list[int]]:
    """Returns interleaved sessions of three turns. Prompts that never recur come between the turns."""
    found = []
    for number in range(requests // 2):
        session, turn = number % 40 + 40 * (number // 120), number // 40 % 3
        found.append([10**6 * (session + 1) + block for block in range(4 * (turn + 1))])
        found.append([10**9 + 10 * number + block for block in range(8)])
    return found


def test_true_hints_hit_more_and_wrong_ones_hardly_less_than_none() -> None:
    trace = long_trace()
    none, true, inverted = (replay(trace, 300, hints=kind) for kind in ("none", "true", "inverted"))
    assert none.hits == none.reference_lru_hits == true.reference_lru_hits
    assert true.hits > 2 * none.hits
    assert true.gap_closed is not None
    assert true.gap_closed > 0.5
    assert inverted.hits > none.hits - 0.01 * none.block_refs


def test_claiming_by_prefix_hits_more_than_taking_turns_and_keeps_loads_even() -> None:
    trace = long_trace()
    by_prefix, turns = (replay(trace, 2400, 3, routing=rule) for rule in ("prefix", "round-robin"))
    assert by_prefix.hits > 0.95 * by_prefix.reference_lru_hits > 2 * turns.hits
    assert by_prefix.window_load_mean is not None
    assert 1.0 <= by_prefix.window_load_mean <= by_prefix.window_load_max < 1.2
    assert replay(trace, 2400).window_load_mean is None


def test_a_window_s_load_is_that_of_its_busiest_replica() -> None:
    # In each of the two complete windows, one replica gets the long prompts and the other replica gets the short
    # prompts. The replicas take turns. The third window is incomplete and does not count.
    trace = [[10 * number + at for at in range(3 if number % 2 and number < 1000 else 1)] for number in range(1100)]
    result = replay(trace, 10_000, 2, routing="round-robin")
    assert result.hits == 0
    assert result.window_load_mean == result.window_load_max == 1.5


def test_a_request_that_can_never_fit_is_reported() -> None:
    with pytest.raises(
        ReplayError,
        match="a request of 9 blocks does not fit: with 16 blocks and 2 replicas, each replica has 8 blocks",
    ):
        replay([[*range(9)]], 16, replicas=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests"),
        ("{", "line 1"),
        ('{"hash_ids": [1]}\n{"hash_ids": []}', "line 2: hash_ids must be"),
        ('{"hash_ids": [-1]}', "line 1: hash_ids must be"),
        ('{"hash_ids": [4294967296]}', "line 1: hash_ids must be"),
        ('{"hash_ids": "a"}', "line 1: Expected `array`"),
        ("[]", "line 1"),
    ],
)
def test_a_bad_trace_is_one_line_that_names_the_place(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ReplayError, match=message):
        load_trace(path)
    assert main(["replay", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_command_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    path.write_text("\n".join(json.dumps({"timestamp": 0, "hash_ids": blocks}) for blocks in trace_of(2)))
    assert main(["replay", str(path), "--capacity", "20", "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert list(figures) == [
        "requests",
        "block_refs",
        "hits",
        "hit_rate",
        "evictions",
        "reference_lru_hits",
        "optimum_hits",
        "gap_closed",
        "us_per_request_p50",
        "window_load_mean",
        "window_load_max",
        "restored",
    ]
    assert f"{figures['hits']:,}" in capsys.readouterr().out
    assert main(["replay", str(path), "--hints", "maybe"]) == 2
    assert main(["replay", str(path), "--capacity", "20", "--host-blocks", "60", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["restored"] > 0
    options = ["--hints", "wrong=0.5", "--routing", "round-robin", "--replicas", "2", "--json", str(out)]
    assert main(["replay", str(path), "--capacity", "40", *options]) == 0
    assert json.loads(out.read_text())["window_load_mean"] >= 1
    assert main(["replay", str(path), "--capacity", "20", "--json", "/dev/full"]) == 2


@pytest.mark.parametrize("host_blocks", [0, 8])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("hints", ["none", "true"])
def test_a_replay_logs_no_warning(
    caplog: pytest.LogCaptureFixture, host_blocks: int, replicas: int, hints: str
) -> None:
    replay(trace_of(3, 5), 40, replicas=replicas, host_blocks=host_blocks, hints=hints)
    assert caplog.messages == []
