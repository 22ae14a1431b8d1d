"""After each call, records the manager's changes and compares them with the changes that the plain model allows. The
model does not predict the ids of pages. The manager says which pages a request has and which contents are found. The
model checks the number, the order and the bytes of these pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from kvcache import TextContext
from tests.kvcache.kv import KVTokens, kv_of, kv_of_group
from tests.kvcache.random_model import seam
from tests.kvcache.random_model.matrix import LONGEST, PAGE_SIZE, ROWS, Built
from tests.kvcache.random_model.orders import Orders
from tests.kvcache.random_model.plain import (
    Content,
    Digest,
    Names,
    Replica,
    Request,
    Table,
    content,
    first_in_order,
    named_of,
    tokens_of,
)
from tests.kvcache.random_model.switches import Switches


class Books:
    """A manager and its model, in the state after the last call.

    Attributes:
        foretold: whether the model predicts what is evicted. It does not if states share memory with pages, because
            evictions then depend on where the pages lie.
        lenient: True after an interrupt, until none of its effects is left. During that time, published pages of
            running requests need not be found, and eviction orders are taken from the manager.
    """

    def __init__(self, built: Built, names: Names) -> None:
        self.manager, self.built, self.names = built.manager, built, names
        self.features = built.features
        self.kv = KVTokens(self.manager)
        several = "imports" in self.features and len(self.manager.layer_tables.tables) > 1
        self.foretold = not several and not {"states in slabs", "late copies"} & self.features
        self.lenient = False
        self.host_foretold = not {"files", "objects", "lends", "late copies"} & self.features
        self.blurred = False  # True if a call has been interrupted.
        self.orders = Orders(built, names)
        tables = [Table(one.group, number) for number, one in enumerate(self.manager.layer_tables.tables)]
        self.tables = tables
        count = self.manager.num_replicas
        self.replicas = [
            Replica(
                tables,
                self.manager.total_num_pages // count,
                built.caching,
                self.orders.order(at),
                slab_pages=self.manager.slab_pages,
                names=names,
            )
            for at in range(count)
        ]
        self.used: dict[Digest, int] = {}  # The clock value of each content's last use in host memory.
        self.host: dict[Digest, int] = {}
        self.clock = 0
        self.seen_evictions = [0] * count
        self.seen_state_evictions = [0] * count
        self.seen_right: set[tuple[int, int, Digest]] = set()
        self.switches = Switches()
        self.drafts: set[object] = set()  # The tokens and names for which the names of draft pages are known.

    @property
    def requests(self) -> dict[str, Request]:
        return {name: one for replica in self.replicas for name, one in replica.requests.items()}

    # ---- after a call

    def learn(
        self,
        *,
        batch: Sequence[Request] = (),
        stepped: Sequence[Request] = (),
        leaving: Sequence[tuple[int, int]] | None = None,
        reset: bool = False,
    ) -> None:
        """Records what a call has done.

        Args:
            batch: requests whose pages may have left their rows, in order.
            stepped: the requests of the step, if the call was one.
            leaving: for each replica, the pages that were given back, in the order in which they may become idle. None
                stands for the order in which rows give pages back.
            reset: whether the call has made the manager forget all content.
        """
        self.clock += 1
        self.blurred |= self.lenient
        for at, replica in enumerate(self.replicas):
            mine = [(nth, one) for nth, one in enumerate(batch) if one.replica == at]
            before = {page: place for nth, one in mine for page, place in self._places(one, nth)}
            before |= self._gone.get(at, {})
            for name, one in replica.requests.items():
                one.rows = seam.rows(self.manager, name)
            left = None if leaving is None else [page for of, page in leaving if of == at]
            self._learn_pages(at, replica, before, left, reset=reset)
            if self.manager.states:
                self._learn_states(at, replica, stepped, reset=reset)
            for name, one in replica.requests.items():
                one.published = seam.published(self.manager, name)
        self._gone.clear()
        self.switches.given_back.clear()
        self._learn_host(reset=reset)
        # The next call's uses must count as later than the pages that this call has added.
        self.clock += 1
        assert self.manager.num_free_blocks == sum(replica.free() for replica in self.replicas)

    _gone: dict[int, dict[int, tuple[int, ...]]] = {}  # noqa: RUF012 - see `leave`

    def leave(self, one: Request) -> None:
        replica = self.replicas[one.replica]
        del replica.requests[one.name]
        self._gone = {one.replica: dict(self._places(one))}

    def gives_back(self, one: Request) -> None:
        """Records that a request is about to give back its pages and to get other pages."""
        self._gone = {one.replica: dict(self._places(one))}
        digest_of = {page: digest for digest, page in self.replicas[one.replica].there.items()}
        pages = {page for row in one.rows for page in row.values()}
        self.switches.gives_back(one.replica, (digest_of[page] for page in pages if page in digest_of))

    def touch_found(self, one: Request) -> None:
        """Records the use of the state copy from which a request continues."""
        what = content(0, one.tokens, one.named, one.context.start_idx // PAGE_SIZE - 1)
        self.touch_state(one.replica, self.names.digest_of[what])

    def _places(self, one: Request, nth: int = 0) -> Iterable[tuple[int, tuple[int, ...]]]:
        """Yields each page of a request with a key. The keys give the order in which pages become idle: the last pages
        of the request first, and a full first table after the other tables.
        """
        is_prefix = self.tables[0].is_prefix
        for number, row in enumerate(one.rows):
            for column, page in row.items():
                yield page, (nth, is_prefix and number == 0, -column, -number)

    def _learn_pages(
        self,
        at: int,
        replica: Replica,
        before: dict[int, tuple[int, ...]],
        leaving: list[int] | None,
        *,
        reset: bool,
    ) -> None:
        leased = {page for _, parts in seam.leased(self.manager, at) for part in parts for page in part}
        replica.beside = leased | seam.written(self.manager, at)
        if replica.slab_pages:
            replica.slabs = self.manager.states[at].num_held
        now, was = seam.found(self.manager, at), replica.there
        self.switches.came(at, now.keys() - was.keys())
        self._same_rows(replica, {page: digest for digest, page in now.items()})
        for digest in now.keys() - was.keys():
            assert digest in self.names.content_of, "a page is found whose content nobody has computed"
        for digest, page in now.items():
            assert was.get(digest, page) == page or replica.slab_pages or self.lenient or digest not in replica.there
            if (at, page, digest) not in self.seen_right:
                self.same_bytes(at, page, self.names.content_of[digest])
        self.seen_right = {one for one in self.seen_right if one[0] != at} | {
            (at, page, digest) for digest, page in now.items()
        }
        gone = was.keys() - now.keys()
        replica.there = now
        if self.lenient:
            self.orders.begin_anew(replica, seam.idle(self.manager, at))
        elif reset:
            assert not now, "content of before a reset can still be found"
            replica.order.clear()
        else:
            self._follow_order(at, replica, (was, gone), before, leaving)
        evictions = seam.evicted(self.manager, at)
        if not reset and not self.lenient:
            more = evictions - self.seen_evictions[at]
            assert more == len(gone) or (more > len(gone) and self._comes_back), f"{more} evictions, {len(gone)} gone"
            replica.evicted += len(gone)
            self._kept_below(replica, gone)
        self.seen_evictions[at] = evictions

    @property
    def _comes_back(self) -> bool:
        """Returns whether one call may evict pages and bring the same pages back."""
        return "host" in self.features

    def _follow_order(
        self,
        at: int,
        replica: Replica,
        changed: tuple[dict[Digest, int], set[Digest]],
        before: dict[int, tuple[int, ...]],
        leaving: list[int] | None,
    ) -> None:
        """Updates the eviction order: held pages leave the order and idle pages join it. Checks that the evicted pages
        were the first ones.
        """
        was, gone = changed
        held, order, now = replica.holders().keys() | replica.beside, replica.order, replica.there
        for digest in [one for one in order if now.get(one) in held]:
            order.remove(digest)
        page_of = was | now
        listed = {*order}
        idle = [one for one in page_of if one not in listed and (one in gone or page_of[one] not in held)]
        if leaving is not None:
            idle.sort(key=lambda one: leaving.index(page_of[one]) if page_of[one] in leaving else -1)
        else:
            idle.sort(key=lambda one: before.get(page_of[one], (1 << 30,)))
        for digest in idle:
            assert digest not in gone or digest in was, "a page was evicted that no lookup has found before"
            order.append(digest)
        self.switches.sort(at, order, idle)
        full = replica.num_pages == len(held) + len({*now.values()} - held)
        assert not gone or replica.slab_pages or full or "late copies" in self.features, (
            "a page was evicted while another one was fresh"
        )
        left = {*gone}
        for _ in gone:
            digest = first_in_order(order) if self.orders.is_exact(at) and self.foretold else next(iter(left))
            assert digest in left, f"{self._said(left)} was evicted, but {self._said([digest])} comes first"
            left.remove(digest)
            order.remove(digest)
            self.orders.forget(replica, digest)

    def _said(self, digests: Iterable[Digest]) -> str:
        return str([self.names.content_of.get(one) for one in digests])

    def _same_rows(self, replica: Replica, digest_of: dict[int, Digest]) -> None:
        """Checks that each findable page in a row has the content of its block. Any other page must belong to one
        request only, and its block must not be full and published.
        """
        holders = replica.holders()
        for one in replica.requests.values():
            tokens, named = one.tokens, one.named
            full = one.cached // PAGE_SIZE if replica.caching and not one.unsure and not one.private else 0
            self.learn_drafts(one)
            for table, row in zip(self.tables, one.rows, strict=True):
                for column, page in row.items():
                    digest = digest_of.get(page)
                    if digest is not None:
                        if not table.ahead:
                            self.names.learn(digest, table.content(tokens, named, column))
                        what = self.names.content_of[digest]
                        assert table.holds(what, tokens, named, column), f"{one.name}: page {page} is that of {what}"
                    else:
                        # After an interrupt, two requests may share a page that no lookup finds any more. Forks may
                        # share a draft page until one of them has filled the next page.
                        alone = holders[page] == 1 or one.unsure or one.private or not replica.caching
                        unnamed = column >= full - table.ahead or (table.ahead > 0 and column in one.unnamed)
                        assert alone or (table.ahead and unnamed), (
                            f"{one.name}: page {page} is held by another request, too"
                        )
                        assert unnamed, (
                            f"{one.name}: page {column} of table {table.number} is full, but no lookup finds it"
                        )

    def learn_drafts(self, one: Request) -> None:
        """Learns the names of a request's draft pages, and of its states beside them. A row does not tell them: forks
        that go on with different tokens may share a page, which has the name of the one that published it.
        """
        full = [token for token in one.tokens if token >= 0]
        full = full[: len(full) // PAGE_SIZE * PAGE_SIZE]
        drafts = [table for table in self.tables if table.ahead]
        if not drafts or (known := (tuple(full), one.named)) in self.drafts:
            return
        self.drafts.add(known)
        told = TextContext([*full, 0], LONGEST + 9, "told", cache_salt=one.named[0], extra_keys=one.named[1])
        every = seam.digests(self.manager, told) if self.built.caching else ()
        if every and self.tables[0].ahead:
            for column, digest in enumerate(seam.token_digests(self.manager, told)):
                self.names.learn(digest, content(0, full, one.named, column))
        for table in drafts if every else ():
            for column, digest in enumerate(every[table.number][: -table.ahead]):
                self.names.learn(digest, table.content(full, one.named, column))

    def same_bytes(self, at: int, page: int, what: Content) -> None:
        """Checks on each shard that a page has the bytes of its tokens."""
        for shard, blocks in enumerate(self.manager.device_tensors[at]):
            if blocks.dtype.itemsize < 8:
                return
            values = self.values(what, shard)
            there = blocks[page].cpu().numpy()
            assert (there == values[None, None, :, None, None]).all(), f"page {page} does not hold {what}"

    def values(self, what: Content, shard: int) -> np.ndarray:
        number, tokens = int(str(what[0])), tokens_of(what)
        part, table = (shard, number) if number else shard, self.tables[number]
        values = kv_of_group(tokens, named_of(what), part, table.group)
        return values[: len(tokens) - table.ahead * PAGE_SIZE][-PAGE_SIZE:]

    # ---- states

    def _learn_states(self, at: int, replica: Replica, stepped: Sequence[Request], *, reset: bool) -> None:
        states = self.manager.states[at]
        now, was = seam.kept(self.manager, at), replica.kept
        for digest in now.keys() - was.keys():
            self.same_state(at, now[digest], digest)
        gone, mine = was.keys() - now.keys(), [one for one in stepped if one.replica == at]
        more = states.pool.evictions - self.seen_state_evictions[at]
        self.seen_state_evictions[at] += more
        replica.kept = {digest: now[digest] for digest in {**was, **now} if digest in now}
        if reset:
            assert not now, "a copy of a state outlives a reset"
        if reset or self.lenient:
            return
        evicted = gone - {one.passing for one in mine}
        plain = not self.blurred and "imports" not in self.features  # Imports hold copies for some time.
        if self.foretold and plain and len(mine) < 2 and all(one.surely for one in mine):
            assert more == len(evicted), f"{more} states evicted, {len(evicted)} are gone"
            if not self.orders.hinted:
                lent = seam.lent_states(self.manager, at)
                oldest = [one for one in was if one in evicted or not (one in gone or was[one] in lent)]
                assert {*oldest[:more]} == evicted, "the newest state was evicted"
        assert len(mine) > 1 or 0 <= len(gone) - more <= len(mine), f"{more} states evicted, {len(gone)} are gone"
        for one in mine:
            self._state_stays(at, replica, one, {*was}, alone=len(mine) == 1)

    def touch_state(self, at: int, digest: Digest) -> None:
        """Records the use of a state copy."""
        replica = self.replicas[at]
        if digest in replica.kept:
            replica.kept[digest] = replica.kept.pop(digest)

    def _state_stays(self, at: int, replica: Replica, one: Request, was: set[Digest], *, alone: bool) -> None:
        """Records that a copy of a state at the end of a page is kept, if there is room. The new copy replaces a
        passing copy of the same request.
        """
        start = one.cached
        if start % PAGE_SIZE or not replica.caching or one.private:
            return
        # The step filled no page: a prefix hit ends here, or the step has removed all drafted tokens.
        if start // PAGE_SIZE <= one.published:
            return
        digest = self.names.digest_of[content(0, one.tokens, one.named, start // PAGE_SIZE - 1)]
        room = len(replica.requests) < ROWS + self.built.copies
        if self.foretold and alone and room and not self.manager.num_leased_blocks and self.plain_states(at):
            assert digest in replica.kept, f"{one.name}: no copy of its state after {start} tokens"
        self.touch_state(at, digest)
        spacing = self.built.every * PAGE_SIZE
        stays = start in (one.ends or ()) or bool(spacing and start % spacing == 0)
        made = digest in replica.kept and digest not in was
        one.passing = digest if not stays and (made or not alone or one.passing == digest) else None
        # If several requests of the batch end at the same content, any of them may have made the copy.
        one.surely = alone

    def plain_states(self, at: int) -> bool:
        """Returns whether exactly one state page is held for each claimed request."""
        return self.manager.states[at].num_held == len(self.replicas[at].requests)

    def same_state(self, at: int, page: int, digest: Digest) -> None:
        what = self.names.content_of[digest]
        wanted = int(kv_of(tokens_of(what), named_of(what), "state")[-1])
        for tensor in chain.from_iterable(self.manager.states[at].blocks):
            assert (tensor[page] == wanted).all(), f"state page {page} is not that after {what}"

    # ---- host memory

    def use(self, digests: Iterable[Digest]) -> None:
        """Records the use of these contents, in host memory too."""
        for digest in digests:
            self.used[digest] = self.clock

    def _learn_host(self, *, reset: bool) -> None:
        if "host" not in self.features:
            return
        now = seam.in_host(self.manager)
        for digest in now.keys() - self.host.keys():
            self._same_slot(now[digest], self.names.content_of[digest])
            self.used[digest] = self.clock
        gone, held = self.host.keys() - now.keys(), seam.host_held(self.manager)
        if gone and self.host_foretold and not reset and not self.lenient:
            stays = [one for one, slot in now.items() if slot not in held]
            early = {one for one in gone if any(self._leaves_before(other, one) for other in stays)}
            assert not early, f"{self._said(early)} was evicted from the host before an older page"
        self.host = now

    def _leaves_before(self, one: Digest, other: Digest) -> bool:
        """Returns whether host memory evicts one content before another: the first content is older, or it is as old
        and comes later in a prompt. A batch may use pages of several requests at the same time. The order of these
        pages is not specified.
        """
        if self.used[one] != self.used[other]:
            return self.used[one] < self.used[other]
        later, earlier = self.names.content_of[one], self.names.content_of[other]
        return len(later) > len(earlier) and later[: len(earlier)] == earlier

    def _kept_below(self, replica: Replica, gone: set[Digest]) -> None:
        """Checks that evicted content is in host memory, if the host was never full."""
        slots = self.manager.total_num_host_pages
        if slots and len(self.names.content_of) < slots and not {"lends"} & self.features:
            lost = gone - seam.in_host(self.manager).keys() - replica.there.keys()
            assert not lost, f"{self._said(lost)} was evicted, and is not in the host"

    def _same_slot(self, slot: int, what: Content) -> None:
        """Checks that a slot has the bytes of the content, in any order."""
        for shard, memory in enumerate(
            seam.host_memory(self.manager) if self.manager.params.dtype.itemsize == 8 else ()
        ):
            there = np.sort(memory[slot].numpy().view(np.int64))
            values = np.sort(np.repeat(self.values(what, shard), len(there) // PAGE_SIZE))
            assert (there == values).all(), f"slot {slot} of the host does not hold {what}"

    def everything_right(self) -> None:
        """Checks the bytes of all pages and states that a lookup can find."""
        for at, replica in enumerate(self.replicas):
            for digest, page in replica.there.items():
                self.same_bytes(at, page, self.names.content_of[digest])
            for digest, page in replica.kept.items():
                self.same_state(at, page, digest)
        for digest, slot in self.host.items():
            self._same_slot(slot, self.names.content_of[digest])
