"""Every token's KV is what its own prefix gives, at every fetch, hit, fork, tier copy and hand-over."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.kvcache.contents_oracle import KINDS, Pair


@pytest.mark.parametrize("kind", KINDS)
def test_each_request_sees_only_its_own_kv(kind: str, tmp_path: Path) -> None:
    reached: Counter[str] = Counter()
    for seed in range(12):
        reached += Pair(kind, seed, tmp_path).run(300)
    events = ["hits", "forks", "imports", "leases", "preemptions", "steps of a batch", "resets", "bytes of objects"]
    if "states" not in KINDS[kind]:
        events.append("steps in flight")
    assert min(reached[event] for event in events) > 0, reached
