"""A recording is played at its own speed. A pause stops it."""

from __future__ import annotations

from pathlib import Path

from pagewire.top.sources import Heard, PlayedSource, _begun, _write


def recorded(path: Path, *times: float) -> Path:
    with _begun(path) as file:
        for at in times:
            _write(file, Heard(1000.0 + at, "a", [b"%d" % at]))
    return path


def test_a_paused_recording_does_not_advance(tmp_path: Path) -> None:
    now = 50.0
    source = PlayedSource(recorded(tmp_path / "r", 0, 2, 4, 30), speed=2.0, clock=lambda: now)
    assert [heard.at for heard in source.poll({})] == [1000.0]
    now += 1.5
    assert [heard.at for heard in source.poll({})] == [1002.0]
    source.paused = True
    for _ in range(3):
        now += 5.0
        assert source.poll({}) == []
    assert source.position == 3.0
    source.paused = False
    assert source.poll({}) == []
    now += 0.5
    assert [heard.at for heard in source.poll({})] == [1004.0]
    assert (source.position, source.now) == (4.0, 1004.0)
    now += 100.0
    assert [heard.at for heard in source.poll({})] == [1030.0]
    assert source.position == source.length == 30.0, "it ends there"
