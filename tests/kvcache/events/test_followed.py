"""Routers of the field follow our streams."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.kvcache.events import followed as program
from tests.kvcache.events.followed import Followed, follow

pytest.importorskip("dynamo.llm")


def test_dynamos_selection_service_knows_what_two_managers_hold() -> None:
    followed = asyncio.run(follow(2, 200, rounds=3, seed=1, requests=60))
    assert followed.differences == []
    assert followed.seen["compared"] >= 200
    assert followed.seen["pages"] > 200


class Stuck:
    """A service that answers nothing, or always that nothing is there."""

    def __init__(self, answers: bool) -> None:
        self._answers = answers

    async def upsert_worker(self, _: dict[str, Any]) -> None:
        await self.overlap_scores(_)

    async def overlap_scores(self, _: dict[str, Any]) -> dict[str, Any]:
        if not self._answers:
            await asyncio.Event().wait()
        nothing = dict.fromkeys(("device_blocks", "host_pinned_blocks", "disk_blocks"), 0)
        return {"workers": [{"worker_id": 1, **nothing}]}


@pytest.mark.parametrize("answers", [False, True], ids=["no answer", "nothing followed"])
def test_a_service_that_is_stuck_ends_the_run_by_its_name(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "ANSWER_S", 0.05)
    monkeypatch.setattr(program, "PATIENCE_S", 1.0)
    made = Followed(1, 0, tmp_path)
    try:
        made.services = [Stuck(answers)]
        made.work(20)
        if answers:
            asyncio.run(asyncio.wait_for(made.compare(60), 30.0))
            assert {one.partition(":")[0] for one in made.differences} == {"service 0, manager 1"}
        else:
            with pytest.raises(TimeoutError, match=r"service 0: overlaps of \d+ tokens: no answer"):
                asyncio.run(asyncio.wait_for(made.compare(60), 30.0))
    finally:
        made.close()


@pytest.mark.long
@pytest.mark.parametrize("managers", [2, 8])
def test_dynamos_selection_service_agrees_10_000_times(managers: int) -> None:
    followed = asyncio.run(follow(managers, 10_000, rounds=20, seed=0))
    assert followed.differences == []
    assert followed.seen["compared"] >= 10_000
    assert min(followed.seen[what] for what in ("evictions", "restarts", "resets", "lost")) > 0
