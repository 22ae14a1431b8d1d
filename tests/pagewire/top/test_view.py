"""Tests the contents of the views, but not how they are drawn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvcache.watch.messages import AskLook, PoolLook
from pagewire.top.panels import processes
from pagewire.top.sources import Heard
from pagewire.top.view import Filter, WatchedProcess


def test_after_an_invalid_snapshot_the_whole_state_is_requested() -> None:
    process = WatchedProcess("tcp://host:1")
    process.followed.look = cast("Any", SimpleNamespace(name="p", number=3, incarnation=5))
    assert process.followed.ask == AskLook(known=3, incarnation=5)
    process.take(Heard(12.5, "tcp://host:1", [b"rubbish", b"", b""]))
    assert "3 frames are not a snapshot" in process.error
    assert process.followed.ask == AskLook()
    assert process.heard_at == 12.5, "the process has answered, although the answer was invalid"
    assert process.name == "tcp://host:1"


@pytest.mark.parametrize(("replica", "shown"), [("", ["0", "1", "10"]), ("1", ["1"]), ("10", ["10"]), ("2", [])])
def test_a_replica_is_chosen_by_its_whole_name_and_a_process_by_a_part(replica: str, shown: list[str]) -> None:
    chosen = Filter(replica=replica, process="code-2")
    assert [pool for pool in ("0", "1", "10") if chosen.has_pool("decode-2", pool)] == shown
    assert not any(chosen.has_pool("decode-1", pool) for pool in ("0", "1", "10"))


def test_pages_of_older_weights_are_shown() -> None:
    pools = (PoolLook(name="0", num_pages=9, counts=(0, 5, 4, 0, 0, 0), older=older) for older in (0, 3))
    followed = SimpleNamespace(look=SimpleNamespace(pools=(*pools,), check=None))
    process = SimpleNamespace(name="p", followed=followed, heard_at=1.0, error="")
    view: Any = SimpleNamespace(processes={"p": process}, now=2.0)
    view.is_gone = [].count
    assert [row[4] for row in processes(view)] == ["idle 5 held 4", "idle 5 held 4 (of older weights 3)"]
