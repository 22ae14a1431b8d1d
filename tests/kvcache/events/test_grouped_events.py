"""The events of several block tables tell a reader how much of a prompt a manager would find, in each medium and in all
media together.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import KVEvents, LayerGroup, PagedKVCacheManager
from kvcache.events.wire import hashes_of
from kvcache.replica.hashing import PrefixHasher
from kvcache.replica.replica import Replica
from tests.kvcache.build import manager_of, run_once
from tests.kvcache.events.mirror import Known, Reader, parked, worker_of
from tests.kvcache.random_model.run import Model

EVENTS = KVEvents("tcp://127.0.0.1:0")
MEDIA = (("GPU",), ("GPU", "CPU"), ("GPU", "CPU", "STORAGE"))
PAGE = 4
GROUPS = LayerGroup("full", (0,)), LayerGroup("window", (1,), 6), LayerGroup("chunked", (2,), 8)


class Readers:
    """One reader for each rank. After each move, all readers get the events of the move."""

    def __init__(self, manager: PagedKVCacheManager) -> None:
        self.manager, self.worker = manager, worker_of(manager)
        parked(self.worker)
        self.each = [Reader(manager, rank) for rank in range(len(manager._replicas.each))]
        self.found: Counter[str] = Counter()
        self.follow()

    def follow(self) -> None:
        told = self.worker._book.apply(self.worker._take(1 << 30))
        for reader in self.each:
            reader.follow(told)

    def agree(self, hasher: PrefixHasher, tokens: Any) -> None:
        """Asserts that every reader finds as much of a prompt as the manager finds, with and without the lower
        media.
        """
        digests = hasher.digests(np.array(tokens, np.int32), 0, (len(tokens) - 1) // hasher.page_size)
        for reader, replica in zip(self.each, self.manager._replicas.each, strict=True):
            of_media = [reader.longest(hashes_of(digests).tolist(), media) for media in MEDIA]
            assert of_media == longest(replica, digests)
            self.found["host"] += of_media[1] > of_media[0]
            self.found["files"] += of_media[2] > of_media[1]


def longest(replica: Replica, digests: np.ndarray) -> list[int]:
    """Returns the number of a prompt's pages after which the manager can continue, with the pages of the device, of the
    host, and of all media.
    """
    tables, tier = replica.tables, replica.tier
    below = (lambda _, asked: np.zeros_like(asked)), tier.host_has, tier.has
    return [tables.from_below(digests, one).pages for one in below]


def there(reader: Known) -> dict[tuple[int, str], set[int]]:
    """Returns the hashes of the pages that a reader knows, by block table and medium."""
    tables = {0: reader, **reader.groups}
    found = {(at, medium): set(pages) for at, one in tables.items() for medium, pages in one.there.items()}
    return {key: pages for key, pages in found.items() if pages}


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(12))
def test_after_every_move_readers_find_as_much_as_the_manager(seed: int) -> None:
    features = ("window", *["host"] * (seed % 3 > 0), *["chunk"] * (seed % 2))
    moves = Model.of(seed, ("forks", "preemption", "batches", "resets", *features), {"kv_events": EVENTS})
    if not moves.caching:
        assert moves.manager.kv_event_endpoints == []
        return
    readers = Readers(moves.manager)
    for _ in range(200):
        moves.move()
        readers.follow()
        known = [(one.tokens, *one.named) for one in moves.live.values()]
        known += [(tokens, None, keys) for tokens, keys in moves.past[-3:]]
        for tokens, salt, keys in known:
            readers.agree(PrefixHasher("sha256", 3, salt, keys), tokens)
    for rank, reader in enumerate(readers.each):
        newcomer = Reader(moves.manager, rank)
        assert there(newcomer) == there(reader)
    moves.finish()
    readers.follow()
    assert not moves.manager.metrics.h2d_blocks_copied or readers.found["host"] > 0
    moves.manager.close()


def test_the_next_process_also_reports_the_table_of_pages_in_files(tmp_path: Path) -> None:
    files = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": 1e-4, "file_tier_key": "m"}
    params = {"kv_events": EVENTS, "groups": GROUPS, **files}

    def made() -> tuple[PagedKVCacheManager, Readers]:
        manager = manager_of(36, layers=3, host_slots=50, params=params)
        return manager, Readers(manager)

    manager, readers = made()
    prompts = [[*range(start, start + 30)] for start in range(1, 601, 100)]
    for prompt in prompts:
        run_once(manager, prompt)
        manager.flush_tiers()
        readers.follow()
        for one in prompts:
            readers.agree(PrefixHasher("sha256", PAGE, None, ()), one)
    assert readers.found["host"]
    assert readers.found["files"]
    manager.close()
    manager, readers = made()
    before = readers.found["files"]
    for prompt in prompts:
        readers.agree(PrefixHasher("sha256", PAGE, None, ()), prompt)
    assert readers.found["files"] == before + len(prompts)
    tables = [readers.each[0], *(readers.each[0].groups[group] for group in (1, 2))]
    assert [known.there.keys() for known in tables] == [{"STORAGE"}] * 3
    specs = [known.spec for known in tables]
    assert specs == [("full_attention", None), ("chunked_local_attention", None), ("sliding_window", 6)]
    assert run_once(manager, prompts[0]) == 28  # A page that is loaded from a lower tier is reported for its own table.
    readers.follow()
    for prompt in prompts:
        readers.agree(PrefixHasher("sha256", PAGE, None, ()), prompt)
    # The tables now include the files' tokens, which the manager learns only when a prompt uses the files.
    for known in tables:
        told = {tokens for tokens, _ in known.there["STORAGE"].values()}
        assert known.there["CPU"]
        assert {(21, 22, 23, 24), ()} <= told
    manager.reset_prefix_cache()
    readers.follow()
    assert not there(readers.each[0])
    manager.close()
