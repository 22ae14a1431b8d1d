from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks.frame import table
from benchmarks.peers import aside, peers, raw_nixl
from benchmarks.peers.__main__ import DEFAULT, OURS, compare, main, over_rounds
from benchmarks.peers.environment import PeerError, needed, scripts_folder
from benchmarks.peers.parse import Figure, rows_of_json, rows_of_kind, rows_of_vllm
from benchmarks.peers.questions import QUESTIONS

_VLLM = """\
python 3.11 vllm 0.33.0
== hash: all block hashes of a prompt ==
sha256        32768 tok     2000.0 us  (min 1900.0, n=9)   per block 4.19 us
sha256_cbor   32768 tok    66563.0 us  (min 53407.6, n=9)   per block 32.50 us
== manager, 1 group : get_computed_blocks + allocate_slots + free ==
 32768 tok cold_get           90.0 us  (min 80.0, n=15)   per block 0.044
 32768 tok cold_alloc        400.0 us  (min 300.0, n=15)   per block 1.913
 32768 tok evict_alloc      2448.0 us  (min 2348.0, n=15)   per block 2.467
== manager, hybrid FA+SW(1024) : get_computed_blocks + allocate_slots + free ==
 32768 tok cold_alloc       3917.4 us  (min 3722.0, n=15)   per block 1.913
== decode step: allocate_slots(req,1) ==
B= 1024 allocate_slots/step     6000.0 us  (min 5000.0, n=64) mean 1 = 1 us/req; append+hash 1.00 us/req; free 1 us/req
== memory ==
BlockPool(1000000): 124.7 B/block RSS, built in 3236 ms; sizeof(KVCacheBlock)=96
cached (sha256 key 36 B + dict entry): +122.2 B/block; total 246.9 B/block
{"kind": "vllm", "name": "next turn list", "min": 5.0, "med": 6.0}
"""


def _of_max(**row: object) -> str:
    return json.dumps({"kind": "v257", "page": 16, **row})


def test_vllms_parts_are_added_up_and_those_of_other_groups_left_out() -> None:
    figures = rows_of_vllm(_VLLM)
    assert figures["cold 16 32768 sha256"] == (1900 + 80 + 300, 2000 + 90 + 400)
    # vLLM publishes pages as soon as it allocates them, so the two figures are equal.
    assert figures["admit 16 32768 sha256"] == figures["cold 16 32768 sha256"]
    assert figures["next turn list"] == (5, 6)
    assert figures["evict"] == (1, 1)
    assert figures["decode 16 1024"] == (6024, 7024)
    assert figures["memory 1M"].median == 246.9
    assert figures["build 1M"].median == 3236e3


def test_maxs_rows_are_named_by_what_they_measure() -> None:
    parts = {name: {"min": at, "med": at + 1, "n": 9} for at, name in enumerate(("alloc", "step", "release", "total"))}
    lines = [
        "a line that is no row",
        _of_max(test="prefill", prompt=32768, phase="cold_fresh_pool", **parts),
        _of_max(test="prefill", prompt=32768, phase="cold_evicting", **{**parts, "alloc": {"min": 2048, "med": 4097}}),
        _of_max(test="decode", prompt=1024, batch=64, caching=True, **parts),
        _of_max(test="decode", prompt=1024, batch=64, caching=False, **{**parts, "total": {"min": 0, "med": 0}}),
    ]
    figures = rows_of_kind("\n".join(lines), "v257")
    assert figures["cold 16 32768"] == (0, 1)
    assert figures["admit 16 32768"] == (0 + 1, 1 + 2)
    assert figures["release 16 32768"] == (2, 3)
    assert figures["decode 16 64"] == (3, 4)
    assert figures["evict"] == (1, 2)
    assert rows_of_kind("\n".join(lines), "jenga") == {}


def test_figures_beside_those_of_a_script_are_read_under_their_names() -> None:
    memory = {"build_s": 2.0, "bytes_per_page_all_committed": 300.0, "full_gc_s": 0.5}
    lines = [
        json.dumps({"kind": "jenga", "name": "next turn new", "min": 1.0, "med": 2.0}),
        json.dumps({"kind": "jenga", "test": "mem_1M_pages", **memory}),
        json.dumps({"kind": "legacy", "name": "next turn new", "min": 8.0, "med": 9.0}),
    ]
    figures = rows_of_kind("\n".join(lines), "jenga")
    assert figures == {"next turn new": (1, 2), "memory 1M": (300, 300), "build 1M": (2e6, 2e6), "gc 1M": (5e5, 5e5)}
    assert rows_of_json(json.dumps({"name": "a", "min": 1, "med": 2})) == {"a": (1, 2)}


def test_nixl_is_read_in_both_its_ways() -> None:
    found = {"page_bytes": 65536, "pages": 2048, "us_min": 1, "us_median": 2}
    shipped, as_ours = (raw_nixl.row(found, way) for way in raw_nixl.WAYS)
    text = f"{json.dumps(shipped)}\n{json.dumps({**as_ours, 'min': 0.5})}"
    parsers = peers.PEERS["nixl"].parsers
    assert {name: parse(text)["pull 64 2048"].minimum for name, parse in parsers.items()} == {
        "nixl": 1,
        "nixl-as-ours": 0.5,
    }


def test_a_next_turn_is_timed_with_and_without_the_making_of_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    turns: list[int] = []

    def next_turn(tokens: list[int]) -> tuple[int, int, int]:
        turns.append(len(tokens))
        return 0, 1000, 3000

    aside.measure("v257", next_turn, [1] * 7, lambda count: [2] * count)
    figures = rows_of_kind(capsys.readouterr().out, "v257")
    assert figures == {"next turn new": (2, 2), "next turn list": (3, 3)}
    assert set(turns) == {7 + aside.TURN}


def test_sglangs_steps_are_read_under_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    took = iter(range(100))

    def step(page: int, batch: int) -> dict[str, float]:
        return {"full": float(page * batch + next(took))}

    aside.ask_sglang({"bench_decode_sgl": step})
    figures = peers.PEERS["sglang"].parsers["sglang"](capsys.readouterr().out)
    assert figures == {"decode 16 1": (16, 16 + 4), "decode 16 1024": (16 * 1024 + 9, 16 * 1024 + 9 + 4)}
    assert {question.of("sglang") for question in QUESTIONS} == {*figures, ""}


def test_every_peer_is_named_with_its_version_and_asked_something() -> None:
    assert set(DEFAULT.split(",")) == set(peers.PEERS)
    for name, peer in peers.PEERS.items():
        assert peer.version.startswith(peer.title.split()[-1]), name
        for column in peer.parsers:
            assert any(question.of(column) for question in QUESTIONS), column
    assert len({question.text for question in QUESTIONS}) == len(QUESTIONS)


def test_an_environment_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = msgspec.structs.replace(peers.PEERS["nixl"], version="0.1")
    monkeypatch.setitem(peers.PEERS, "nixl", other)
    with pytest.raises(PeerError, match=r"nixl: nixl in its environment is .*, expected 0.1"):
        peers.program("nixl", tmp_path, "wall")


def test_a_ratio_is_the_peers_figure_over_ours() -> None:
    rounds = [{"release 16 32768": Figure(20, 30)}, {"release 16 32768": Figure(10, 50)}]
    figures = {OURS: over_rounds(rounds), "max257": {"release 16 32768": Figure(600, 800)}, "vllm": {}}
    (row,) = compare(figures)
    assert (row["ours_min"], row["ours_median"]) == (10, 40)
    assert (row["max257/ours_min"], row["max257/ours_median"]) == (60, 20)
    assert row["vllm/ours_min"] is None
    assert (row["best"], row["best/ours_min"]) == ("max257", 60)
    assert "600.00" in table([row])


def test_missing_scripts_are_said_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PeerError, match="--scripts or PAGEWIRE_PEER_SCRIPTS"):
        scripts_folder(tmp_path / "none")
    with pytest.raises(PeerError, match=r"no bench_vllm\.py"):
        needed(tmp_path, "bench_vllm.py")
    monkeypatch.setattr("sys.argv", ["peers", "--scripts", str(tmp_path), "--peers", "vllm"])
    assert main() == 1
    assert "no bench_vllm.py" in capsys.readouterr().err
