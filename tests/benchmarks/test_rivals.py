from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from benchmarks.frame import table
from benchmarks.peers.environment import PeerError
from benchmarks.rivals import __main__ as rivals
from benchmarks.rivals import hosts, lender, others, ours, programs
from benchmarks.rivals.faults import faults
from benchmarks.rivals.fetcher import Fetch, Fetcher
from benchmarks.rivals.lender import LenderProcess, Setting
from tests.hosts.network import why_not

SMALL = Setting(pool_bytes=16 << 20)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LenderProcess, Fetcher]]:
    with LenderProcess(SMALL) as source, Fetcher(SMALL, source) as reader:
        yield source, reader


@pytest.mark.ci
def test_a_fetch_is_timed_from_the_question_until_the_manager_finds_the_pages(
    pair: tuple[LenderProcess, Fetcher],
) -> None:
    source, reader = pair
    asked, pulled = ours.fetches(SMALL, reader, source, 4, 0.01, None)
    assert (asked["program"], pulled["program"]) == (ours.ASKED, ours.PULLED)
    assert 0 < pulled["us_min"] < asked["us_min"]
    assert asked["n"] >= 9
    assert asked["cpu_s_per_gb"] > 0
    assert 1 <= asked["runs"] <= 4
    assert reader.manager.num_held_blocks == 0


@pytest.mark.ci
def test_a_page_that_is_not_the_sources_is_noticed(pair: tuple[LenderProcess, Fetcher]) -> None:
    source, reader = pair
    source("lay_out", 2, 8)
    reader.forget()
    _, fetch = reader.fetch(1, 8)
    assert (fetch.wrong_pages(), fetch.is_published()) == (0, True)
    page = reader.manager.get_req_blocks(fetch.key)[5]
    reader.manager.device_tensors[0][0][page] += 1
    assert fetch.wrong_pages() == 1
    fetch.release()
    assert not Fetch(reader, 0, 8).is_published()


@pytest.mark.ci
def test_the_result_of_a_reader_whose_source_evicts_revokes_or_dies() -> None:
    rows = {row["the source"].split()[0]: row for row in faults(SMALL, [], 96)}
    assert rows["evicts"]["told"] == "published"
    assert rows["evicts"]["evicted"] > 0
    assert rows["has"]["told"] == "lends nothing"
    # "published" is also right: a few pages may arrive before the source has finished revoking.
    assert rows["revokes"]["told"] == "published" or "no longer held the pages" in rows["revokes"]["told"]
    assert rows["is"]["told"] == "published" or "lender/0" in rows["is"]["told"]
    assert [row["wrong_blocks"] for row in rows.values()] == [0] * 4
    assert [row["held_by_reader"] for row in rows.values()] == [0] * 4
    assert {row.get("held_by_source", 0) for row in rows.values()} == {0}
    assert table(rows.values())


@pytest.mark.ci
def test_a_fetch_over_a_link_runs_in_turn_with_a_bare_socket() -> None:
    if reason := why_not():
        pytest.skip(f"no hosts of their own: {reason}")
    rows = rivals.shares(hosts.over_link("1gbit", SMALL, (16,), 0.01))
    assert {row["program"] for row in rows} == {ours.ASKED, ours.PULLED, ours.FIRST, ours.SOCKET}
    assert {row["link"] for row in rows} == {"1gbit"}
    assert next(row["share"] for row in rows if row["program"] == ours.SOCKET) == 1
    assert all(row["us_min"] > 768 * 1024 * 8 / 1e3 for row in rows), (
        "at 1 Gbit/s, 1 MiB without the burst takes at least this long"
    )


def test_a_link_that_cannot_be_made_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hosts, "why_not", lambda: "there is no program 'ip'")
    assert rivals.linked("1gbit", 0.1) == []
    assert capsys.readouterr().err == "no link of 1gbit: there is no program 'ip'\n"


def test_a_ratio_is_a_programs_time_over_ours_of_the_same_size_and_order() -> None:
    def row(program: str, blocks: int, us: float, access: str = "random") -> dict[str, object]:
        figures = {"us_min": us, "us_median": us + 1, "gbps": 1.0, "cpu_s_per_gb": us}
        return {"program": program, "blocks": blocks, "block_bytes": 65536, "access": access, **figures}

    plain = ours.PLAIN[rivals.SPUN]
    of_ours = [
        row(ours.ASKED, 16, 40),
        row(ours.ASKED, 16, 50),
        row(plain, 16, 10),
        row(ours.ASKED, 16, 1, "contiguous"),
    ]
    found = rivals.compared([*of_ours, row("kvcr 0.1.1", 16, 80), row("kvcr 0.1.1", 1, 7)])
    by = {(one["program"], one["blocks"], one["access"]): one for one in found}
    assert by["kvcr 0.1.1", 16, "random"] | {"/asked": 2, "/plain": 8} == by["kvcr 0.1.1", 16, "random"]
    assert by["kvcr 0.1.1", 1, "random"]["/asked"] is None
    assert by[ours.ASKED, 16, "random"]["us_min"] == 40
    assert by[ours.ASKED, 16, "random"]["us_median"] == 46
    assert by[ours.ASKED, 16, "random"]["cpu_s_per_gb"] == 45
    assert by[ours.ASKED, 16, "contiguous"]["/asked"] == 1


def test_the_result_of_kvcrs_reader_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = [
        {"told_after_s": 0.92, "results": {"FAILED": 2048}, "usual_s": 0.08},
        {"from_the_guard_us": 131_000, "right": True, "tries": 2},
        {"close": "ok", "s": 5.0},
    ]
    script = tmp_path / "rivals" / "bench_kvcr.py"
    script.parent.mkdir()
    script.write_text("".join(f"print({json.dumps(line)!r})\n" for line in printed))
    (script.parent / "requirements-kvcr.txt").write_text("")

    def interpreter(*_: object) -> Path:
        return Path(sys.executable)

    monkeypatch.setattr(programs, "python_of", interpreter)
    monkeypatch.setattr(programs, "OTHERS", tmp_path / "others.py")
    programs.OTHERS.write_text("")
    killed, guarded = programs.Program("kvcr", tmp_path).faults()
    assert killed["told"] == "2048 FAILED; then from the guard in 0.131 s; close: ok after 5.0 s"
    assert (killed["told_after_s"], guarded["program"]) == (0.92, "kvcr 0.1.1, with its guard")


def test_a_program_that_fails_leaves_its_rows_and_its_last_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('{\"blocks\": 1}', flush=True)\nraise SystemExit('deliver failed')\n")
    assert programs.output_of(["python3", str(script)]) == ([{"blocks": 1}], "deliver failed")


def test_everything_that_a_rival_lacks_is_named_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rivals", "--scripts", str(tmp_path), "--rivals", "kvcr"])
    assert rivals.main() == 1
    assert capsys.readouterr().err == f"no bench_kvcr.py in {tmp_path / 'rivals'}\n"
    (tmp_path / "rivals").mkdir()
    (tmp_path / "rivals" / "bench_mooncake.py").write_text("")
    rival = programs.RIVALS["mooncake"]
    monkeypatch.setitem(programs.RIVALS, "mooncake", replace(rival, library=("libnone.so.9", "libnone9")))
    with pytest.raises(PeerError, match=r"mooncake: libnone\.so\.9 is not installed: run apt-get install libnone9"):
        programs.Program("mooncake", tmp_path)


def test_every_rival_is_named_with_its_version() -> None:
    assert [*programs.RIVALS] == ["kvcr", "mooncake"]
    for rival in programs.RIVALS.values():
        assert rival.version.startswith(rival.title.split()[1].rstrip(","))


def test_blocks_that_hold_other_bytes_are_counted() -> None:
    size = 64
    memory = ctypes.create_string_buffer(b"".join(bytes([at % 251 + 1]) * size for at in range(8)), 8 * size)
    script, start = SimpleNamespace(BLOCK=size), ctypes.addressof(memory)
    assert others.wrong_of(script, start, range(8)) == 0
    memory[3 * size + 17] = 0
    memory[5 * size] = 0
    assert others.wrong_of(script, start, range(8)) == 2
    assert others.wrong_of(script, start, [3]) == 1


def test_prompts_have_no_page_in_common_and_neighbouring_pages_differ() -> None:
    assert lender.tokens_of(1, 2)[0] != lender.tokens_of(2, 2)[0]
    stamps = [lender.stamp_of(3, column) for column in range(2048)]
    assert all(a != b for a, b in pairwise(stamps))
