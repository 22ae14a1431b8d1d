"""Tests block tables that were changed in transit. The reader never accepts a page that the lease does not cover. There
are two managers with their exchanges, real NIXL, and a substitute for a model that notices every wrong byte. The
source also has the pages of a second prompt, which the changed tables name.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from kvcache import BlockTable, KVCacheError, LayerGroup, PagedKVCacheManager, TextContext
from kvcache.params import StateShape
from tests.kvcache.build import as_long_as, manager_of
from tests.kvcache.kv import KVTokens, kv_of
from tests.transfer.pull.test_ownership import Reader, Side
from transfer.pull.asking import Lent
from transfer.pull.exchange import PageExchange
from transfer.pull.replica import LeaseOver
from transfer.pull.seals import TableSeals, new_table_key
from transfer.pull.source import Source

SIZE, NEXT = 4, 7
GROUPS = LayerGroup("full", (0,)), LayerGroup("window", (1,), 6)
SHAPE = StateShape(2, 2, 1, 1, 1, 2, torch.int64, torch.int64)
PROMPT, ANOTHER = [*range(100, 139)], [*range(200, 239)]
STATES = {"states": SHAPE, "state_copies": 20, "state_every_pages": 1}
KINDS: dict[str, dict[str, Any]] = {
    "one table": {},
    "nothing cached": {"caching": False},
    "two shards": {"tp": 2},
    "a window": {"params": {"groups": GROUPS}},
    "a window and states": {"params": {"groups": GROUPS, **STATES}},
    "states": {"params": STATES},
}


def side_of(kind: type[Side], name: str, options: dict[str, Any]) -> Any:
    side = kind.__new__(kind)
    side.manager = manager_of(400, page_size=SIZE, layers=2, dtype=torch.int64, **options)
    side.exchange, side.events = PageExchange(side.manager, name), []
    return side


def run(manager: PagedKVCacheManager, context: TextContext) -> None:
    """Runs a step of a model that checks the KV and the state of every earlier token."""
    KVTokens(manager).run_contexts([context], manager.fetch([context]))
    if manager.states:
        states = manager.states[0]
        pages = states.pages_at([context.request_id], [context.start_idx])
        values = kv_of(context.tokens.tolist(), (context.cache_salt, context.extra_keys), "state")
        for tensor in states.blocks[0]:
            wanted = int(values[context.start_idx - 1]) if context.start_idx else 0
            assert (tensor[pages] == wanted).all(), f"the state after {context.start_idx} tokens is wrong"
            tensor[pages] = int(values[context.active_idx - 1])
        states.advance(pages, [context.active_idx])
    context.update(NEXT)
    manager.step([context])


def computed(manager: PagedKVCacheManager, name: str, prompt: list[int]) -> TextContext:
    context = TextContext(prompt, 256, name)
    manager.external_claim(name)
    for _ in as_long_as(lambda: context.start_idx < len(prompt)):
        context.set_token_indices(active_idx=min(len(prompt), context.start_idx + 3 * SIZE))
        assert manager.maybe_reserve(context)
        run(manager, context)
    return context


# ---- changes of a table in transit

Change = Callable[[random.Random, BlockTable, BlockTable], BlockTable]


def _with_ids(table: BlockTable, group: int, ids: list[int]) -> BlockTable:
    return replace(table, groups=(*table.groups[:group], tuple(ids), *table.groups[group + 1 :]))


def _of_group(change: Callable[[random.Random, list[int], list[int]], object]) -> Change:
    """Returns a change of a table. It calls `change` with the page ids of one random group, which `change` modifies in
    place, and with all page ids of the other table.
    """

    def changed(rng: random.Random, table: BlockTable, other: BlockTable) -> BlockTable:
        group = rng.randrange(len(table.groups))
        ids = list(table.groups[group])
        change(rng, ids, [page for pages in other.groups for page in pages])
        return _with_ids(table, group, ids)

    return changed


def _set(rng: random.Random, ids: list[int], value: int) -> None:
    if ids:
        ids[rng.randrange(len(ids))] = value


def _swap(rng: random.Random, ids: list[int], _: list[int]) -> None:
    if len(ids) > 1:
        a, b = rng.sample(range(len(ids)), 2)
        ids[a], ids[b] = ids[b], ids[a]


def _other_group(rng: random.Random, table: BlockTable, _: BlockTable) -> BlockTable:
    here, there = rng.randrange(len(table.groups)), rng.randrange(len(table.groups))
    ids = list(table.groups[here])
    _set(rng, ids, rng.choice(table.groups[there] or (1,)))
    return _with_ids(table, here, ids)


def _shorter(rng: random.Random, table: BlockTable, _: BlockTable) -> BlockTable:
    """Returns a consistent table of fewer tokens."""
    pages = rng.randrange(1, len(table.groups[0]))
    width = len(table.digests) // max(1, table.num_tokens // table.page_size)
    short = _with_ids(table, 0, list(table.groups[0][:pages]))
    return replace(short, num_tokens=pages * table.page_size, digests=table.digests[: pages * width])


def _later(rng: random.Random, table: BlockTable, _: BlockTable) -> BlockTable:
    """Returns a table that begins with a later page."""
    first = rng.randrange(1, len(table.groups[0]))
    width = len(table.digests) // max(1, table.num_tokens // table.page_size)
    late = _with_ids(table, 0, list(table.groups[0][first:]))
    return replace(late, first_page=first, digests=table.digests[first * width :])


def _shifted(rng: random.Random, table: BlockTable, _: BlockTable) -> BlockTable:
    """Returns a table whose ids are rotated or reversed, so that each id stands for other tokens."""
    ids = list(table.groups[0])
    return _with_ids(table, 0, ids[1:] + ids[:1] if rng.random() < 0.5 else ids[::-1])


def _field(**of: Callable[[random.Random, Any], Any]) -> Change:
    def changed(rng: random.Random, table: BlockTable, _: BlockTable) -> BlockTable:
        return replace(table, **{name: change(rng, getattr(table, name)) for name, change in of.items()})

    return changed


def _flipped(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return rng.randbytes(4)
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


CHANGES: dict[str, Change] = {
    "a page of the other request": _of_group(lambda rng, ids, other: _set(rng, ids, rng.choice(other))),
    "any page": _of_group(lambda rng, ids, _: _set(rng, ids, rng.randrange(400))),
    "a bit of a page id": _of_group(lambda rng, ids, _: _set(rng, ids, (ids or [1])[-1] ^ 1 << rng.randrange(9))),
    "two pages swapped": _of_group(_swap),
    "a page repeated": _of_group(lambda rng, ids, _: _set(rng, ids, rng.choice(ids or [1]))),
    "a page left out": _of_group(lambda rng, ids, _: ids and ids.pop(rng.randrange(len(ids)))),
    "a page more": _of_group(lambda rng, ids, other: ids.insert(rng.randrange(len(ids) + 1), rng.choice(other))),
    "a page of another group": _other_group,
    "groups exchanged": lambda _, table, __: replace(table, groups=table.groups[::-1]),
    "all pages of the other request": lambda _, table, other: replace(table, groups=other.groups),
    "one group of the other request": lambda rng, table, other: _with_ids(
        table, at := rng.randrange(len(table.groups)), list(other.groups[at])
    ),
    "the other's table with our digests": lambda _, table, other: replace(
        other, digests=table.digests, hash_algorithm=table.hash_algorithm, seals=table.seals
    ),
    "shorter": _shorter,
    "later": _later,
    "shifted": _shifted,
    "first page": _field(first_page=lambda rng, first: first + rng.choice((-1, 1, 2, 9))),
    "tokens": _field(num_tokens=lambda rng, count: count + rng.choice((-5, -4, -1, 1, 4))),
    "page size": _field(page_size=lambda rng, size: rng.choice((1, size // 2, 2 * size, 4 * size))),
    "digests": _field(digests=_flipped),
    "no digests": _field(digests=lambda *_: b"", hash_algorithm=lambda *_: ""),
    "hash": _field(hash_algorithm=lambda rng, _: rng.choice(("", "sha256", "xxh3_128", "md5"))),
    "kinds": _field(kinds=lambda rng, kinds: rng.choice(((), kinds[::-1], (*kinds, "full")))),
    "names": _field(
        request_id=lambda *_: "s", fingerprint=lambda *_: "another", replica_idx=lambda rng, _: rng.randrange(3)
    ),
    "no seal": _field(seals=lambda *_: ()),
    "a bit of the seal": _field(seals=lambda rng, seals: tuple(_flipped(rng, seal) for seal in seals)),
    "another's seal": lambda _, table, other: replace(table, seals=other.seals),
    "many seals": _field(seals=lambda rng, _: tuple(rng.randbytes(16) for _ in range(99))),
}


def changed(rng: random.Random, table: BlockTable, other: BlockTable) -> tuple[str, BlockTable]:
    names = rng.sample(list(CHANGES), 1 if rng.random() < 0.7 else 2)
    for name in names:
        try:
            table = CHANGES[name](rng, table, other)
        # The second change cannot be applied to the table that the first change has made.
        except (ValueError, IndexError):
            continue
    return " and ".join(names), table


def says(table: BlockTable) -> tuple[object, ...]:
    """Returns all fields of a table that decide which bytes are read for which tokens. The digests are left out,
    because readers compare them with their own digests.
    """
    return table.groups, table.num_tokens, table.page_size, table.first_page, table.hash_algorithm


# ---- pulls between two exchanges


class Pulled(NamedTuple):
    """The number of tables with each outcome."""

    refused_by_import: int
    refused_by_seal: int
    accepted: int


class Pair:
    """A source that holds two prompts, and a reader of one of the prompts."""

    def __init__(self, options: dict[str, Any]) -> None:
        options = {**options}
        self.source: Side = side_of(Side, "p", options)
        self.reader: Reader = side_of(Reader, "d", options)
        computed(self.source.manager, "r", PROMPT)
        computed(self.source.manager, "other", ANOTHER)
        self.offer, self.count = self.source.offer("r"), 0
        self.theirs, self.spent = self.source.offer("other"), False

    def again(self) -> Source:
        """Makes another lease after the previous lease was refused or read."""
        if self.spent:
            self.spent = False
            self.source.until(lambda: self.offer.lease.lease_id in self.over())
            self.source.events.clear()
            self.offer = self.source.offer("r")
        return self.offer

    def poll_until(self, condition: Callable[[], object]) -> None:
        def both() -> object:
            self.reader.poll()
            return condition()

        self.source.until(both)

    def over(self) -> set[int]:
        return {one.event.lease_id for one in self.source.of(LeaseOver)}  # type: ignore[union-attr]

    def pull(self, table: BlockTable, offer: Source) -> str:
        """Pulls with a table. Returns "refused by import", "refused by seal" or "accepted". For an accepted table,
        compares every byte.
        """
        source, reader, name = self.source, self.reader, f"d{self.count}"
        self.count += 1
        context = TextContext([*PROMPT, NEXT], 256, name)
        reader.manager.external_claim(name)
        try:
            pending = reader.manager.import_block_table(context, table)
        except KVCacheError:
            reader.manager.release(name)
            return "refused by import"
        assert pending is not None
        reader.exchange.pull(name, offer, pending, 30.0)
        event, proof = reader.end(source, name)
        reader.events.clear()
        self.spent |= offer == self.offer
        if event.error:
            assert proof is None
            assert f"{name!r}" in event.error
            assert "did not confirm that lease" in event.error, event.error
            reader.manager.cancel_import(pending)
        else:
            reader.manager.commit_import(context, pending, proof)
            assert reader.manager.maybe_reserve(context)
            run(reader.manager, context)  # compares every byte
        reader.manager.release(name)
        reader.manager.reset_prefix_cache()
        reader.manager.check()
        return "refused by seal" if event.error else "accepted"

    def close(self) -> None:
        for side in (self.source, self.reader):
            side.exchange.close()
            side.manager.check()
            side.manager.close()


@pytest.fixture(params=[*KINDS])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(KINDS[request.param])
    yield made
    made.close()
    assert made.reader.manager.num_held_blocks == 0


def pulls(pair: Pair, rounds: int, seed: int) -> Pulled:
    rng, counts = random.Random(seed), Counter[str]()
    assert pair.pull(pair.source.manager.block_table("r"), pair.again()) == "accepted"
    for _ in range(rounds):
        offer = pair.again()
        table, other = pair.source.manager.block_table("r"), pair.source.manager.block_table("other")
        name, damaged = changed(rng, table, other)
        outcome = pair.pull(damaged, offer)
        counts[outcome] += 1
        if outcome == "accepted":
            assert says(damaged) == says(table), name
    return Pulled(counts["refused by import"], counts["refused by seal"], counts["accepted"])


def test_a_table_that_was_changed_on_its_way_brings_no_byte_of_another_request(pair: Pair) -> None:
    found = pulls(pair, 150, seed=1)
    assert found.refused_by_seal > 20
    assert found.accepted  # A changed table is accepted if it names the same pages for the same tokens.


@pytest.mark.long
def test_thousands_of_changed_tables_bring_no_byte_of_another_request(pair: Pair) -> None:
    found = pulls(pair, 3000, seed=2)
    assert found.refused_by_seal > 600


def test_a_table_of_one_lease_is_refused_for_another_lease(pair: Pair) -> None:
    """A table of one lease is refused for a lease of another request, and for a later lease of the same request."""
    table = pair.source.manager.block_table("r")
    assert pair.pull(table, pair.theirs) == "refused by seal"
    before = pair.offer
    pair.source.exchange.revoke(before, "over")
    pair.source.until(lambda: before.lease.lease_id in pair.over())
    pair.offer = pair.source.offer("r")
    # The table names the same pages, but it was made before the new offer.
    assert pair.pull(table, pair.offer) == "refused by seal"
    offer = pair.again()
    assert pair.pull(pair.source.manager.block_table("r"), offer) == "accepted"


def chunks(pair: Pair, offer: Source, *, new_pages: bool) -> list[BlockTable]:
    """Returns the tables that the source would have made for the first request after each chunk."""
    table, found, told = pair.source.manager.block_table("r"), list[BlockTable](), 0
    width = len(table.digests) // (table.num_tokens // SIZE)
    for end in (12, 24, 28, table.num_tokens):
        first = told // SIZE if new_pages else 0
        part = replace(
            table,
            num_tokens=end,
            first_page=first,
            groups=(table.groups[0][first : -(-end // SIZE)],),
            digests=table.digests[first * width : end // SIZE * width],
        )
        seal = pair.source.exchange._seals.seal(offer.lease.lease_id, part)
        found.append(replace(part, seals=(seal,)))
        told = end
    return found


def pull_chunks(pair: Pair, offer: Source, tables: list[BlockTable], rng: random.Random) -> str:
    """Pulls chunk by chunk, or several chunks at once. Returns the outcome as `Pair.pull` does."""
    reader, name = pair.reader, f"c{pair.count}"
    pair.count, pair.spent = pair.count + 1, True
    context = TextContext([*PROMPT, NEXT], 256, name)
    reader.manager.external_claim(name)
    reader.exchange.open_pull(0, name, offer, 30.0)
    pending = None
    try:
        for table in tables:
            last = table is tables[-1]
            if pending is None:
                pending = reader.manager.import_block_table(context, table, partial=True)
                assert pending is not None
            else:
                reader.manager.extend_import(context, pending, table, last=last)
            if last or rng.random() < 0.6:
                reader.exchange.read(0, name, pending, last=last)
    except KVCacheError:
        reader.exchange.cancel_pull(0, name, "refused")
    event, proof = reader.end(pair.source, name)
    reader.events.clear()
    if event.error:
        assert proof is None
        assert "did not confirm that lease" in event.error or event.error == "refused", event.error
        if pending is not None:
            reader.manager.cancel_import(pending)
    else:
        assert pending is not None
        reader.manager.commit_import(context, pending, proof)
        assert reader.manager.maybe_reserve(context)
        run(reader.manager, context)
    reader.manager.release(name)
    reader.manager.reset_prefix_cache()
    reader.manager.check()
    return "refused by import" if event.error == "refused" else "refused by seal" if event.error else "accepted"


@pytest.mark.few(2)
@pytest.mark.parametrize("rounds", [60, pytest.param(1500, marks=pytest.mark.long)])
@pytest.mark.parametrize("new_pages", [False, True])
@pytest.mark.parametrize("pair", ["one table", "nothing cached", "two shards"], indirect=True)
def test_no_table_of_a_chunk_can_be_changed_either(pair: Pair, new_pages: bool, rounds: int) -> None:
    rng, counts = random.Random(4), Counter[str]()
    offer = pair.again()
    assert pull_chunks(pair, offer, chunks(pair, offer, new_pages=new_pages), rng) == "accepted"
    for _ in range(rounds):
        offer = pair.again()
        tables = chunks(pair, offer, new_pages=new_pages)
        at = rng.randrange(len(tables))
        name, damaged = changed(rng, tables[at], pair.source.manager.block_table("other"))
        outcome = pull_chunks(pair, offer, [*tables[:at], damaged, *tables[at + 1 :]], rng)
        counts[outcome] += 1
        assert outcome != "accepted" or says(damaged) == says(tables[at]), name
    assert counts["refused by seal"] > rounds // 8
    assert counts["accepted"]


@pytest.mark.parametrize("pair", ["one table", "two shards", "a window"], indirect=True)
def test_a_table_of_pages_that_were_asked_for_by_what_they_hold_cannot_be_changed_either(pair: Pair) -> None:
    rng, counts, source, reader = random.Random(5), Counter[str](), pair.source, pair.reader
    for at in range(60):
        context = TextContext([*PROMPT, NEXT], 256, "asked")
        wanted = reader.manager.contents.digests(context)
        reader.exchange.ask(0, f"ask {at}", source.exchange.address, source.exchange.engine_id(0), wanted)
        pair.poll_until(lambda: reader.of(Lent))
        (lent,) = (one.event for one in reader.of(Lent))
        assert isinstance(lent, Lent)
        assert lent.source is not None, lent.error
        assert lent.table is not None
        reader.events.clear()
        name, damaged = changed(rng, lent.table, source.manager.block_table("other")) if at else ("", lent.table)
        outcome = pair.pull(damaged, lent.source)
        counts[outcome] += 1
        assert outcome != "accepted" or says(damaged) == says(lent.table), name
        reader.exchange.refuse(0, lent.source, "it was tried")
        pair.poll_until(lambda: not source.exchange.lending.num_leases)
    assert counts["refused by seal"] > 6
    assert counts["accepted"]


# ---- the seal itself


@pytest.mark.parametrize("rounds", [20_000, pytest.param(300_000, marks=pytest.mark.long)])
def test_a_seal_is_of_one_lease_one_key_and_one_table(rounds: int) -> None:
    rng = random.Random(3)
    made: list[tuple[BlockTable, BlockTable]] = []
    seals, held = TableSeals(new_table_key()), 0x1234567812345678
    for options in KINDS.values():
        manager = manager_of(400, page_size=SIZE, layers=2, dtype=torch.int64, **options)
        for name, prompt, lease in (("r", PROMPT, held), ("other", ANOTHER, held + 1)):
            computed(manager, name, prompt)
            manager.lease(name, seal=lambda table, lease=lease: seals.seal(lease, table))
        made.append((manager.block_table("r"), manager.block_table("other")))
        manager.close()
    counts = Counter[bool]()
    for at in range(rounds):
        table, other = made[at % len(made)]
        name, damaged = changed(rng, table, other)
        is_sealed = seals.seal(held, damaged) in damaged.seals
        same = says(damaged) == says(table) and damaged.digests[-16:] == table.digests[-16:]
        assert is_sealed == (same and damaged.seals == table.seals), name
        assert TableSeals(new_table_key()).seal(held, damaged) not in damaged.seals
        assert seals.seal(held + 2, damaged) not in damaged.seals
        counts[is_sealed] += 1
    assert counts[False] > rounds // 2
    assert counts[True] > rounds // 50
