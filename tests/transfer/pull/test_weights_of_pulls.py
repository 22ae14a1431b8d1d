"""Pulls between two processes whose weights change at different moments, with real NIXL.

The source and the reader switch in each phase of a pull. A pull that has begun ends in its own version, or it fails and
both sides get all pages back. It is refused before any page is asked for if the versions differ then.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest

from kvcache import BlockTable, BlockTableMismatchError, KVCacheError, TextContext, WeightsChangedError
from kvcache.weights import Running, named_version, version_bytes
from tests.forked import start
from tests.transfer.pull.weights_source import FIRST, PROMPT, Weighted, serve, values_of
from transfer.errors import PullFailedError
from transfer.pull.asking import Lent
from transfer.pull.pull_state import PullEvent
from transfer.pull.seals import TableSeals
from transfer.pull.source import Source

RUNNING: tuple[Running, ...] = get_args(Running)
PHASES = ("leased", "offered", "claimed", "asked", "some pages read", "all pages read", "committed")
_numbers = itertools.count(1)


class Pairs:
    """A source in its own process, a reader in this one, and requests that go through the phases of a pull."""

    def __init__(self, caching: bool) -> None:
        self.process, self.pipe = start(serve, f"p-{caching}", {"caching": caching})
        self.address, self.engine = self.pipe.recv()
        self.reader = Weighted(f"d-{caching}", caching=caching, exchange={"lend": 1.0})
        self.caching = caching

    def tell(self, *command: Any) -> Any:
        """Returns what the source's method returns."""
        self.pipe.send(command)
        while not self.pipe.poll(1e-3):
            self.reader.poll()
        answer = self.pipe.recv()
        if isinstance(answer, KVCacheError):
            raise answer
        return answer

    def close(self) -> None:
        self.reader.exchange.close()
        self.reader.manager.close()
        self.process.kill()
        self.process.join()

    def all_given_back(self) -> None:
        self.reader.until(lambda: self.tell("held") == (0, 0) and not self.reader.manager.num_held_blocks)
        self.reader.manager.check()
        self.reader.events.clear()


@pytest.fixture(scope="module", params=[True, False], ids=["caching", "plain"])
def pairs(request: pytest.FixtureRequest) -> Iterator[Pairs]:
    made = Pairs(request.param)
    yield made
    made.close()


class Pull:
    """One request that goes through the phases, with a switch in one of them."""

    def __init__(self, pairs: Pairs, in_chunks: bool) -> None:
        self.pairs, self.reader, self.in_chunks = pairs, pairs.reader, in_chunks
        self.old, self.new = next(_numbers), next(_numbers)
        self.name, self.salt = f"r{self.old}", f"salt {self.old}"
        for switch in (lambda: pairs.tell("switch", self.old), lambda: self.reader.switch(self.old)):
            switch()
        pairs.tell("begin", self.name, self.salt, FIRST if in_chunks else len(PROMPT))
        self.context = TextContext([*PROMPT, 1], 32, self.name, cache_salt=self.salt)
        self.pending: Any = None
        self.event: PullEvent | None = None

    def table(self, *, full_pages: bool) -> BlockTable:
        return self.pairs.tell("table", self.name, full_pages)

    # ---- what leads to each phase

    def leased(self) -> None:
        self.source: Source = self.pairs.tell("lease", self.name)

    def offered(self) -> None:
        self.first = self.table(full_pages=self.in_chunks)
        self.last = self.first

    def claimed(self) -> None:
        self.reader.manager.external_claim(self.name)
        self.pending = self.reader.manager.import_block_table(self.context, self.first, partial=self.in_chunks)
        assert self.pending is not None

    def asked(self) -> None:
        self.reader.exchange.open_pull(0, self.name, self.source, 60.0)

    def some_pages_read(self) -> None:
        if self.in_chunks:
            self.reader.exchange.read(0, self.name, self.pending, last=False)
            puller = self.reader.exchange.threads[0].replica.ranks[0].puller
            self.reader.until(lambda: not puller.is_reading and puller.num_posted >= 0)

    def all_pages_read(self) -> None:
        if self.in_chunks:
            self.pairs.tell("go_on", self.name)
            self.last = self.table(full_pages=False)
            self.reader.manager.extend_import(self.context, self.pending, self.last, last=True)
        self.pairs.tell("overwrite_free")
        self.reader.exchange.read(0, self.name, self.pending, last=True)
        ended = self.reader.until

        def mine() -> list[Any]:
            return [one for one in self.reader.of(PullEvent) if one.event.key == self.name and one.event.safe]  # type: ignore[union-attr]

        ended(mine)
        (happened,) = mine()
        self.event, self.proof = happened.event, happened.proof
        assert self.event is not None
        if self.event.error:
            raise PullFailedError(self.event.error)

    def committed(self) -> None:
        pages = self.pending.parts[0].dst_pages.tolist()
        self.reader.manager.commit_import(self.context, self.pending, self.proof)
        assert values_of(self.reader, pages) == {self.old}, "the pages are of one version, that of the lease"

    def run(self, phase: str, where: str, running: Running) -> str:
        """Goes through the phases, and switches in one of them. Returns why the pull failed, or an empty text."""
        try:
            for at in PHASES:
                getattr(self, at.replace(" ", "_"))()
                if at == phase and where == "source":
                    self.pairs.tell("switch", self.new, running)
                elif at == phase:
                    self.reader.switch(self.new, running)
        except (KVCacheError, PullFailedError) as error:
            return str(error)
        return ""

    def end(self, error: str) -> None:
        """Gives everything back on both sides."""
        manager, exchange = self.reader.manager, self.reader.exchange
        if (0, self.name) in exchange._pulls:
            exchange.cancel_pull(0, self.name, error or "over")
        if self.pending is not None and not self.pending.closed:
            manager.cancel_import(self.pending)
        if manager.contains(self.name):
            manager.release(self.name)
        self.pairs.tell("end", self.name, error or "over")
        self.pairs.all_given_back()


def found(side: Weighted, version: int, salt: str) -> int:
    """Returns how many tokens of the prompt a new request of this version finds cached."""
    side.switch(version)
    context = TextContext([*PROMPT, 1], 32, cache_salt=salt)
    with side.manager.claim(context):
        assert side.manager.maybe_reserve(context)
        return context.start_idx


@pytest.mark.parametrize("in_chunks", [False, True], ids=["whole", "in chunks"])
@pytest.mark.parametrize("running", RUNNING)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("where", ["source", "reader"])
def test_a_switch_in_each_phase_ends_a_pull_in_its_own_version_or_not_at_all(
    pairs: Pairs, where: str, phase: str, running: Running, in_chunks: bool
) -> None:
    pull = Pull(pairs, in_chunks)
    error = pull.run(phase, where, running)
    begun = PHASES.index(phase) >= PHASES.index("claimed")
    old, new = (named_version(version_bytes("", version)) for version in (pull.old, pull.new))
    if where == "reader" and not begun:
        assert error == (
            f"request {pull.name!r}: the block table has tokens of the weights {old}, but this request runs under {new}"
        )
        assert pull.pending is None, "no page was reserved"
        assert not pairs.reader.exchange.open_pulls, "and none was asked for"
    elif where == "source" and in_chunks and phase not in ("all pages read", "committed"):
        # The rest of the prompt is of other weights, or the request begins anew or is stopped.
        assert error
        assert pull.name in error
    elif where == "source" and phase == "leased":  # its last page may have tokens of both versions
        assert "weights" in error
        assert pull.name in error
    elif where == "reader" and in_chunks and not pairs.caching and phase not in ("all pages read", "committed"):
        assert "has no digests, which would tell its weights" in error
    else:
        assert error == ""
        check_after(pull, where, running)
    pull.end(error)
    if pairs.caching and not (running == "recompute" and where == "reader"):  # that takes the room of what was cached
        held = 16 if not error and (where == "source" or phase == "committed") else 0
        assert found(pairs.reader, pull.old, pull.salt) == held
        assert found(pairs.reader, pull.new, pull.salt) == 0, "nothing of the earlier version is found"
    pairs.all_given_back()


def check_after(pull: Pull, where: str, running: Running) -> None:
    """Checks what becomes of a committed request, if the weights of the reader have changed."""
    manager = pull.reader.manager
    if where == "source":
        old = version_bytes("", pull.old)
        assert [version for *_, version in manager.lineage(pull.name)] == [old]
    elif running == "stop":
        with pytest.raises(WeightsChangedError, match=pull.name):
            manager.maybe_reserve(pull.context)
    else:
        assert manager.maybe_reserve(pull.context)
        assert pull.context.start_idx == (18 if running == "finish" else 0)


def test_a_prefix_of_another_version_is_never_lent(pairs: Pairs) -> None:
    """The digests of a question carry the version, at both sides of an exchange."""
    if not pairs.caching:
        pytest.skip("nothing is cached, so nothing is lent")
    pull = Pull(pairs, in_chunks=False)
    pairs.tell("release", pull.name)
    reader, questions = pairs.reader, itertools.count()

    def lent() -> Lent:
        key = f"question {next(questions)} of {pull.name}"
        wanted = reader.manager.contents.digests(TextContext([*PROMPT, 1], 32, cache_salt=pull.salt))
        reader.exchange.ask(0, key, pairs.address, pairs.engine, wanted, 30.0)
        answers: list[Lent] = []

        def answered() -> object:
            answers[:] = [one.event for one in reader.of(Lent) if one.event.key == key]  # type: ignore[misc,union-attr]
            return answers

        reader.until(answered)
        assert not answers[0].error
        return answers[0]

    reader.switch(pull.new)
    assert lent().source is None, "of these weights, the source has none"
    reader.switch(pull.old)
    pairs.tell("switch", pull.new)
    answer = lent()  # a source that has switched still lends what the reader's version can use
    assert answer.source is not None
    assert answer.table is not None
    reader.switch(pull.new)
    with pytest.raises(BlockTableMismatchError, match="weights"):
        pending(reader, answer.table, pull.salt)
    reader.exchange.refuse(0, answer.source, "its weights have changed")
    reader.switch(pull.old)
    again: list[Lent] = []
    reader.until(lambda: again or again.extend(one for one in [lent()] if one.source is not None))
    assert again[0].source is not None
    name, opened = pending(reader, again[0].table, pull.salt)
    reader.exchange.pull(name, again[0].source, opened, 60.0)
    event, proof = reader.end(reader, name)
    assert not event.error
    assert values_of(reader, opened.parts[0].dst_pages.tolist()) == {pull.old}
    reader.manager.cancel_import(opened)
    reader.manager.release(name)
    assert proof is not None
    pull.end("")


def pending(reader: Weighted, table: Any, salt: str) -> tuple[str, Any]:
    context = TextContext([*PROMPT, 1], 32, cache_salt=salt)
    reader.manager.external_claim(context.request_id)
    try:
        opened = reader.manager.import_block_table(context, table)
    except KVCacheError:
        reader.manager.release(context.request_id)
        raise
    assert opened is not None
    return context.request_id, opened


def test_a_table_whose_version_was_changed_on_its_way_is_not_read(pairs: Pairs) -> None:
    """Only the seal tells it if the table has no digests."""
    pull = Pull(pairs, in_chunks=False)
    pull.leased()
    pull.offered()
    version = version_bytes("", pull.new)
    assert version is not None
    pull.reader.switch(pull.new)
    pull.first = msgspec.structs.replace(pull.first, weights=version)
    if pairs.caching:
        with pytest.raises(BlockTableMismatchError, match="version of the weights"):
            pull.claimed()
        pull.end("its digests are of another version")
        return
    pull.claimed()
    pull.asked()
    with pytest.raises(PullFailedError, match="did not confirm that lease"):
        pull.all_pages_read()
    pull.end("its seal is of another version")


# ---- each place that carries the version


def tells_nothing(*_: Any) -> bytes:
    return b""


def seal_without_version(self: TableSeals, lease_id: int, table: BlockTable) -> bytes:
    return SEAL(self, lease_id, msgspec.structs.replace(table, weights=b""))


SEAL = TableSeals.seal


def test_without_the_version_in_the_seal_a_changed_table_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TableSeals, "seal", seal_without_version)
    source, reader = (Weighted(name, caching=False) for name in "pd")
    source.switch(1)
    reader.switch(2)
    source.compute(tokens=PROMPT, value=1)
    offer, table = source.offer(), source.manager.block_table("r")
    name, opened = pending(reader, msgspec.structs.replace(table, weights=(2).to_bytes(16, "big")), "")
    reader.exchange.pull(name, offer, opened, 60.0)
    event, _ = reader.end(source, name)
    assert not event.error
    assert values_of(reader, opened.parts[0].dst_pages.tolist()) == {1}, "a request of version 2 has these pages"
    for side in (source, reader):
        side.exchange.close()
        side.manager.close()
