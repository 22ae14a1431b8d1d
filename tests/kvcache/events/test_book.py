"""Tests the records from which events are made: the contents that are known, how long they are known, and the resulting
events.
"""

from __future__ import annotations

import random

import msgspec
import numpy as np

from kvcache.events.book import EventBook, Told
from kvcache.events.log import FILES, HOST, Described, Entry
from kvcache.events.wire import BlockRemoved, BlockStored, CacheSpec, KVEvent
from kvcache.replica.hashing import PrefixHasher
from kvcache.weights import UNSAID, Lineage, Segments, Weights, followed_by
from tests.kvcache.events.mirror import Known

SIZE, CAPACITY = 4, 40


class Prompt:
    """A prompt of `pages` pages. `first` and `last` select a range of the pages."""

    def __init__(self, tokens: list[int], salt: str | None = None, segments: Segments = UNSAID) -> None:
        self.tokens = np.array(tokens, np.int32)
        self.hasher = PrefixHasher("sha256", SIZE, salt, (), segments)
        self.digests = self.hasher.digests(self.tokens, 0, len(tokens) // SIZE)

    def described(self, first: int, last: int) -> Described:
        tokens = self.tokens[first * SIZE : last * SIZE].tobytes()
        return [self.hasher], np.array([first]), np.array([last]), [tokens]

    def come(self, source: int, first: int, last: int) -> tuple[int, bool, np.ndarray]:
        return source, True, self.digests[first:last]

    def go(self, source: int, first: int, last: int) -> tuple[int, bool, np.ndarray]:
        return source, False, self.digests[first:last]

    def hashes(self, first: int, last: int) -> list[int]:
        return [int.from_bytes(digest.tobytes()[-8:], "big") for digest in self.digests[first:last]]


def book_of(ranks: int = 1) -> EventBook:
    return EventBook(ranks, CAPACITY, SIZE, CacheSpec("full_attention"))


def blocks(told: list[Told] | list[KVEvent], kind: type = BlockStored) -> list[list[int]]:
    events = [one.event if isinstance(one, Told) else one for one in told]
    return [event.block_hashes for event in events if isinstance(event, kind)]


def test_a_page_that_returns_reports_the_cached_pages_after_it_again() -> None:
    book, prompt, other = book_of(), Prompt([*range(40)]), Prompt([*range(12), *range(50, 78)])
    book.apply([prompt.described(0, 10), prompt.come(0, 0, 10), None])
    book.apply([other.described(3, 6), other.come(0, 3, 6), None])
    assert blocks(book.apply([prompt.go(0, 2, 3), None]), BlockRemoved) == [prompt.hashes(2, 3)]
    told = blocks(book.apply([prompt.described(2, 3), prompt.come(0, 2, 3), None]))
    assert told[0] == prompt.hashes(2, 3)
    assert sorted(told[1:]) == sorted([prompt.hashes(3, 10), other.hashes(3, 6)])


def test_a_page_reported_before_its_parent_is_reported_again_after_it() -> None:
    book, prompt = book_of(), Prompt([*range(40)])
    book.apply([prompt.described(5, 8), prompt.come(0, 5, 8), None])
    assert blocks(book.apply([prompt.described(0, 5), prompt.come(0, 0, 5)])) == [
        prompt.hashes(0, 5),
        prompt.hashes(5, 8),
    ]


def test_a_page_that_returns_to_a_tier_or_another_rank_reports_only_itself() -> None:
    book, prompt = book_of(2), Prompt([*range(40)])
    book.apply([prompt.described(0, 10), prompt.come(0, 0, 10), prompt.come(HOST, 0, 10), None])
    assert blocks(book.apply([prompt.come(1, 0, 3)])) == [prompt.hashes(0, 3)]
    assert blocks(book.apply([prompt.go(HOST, 0, 1), prompt.come(HOST, 0, 1)])) == [prompt.hashes(0, 1)]


def test_a_page_keeps_its_tokens_while_any_source_has_it() -> None:
    book, prompt = book_of(), Prompt([*range(24)], "salt")
    book.apply([prompt.described(0, 6), prompt.come(0, 0, 6), prompt.come(HOST, 0, 6), None])
    book.apply([prompt.go(0, 0, 6), None, prompt.come(FILES, 0, 6), prompt.go(HOST, 0, 6), None])
    (event,) = [told.event for told in book.apply([prompt.come(HOST, 0, 6), None])]
    assert isinstance(event, BlockStored)
    assert event.parent_block_hash is None
    assert event.token_ids == [*range(24)]
    assert event.extra_keys == [("salt",), None, None, None, None, None]
    book.apply([prompt.go(HOST, 0, 6), prompt.go(FILES, 0, 6)])
    again = book.apply([prompt.come(HOST, 0, 6)])[0].event  # The book has not forgotten the tokens yet.
    assert isinstance(again, BlockStored)
    assert again.token_ids == [*range(24)]
    book.apply([prompt.go(HOST, 0, 6), None])
    assert book._free_count == 4 * CAPACITY
    assert book._keys == {}


def test_the_description_of_a_page_that_never_came_is_forgotten() -> None:
    book, prompt = book_of(), Prompt([*range(40)])
    book.apply([prompt.described(3, 6), None])
    assert book._free_count == 4 * CAPACITY


def test_a_removed_page_and_pages_removed_right_after_it_are_one_event() -> None:
    book, prompt = book_of(), Prompt([*range(40)])
    book.apply([prompt.described(0, 10), prompt.come(0, 0, 10), None])
    one = (0, False, int(prompt.digests[9, -1]))
    told = book.apply([one, prompt.go(0, 7, 9), prompt.come(HOST, 0, 2), prompt.go(0, 5, 7)])
    assert blocks(told, BlockRemoved) == [[*prompt.hashes(9, 10), *prompt.hashes(7, 9)], prompt.hashes(5, 7)]


def test_removals_from_two_media_in_one_call_are_reported_for_each_medium() -> None:
    book, prompt = book_of(2), Prompt([*range(40)])
    sources = (0, HOST, 1, FILES)
    book.apply([prompt.described(0, 10), *(prompt.come(source, 0, 10) for source in sources), None])
    told = book.apply([prompt.go(source, at, at + 1) for at, source in enumerate(sources)])
    assert [(one.source, blocks([one], BlockRemoved)) for one in told] == [
        (source, [prompt.hashes(at, at + 1)]) for at, source in enumerate(sources)
    ]


def test_pages_that_return_together_are_reported_once() -> None:
    book, prompt, other = book_of(), Prompt([*range(40)]), Prompt([*range(12), *range(50, 78)])
    book.apply([prompt.described(0, 10), prompt.come(0, 0, 10), other.described(3, 6), other.come(0, 3, 6), None])
    book.apply([prompt.go(0, 2, 4), None])
    told = blocks(book.apply([prompt.described(2, 4), prompt.come(0, 2, 4), None]))
    assert told[0] == prompt.hashes(2, 3)
    assert sorted(told[1:]) == sorted([prompt.hashes(3, 10), other.hashes(3, 6)])


def test_pages_that_return_before_and_after_a_page_that_stayed_are_reported_in_order() -> None:
    book, prompt = book_of(), Prompt([*range(40)])
    book.apply([prompt.described(0, 10), prompt.come(0, 0, 10), None])
    book.apply([prompt.go(0, 2, 3), prompt.go(0, 5, 6), None])
    told = book.apply([prompt.described(2, 6), (0, True, prompt.digests[[2, 5]]), None])
    assert blocks(told) == [prompt.hashes(2, 3), prompt.hashes(3, 10)]


def counted_anew(book: EventBook) -> None:
    """Asserts that the running counts of the book equal a recount."""
    known = np.flatnonzero(book._described)
    refs = np.bincount(book._parent[known], minlength=len(book._refs))
    assert (refs[1:] == book._refs[1:]).all()
    for there, kids in zip(book._present, book._kids, strict=False):
        parents = book._parent[known[there[known]]]
        assert (np.bincount(parents, minlength=len(kids))[1:] == kids[1:]).all()


def test_the_whole_state_has_each_present_page_once_and_after_its_parent() -> None:
    rng = random.Random(0)
    for _ in range(60):
        book = book_of()
        prompts = [Prompt([rng.randrange(9) for _ in range(16)])]
        for kept in (4, 8, 8):
            prompts.append(Prompt([*prompts[0].tokens[:kept].tolist(), *[rng.randrange(9) for _ in range(16 - kept)]]))
        there: dict[int, set[int]] = {0: set(), HOST: set()}
        known = Known()
        for _ in range(40):
            prompt, source = rng.choice(prompts), rng.choice([0, HOST])
            chosen = sorted(rng.sample(range(4), rng.choice([1, 1, 2, 3])))
            hashes = [prompt.hashes(at, at + 1)[0] for at in chosen]
            some = [block not in there[source] for block in hashes]
            come = [at for at, new in zip(chosen, some, strict=True) if new == some[0]]
            there[source] ^= {hash_ for hash_, new in zip(hashes, some, strict=True) if new == some[0]}
            entries: list[Entry] = [prompt.described(at, at + 1) for at in come] if some[0] else []
            told = book.apply([*entries, (source, some[0], prompt.digests[come])])
            assert not some[0] or all(blocks(told).count(run) == 1 for run in blocks(told))
            known.take_up([msgspec.to_builtins(one.event) for one in told])
            known.whole()
            counted_anew(book)
            if rng.random() < 0.5:
                book.apply([None])
        book.apply([None])
        assert {0: set(known.there.get("GPU", ())), HOST: set(known.there.get("CPU", ()))} == there
        again = {0: set[int](), HOST: set[int]()}
        for event in book.state(0):
            source = 0 if event.medium == "GPU" else HOST
            before = event.parent_block_hash
            assert before not in there[source] or before in again[source]
            assert not again[source] & set(event.block_hashes)
            again[source] |= set(event.block_hashes)
        assert again == there
        assert {source: set(book.hashes(source).tolist()) for source in there} == there
        used = there[0] | there[HOST]
        ways = [prompt.hashes(0, 4) for prompt in prompts]
        continued = {way[at - 1] for way in ways for at in range(1, 4) if way[at] in used}
        assert 4 * CAPACITY - book._free_count == len(used | continued)


def test_pages_of_a_group_that_no_router_can_follow_are_not_reported() -> None:
    book = EventBook(1, CAPACITY, SIZE, CacheSpec("full_attention"), CacheSpec(None, is_told=False))
    prompt = Prompt([*range(40)])
    told = book.apply([prompt.described(0, 10), prompt.come(0, 0, 10), prompt.come(1, 1, 10), None])
    assert {(one.source, type(one.event)) for one in told} == {(0, BlockStored)}
    assert blocks([*book.state(0)]) == [prompt.hashes(0, 10)]
    told = book.apply([prompt.go(1, 1, 10), prompt.go(0, 9, 10), None])
    assert {(one.source, type(one.event)) for one in told} == {(0, BlockRemoved)}


def test_only_contents_of_the_current_weights_are_reported() -> None:
    weights = Weights("a")
    book = EventBook(1, CAPACITY, SIZE, CacheSpec("full_attention"), weights=weights)
    old = Prompt([*range(40)], segments=weights.now.segments)
    assert blocks(book.apply([old.described(0, 10), old.come(0, 0, 10), old.come(HOST, 0, 4), None])) == [
        old.hashes(0, 10),
        old.hashes(0, 4),
    ]
    assert not book.has_switched
    weights.switch("b")
    new = Prompt([*range(40)], segments=weights.now.segments)
    gone = book.apply([old.go(0, 9, 10), old.go(0, 8, 9), old.come(HOST, 4, 6), None])
    assert gone == []
    assert book.has_switched
    assert list(book.state(0)) == []
    told = book.apply([new.described(0, 3), new.come(0, 0, 3), old.go(0, 7, 8), new.go(0, 2, 3), None])
    assert [(type(one.event), one.event.block_hashes) for one in told] == [  # type: ignore[union-attr]
        (BlockStored, new.hashes(0, 3)),
        (BlockRemoved, new.hashes(2, 3)),
    ]
    weights.switch("a")
    book.apply([])
    assert blocks(list(book.state(0))) == [old.hashes(0, 7), old.hashes(0, 6)]
    anew = book.begun_anew()
    assert blocks(anew.apply([old.described(0, 2), old.come(0, 0, 2), new.described(0, 2), new.come(0, 0, 2)])) == [
        old.hashes(0, 2)
    ]


def test_pages_of_several_versions_are_reported_to_nobody() -> None:
    weights = Weights("a")
    book = EventBook(1, CAPACITY, SIZE, CacheSpec("full_attention"), weights=weights)
    first = weights.now.segments
    weights.switch("b")
    own = weights.gone_on(Lineage(first, 0), 2).segments
    behind = followed_by(first, 3, weights.version)
    whole = weights.gone_on(Lineage(first, 0), 0).segments
    weights.switch("a")
    for at, segments in enumerate((own, behind, whole)):
        prompt = Prompt([*range(at * 50, at * 50 + 24)], segments=segments)
        told = book.apply([prompt.described(0, 6), prompt.come(0, 0, 6), None])
        known = (2, 3, 0)[at]
        assert blocks(told) == ([prompt.hashes(0, known)] if known else [])
        assert blocks(book.apply([prompt.go(0, 0, 6), None]), BlockRemoved) == ([prompt.hashes(0, known)] * (known > 0))
