"""Random imports for which no request waits. They bring pages from any part of a prompt, and a request may compute the
same pages meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcache import BlockTable, PageCopy, TextContext
from kvcache.replica.hashing import DIGEST_BYTES
from tests.kvcache.kv import Named
from tests.kvcache.random_model import seam
from tests.kvcache.random_model.handover import Import, ImportMoves
from tests.kvcache.random_model.matrix import PAGE_SIZE
from tests.kvcache.random_model.plain import Digest, Request, content

_GARBAGE = -77  # The value of elements that must not be read.
# The first page id of each source. Block number n of a prompt has this page id plus n.
_SOURCES = (1000, 2000, 3000)
Columns = tuple[int, int]


@dataclass(eq=False)
class Prompt(Request):
    """The full pages of a prompt at the moment when an import of some of them begins.

    The prompt's context may change later.
    """

    def __post_init__(self) -> None:
        self._named = super().named

    @property
    def named(self) -> Named:
        return self._named


class TailMoves(ImportMoves):
    """Imports of parts of prompts, mostly of their last pages. An import is begun, copied, and committed in whole or in
    part.
    """

    def __init__(self, *args: Any) -> None:
        self.tails: list[Import] = []  # open
        self.left_tails: list[Import] = []  # Cancelled imports, whose copiers may still write.
        super().__init__(*args)

    def weights(self) -> dict[str, int]:
        return super().weights() | {"begin_tail": 5, "go_on_with_tail": 8}

    def is_of(self, kind: str) -> str:
        return "tails" if kind in {"begin_tail", "go_on_with_tail"} else super().is_of(kind)

    def begin_tail(self) -> bool:
        """Begins the import of some full pages of a prompt. The prompt's request may be claimed or preempted, or no
        request may have the prompt.
        """
        one = self.prompt()
        last = len(one.tokens) // PAGE_SIZE
        if len(self.tails) == 3 or not last:
            return False
        parts = [self.part(0, last)]
        parts += [self.part(*parts[0]) for _ in range(self.choose.integer(0, 2))]
        tables = [self.tail_of(one, part, source) for part, source in zip(parts, _SOURCES, strict=False)]
        replica, count = self.books.replicas[one.replica], parts[0][1] - parts[0][0]
        used, free = replica.holders().keys() | replica.beside, replica.free()
        contents, context, at = self.manager.contents, one.context, one.replica
        pending = self.call(
            "contents.import_pages", lambda: contents.import_pages(context, at, tables[0], tuple(tables[1:]))
        )
        assert (pending is not None) == (count <= free // 2), f"{count} of {free} free pages: {pending}"
        self.books.learn()
        if pending is None:
            assert replica.free() == free
            self.seen["no room for a tail"] += 1
            return False
        pages = [*pending.written.tolist()]
        assert len({*pages}) == count, f"{pages} for {count} pages"
        assert self.late or free - replica.free() == count
        assert not {*pages} & used, f"{pages} are in use"
        self.tails.append(mine := Import(one, pending, tables[0], None))
        self.scribble(mine)
        if one.name not in self.live and all(context is not other for other in self.away):
            self.goes_another_way(context)
        return True

    def prompt(self) -> Prompt:
        """Returns a prompt and the replica that receives its pages. The replica is usually the replica of a claimed
        request.
        """
        at = self.choose.integer(0, len(self.books.replicas) - 1)
        kind, live = self.choose.integer(0, 3), [one for _, one in sorted(self.live.items())]
        if kind and live:
            one = self.choose.pick(live)
            context, tokens, at = one.context, [*one.tokens], one.replica if kind > 1 else at
        else:
            context = self.choose.pick(self.away) if self.away and self.choose.integer(0, 1) else self.newcomer()
            tokens = context.tokens.tolist()
        full = (len(tokens) - 1) // PAGE_SIZE  # The last known token is never imported.
        return Prompt(context, at, 0, tokens[: full * PAGE_SIZE], [{}], [0])

    def part(self, first: int, stop: int) -> Columns:
        """Returns a part of these blocks, often the last ones."""
        first = self.choose.integer(first, stop - 1)
        return first, stop if self.choose.integer(0, 1) else self.choose.integer(first + 1, stop)

    def tail_of(self, one: Prompt, part: Columns, source: int) -> BlockTable:
        """Returns the block table of a source that has the pages of these blocks."""
        manager, (first, stop) = self.manager, part
        width = DIGEST_BYTES[manager.params.hash_algorithm]
        digests = manager.contents.digests(one.context, first).digests[: (stop - first) * width]
        assert len(digests) == (stop - first) * width
        for column in range(first, stop):
            digest = digests[(column - first) * width : (column - first + 1) * width]
            self.names.learn(digest, content(0, one.tokens, one.named, column))
        return BlockTable(
            request_id="told",
            replica_idx=0,
            num_tokens=stop * PAGE_SIZE,
            page_size=PAGE_SIZE,
            groups=(tuple(range(source + first, source + stop)),),
            fingerprint="",
            hash_algorithm=manager.params.hash_algorithm,
            digests=digests,
            first_page=first,
        )

    def goes_another_way(self, context: TextContext) -> None:
        """Changes the salt or the last tokens of an unclaimed prompt. Imports that have begun must still bring the
        earlier content.
        """
        kind = self.choose.integer(0, 5)
        if kind == 0:
            context.cache_salt = "later"
        elif kind == 1 and type(context) is TextContext and context.end_idx > 2:
            end = self.choose.integer(1, context.end_idx - 1)
            context.set_token_indices(start_idx=0, active_idx=end, end_idx=end)
            for _ in range(self.choose.integer(1, 9)):
                context.update(self.choose.integer(1, 2))
        self.seen["went another way"] += kind < 2

    # ---- copies and ends

    def go_on_with_tail(self) -> bool:
        """Makes a move on an import for which no request waits: copies pages, or commits or cancels the import. May
        also end the copier of a cancelled import.
        """
        if self.left_tails and self.choose.integer(0, 1):
            left = self.left_tails.pop(self.choose.integer(0, len(self.left_tails) - 1))
            self.scribble(left)
            assert left.copier is not None
            self.call("give_up", left.copier.give_up)
            self.books.learn()
            return True
        if not self.tails:
            return False
        mine, kind = self.choose.pick(self.tails), self.choose.integer(0, 7)
        if mine.copier is None and kind < 7:
            mine.copier = self.call("copier", lambda: self.manager.copier(mine.pending))
            self.write(mine, mine.copier.take(last=False)) if kind == 0 else None
        elif kind < 5 and mine.copier is not None:
            self.commit_tail(mine)
        else:
            self.cancel_tail(mine)
        return True

    def commit_tail(self, mine: Import) -> None:
        """Copies the remaining pages, proves the arrival of all pages or of the first ones, and commits the proved
        pages.
        """
        one, pending, copier = mine.one, mine.pending, mine.copier
        assert copier is not None
        (first, stop), pages = self.columns(mine), pending.written.tolist()
        mine.is_taken = True
        self.write(mine, copier.take(last=True))
        for (table, (copy,)), source in zip(copier.from_others(), _SOURCES[1:], strict=False):
            self.names_the_same(mine, copy, table, source)
        end = stop if self.choose.integer(0, 1) else self.choose.integer(first + 1, stop)
        proof = self.call("prove", lambda: copier.prove(0 if end == stop else end * PAGE_SIZE))
        replica = self.books.replicas[one.replica]
        come = {self.digest(one, column): page for column, page in zip(range(first, end), pages, strict=False)}
        come = {} if pending.private else come
        was, free = {**replica.there}, replica.free()
        self.tails.remove(mine)
        self.call("contents.commit_pages", lambda: self.manager.contents.commit_pages(pending, proof))
        self.closed = pending, proof
        if self.steady:
            seam.copy_below(self.manager)
        self.books.learn(leaving=[(one.replica, page) for page in reversed(pages)])
        found = replica.there if not self.late else {one: replica.there.get(one) for one in come | was}
        assert found == come | was, f"{one.name}: other pages are found than those of columns {first} to {end}"
        freed = replica.free() - free - len(pages)
        assert self.steps_are_in_flight or not freed or (self.late and freed > 0), f"{one.name}: its tail is still held"
        self.seen["tail"] += 1
        self.seen["tail of before a reset"] += pending.private
        self.seen["tail in part"] += end < stop
        self.seen["tail that was there"] += any(digest in was for digest in come)

    def names_the_same(self, mine: Import, copy: PageCopy, table: BlockTable, source: int) -> None:
        """Checks that a second source is asked for its own page ids, and that its pages are written to the target pages
        of the same blocks.
        """
        first, stop = (token // PAGE_SIZE for token in copy.tokens)
        assert (first, stop) == (table.first_page, table.num_tokens // PAGE_SIZE)
        begins, count, pages = self.columns(mine)[0], stop - first, mine.pending.written
        assert np.asarray(copy.src_pages)[:count].tolist() == [*range(source + first, source + stop)]
        assert np.array_equal(np.asarray(copy.dst_pages)[:count], pages[first - begins : stop - begins])

    def cancel_tail(self, mine: Import) -> None:
        """Cancels an import for which no request waits. Its copier may continue to write for a while."""
        self.tails.remove(mine)
        if mine.copier is not None:
            self.left_tails.append(mine)
        self.call("cancel_import", lambda: self.manager.cancel_import(mine.pending))
        self.books.learn()
        self.seen["tail cancelled"] += 1

    def columns(self, mine: Import) -> Columns:
        return mine.table.first_page, mine.table.num_tokens // PAGE_SIZE

    def digest(self, one: Request, column: int) -> Digest:
        return self.names.digest_of[content(0, one.tokens, one.named, column)]

    def scribble(self, mine: Import) -> None:
        """Writes other bytes into the pages of an import for which no request waits. A copier may do the same until the
        import is committed.
        """
        pages = mine.pending.written.tolist()
        for blocks in self.manager.device_tensors[mine.one.replica]:
            blocks[pages] = _GARBAGE

    def finish(self) -> None:
        for mine in self.tails:
            self.manager.cancel_import(mine.pending)
        for mine in [*self.tails, *self.left_tails]:
            if mine.copier is not None:
                mine.copier.give_up()
        super().finish()
