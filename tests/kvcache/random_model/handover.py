"""Random imports into the model's manager. An import is begun, extended, copied, and committed or cancelled. A
cancelled import may be begun again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from kvcache import BlockTable, ImportCopier, ImportProof, PageCopy, PendingImport, PromptTooLongError, TextContext
from tests.kvcache.kv import kv_of, kv_of_group
from tests.kvcache.random_model import seam
from tests.kvcache.random_model.matrix import BUILT, LONGEST, PAGE_SIZE, ROWS, World, build
from tests.kvcache.random_model.moves import WEIGHTS, Moves, SeededChooser
from tests.kvcache.random_model.plain import Request, pages_of

_OTHERS = {*BUILT} - {"host", "files", "objects", "quotas", "replicas"}
"""The features that two managers must share if one hands pages over to the other."""


@dataclass(eq=False)
class Import:
    """An import of a request, its block table, and its copier, if there is one."""

    one: Request
    pending: PendingImport
    table: BlockTable
    ends: set[int] | None  # The tokens at which chunks of the prompt end after the import.
    lacks_last: bool = False  # The last table of the prompt has not come yet.
    copier: ImportCopier | None = None
    is_taken: bool = False  # A copier has taken all of the import's pages.

    @property
    def told(self) -> int:
        """The number of tokens that the source's tables cover so far. The source knows no later token."""
        return self.pending.num_tokens


class ImportMoves(Moves):
    """Imports from a second manager, which has computed the pages."""

    def __init__(self, choose: Any, world: World, features: frozenset[str] | None = None, *more: Any) -> None:
        self.imports: dict[str, Import] = {}
        self.stray: list[Import] = []  # Cancelled or abandoned imports. Their copiers may still write.
        # The last import that was closed, and the proof with which it was committed.
        self.closed: tuple[PendingImport | None, ImportProof | None] = (None, None)
        super().__init__(choose, world, features, *more)
        self.source = None

    def weights(self) -> dict[str, int]:
        return WEIGHTS | {"begin_import": 4, "go_on_importing": 8}

    def is_of(self, kind: str) -> str:
        return "imports" if kind in {"begin_import", "go_on_importing"} else super().is_of(kind)

    @property
    def running(self) -> list[Request]:
        return [one for one in super().running if one.name not in self.imports and not self.is_written(one)]

    def is_written(self, one: Request) -> bool:
        """Returns whether the copier of the request's cancelled import may still write."""
        return any(stray.one is one for stray in self.stray)

    def table_of(self, context: TextContext) -> BlockTable | None:
        """Returns the source's block table for this prompt without its last token. The source computes the prompt
        first.
        """
        if self.source is None:
            groups = self.manager.params.groups, self.manager.num_layers
            more: dict[str, Any] = {"groups": groups[0], "states": self.manager.params.states}
            features = frozenset(_OTHERS & self.features)
            self.source = build(SeededChooser(0), features, World(*[None] * 2), more, layers=groups[1]).manager  # type: ignore[arg-type]
        source, told = self.source, TextContext(context.tokens[:-1], LONGEST, "told", cache_salt=context.cache_salt)
        told.extra_keys = context.extra_keys
        source.reset_prefix_cache()
        source.external_claim("told", 0)
        try:
            while told.active_idx - told.start_idx > 1 or told.end_idx < len(context.tokens):
                if not source.maybe_reserve(told):
                    return None
                source.fetch([told])
                for states in source.states:
                    states.advance(states.pages_at(["told"], [told.start_idx]), [told.active_idx])
                told.update(1)
                source.step([told])
            return source.block_table("told")
        except PromptTooLongError:
            return None
        finally:
            source.release("told")

    def begin_import(self) -> bool:
        """Begins the import of a new request, or of a request whose import was given up."""
        at = self.choose.integer(0, len(self.books.replicas) - 1)
        if len(self.imports) == 2 or len(self.books.replicas[at].requests) == ROWS:
            return False
        context = self.newcomer()
        table = self.table_of(context) if context.end_idx > 1 else None
        one = None if table is None else self.comes(context, at)
        return table is not None and one is not None and self.begin(one, table)

    def begin(self, one: Request, table: BlockTable) -> bool:
        """Begins the import. Returns whether the request has got pages for it."""
        context, manager = one.context, self.manager
        full = table.num_tokens - table.num_tokens % PAGE_SIZE
        partial = bool(full and self.choose.integer(0, 2) == 0)
        first = self.cut_short(table, full // 2 - full // 2 % PAGE_SIZE or PAGE_SIZE) if partial else table
        shared, last, runs = self.device_run(one, 0) * PAGE_SIZE, len(one.tokens) - 1, context.active_idx
        held = seam.host_held(manager)
        try:
            pending = self.call(
                "import_block_table", lambda: manager.import_block_table(context, first, partial=partial)
            )
        except PromptTooLongError:
            return self.gives_up(one)
        # The pages that this call loads from the host count as used only when the import ends.
        if seam.host_held(manager) - held:
            self.books.host_foretold = False
        self.books.learn(batch=[one])
        if pending is None:
            assert not one.has_pages
            return self.gives_up(one)
        one.first = [table.begins(row) for table, row in zip(self.books.tables, one.rows, strict=True)]
        if one.context.start_idx and manager.states:
            self.state_hits += 1
            self.books.touch_found(one)
        looked = bool(one.context.start_idx or runs > 1)
        ends = {shared, last - last % PAGE_SIZE} if looked else None
        self.imports[one.name] = Import(one, pending, table, ends, partial)
        return True

    def cut_short(self, table: BlockTable, tokens: int) -> BlockTable:
        """Returns the table cut to the first `tokens` tokens, as the source tells it while the prompt runs: without
        pages of windows.
        """
        width = len(table.digests) // max(1, table.num_tokens // PAGE_SIZE)
        pages, tables = tokens // PAGE_SIZE, self.manager.layer_tables.tables
        groups = [named[:pages] if of.group.keeps_all else () for of, named in zip(tables, table.groups, strict=False)]
        return msgspec.structs.replace(
            table,
            num_tokens=tokens,
            groups=(*groups, *table.groups[len(tables) :]),
            digests=table.digests[: pages * width],
        )

    def gives_up(self, one: Request) -> bool:
        self.leave(one)
        return False

    def go_on_importing(self) -> bool:
        """Makes a move on an open import: copies pages, commits or cancels the import, or releases its request."""
        if self.stray and self.choose.integer(0, 1):
            stray = self.stray.pop(self.choose.integer(0, len(self.stray) - 1))
            assert stray.copier is not None
            self.call("give_up", stray.copier.give_up)
            self.books.learn()
            if self.live.get(stray.one.name) is stray.one:
                self.after_cancel(stray)
            return True
        if not self.imports:
            return False
        mine = self.imports[self.choose.pick(sorted(self.imports))]
        kind = self.choose.integer(0, 7)
        if mine.copier is None and kind < 7:
            mine.copier = self.call("copier", lambda: self.manager.copier(mine.pending))
            self.write(mine, mine.copier.take(last=False)) if kind == 0 else None
        elif kind < 5 and mine.copier is not None:
            self.finish_import(mine)
        else:
            self.cancel(mine)
        return True

    def finish_import(self, mine: Import) -> None:
        """Copies the remaining pages, proves their arrival, and commits the import."""
        one, pending, context, copier = mine.one, mine.pending, mine.one.context, mine.copier
        assert copier is not None
        if mine.lacks_last:
            self.call("extend_import", lambda: self.manager.extend_import(context, pending, mine.table, last=True))
            mine.lacks_last = False
        mine.is_taken = True
        self.write(mine, copier.take(last=True))
        proof = self.call("prove", copier.prove)
        del self.imports[one.name]
        self.call("commit_import", lambda: self.manager.commit_import(context, pending, proof))
        self.closed = pending, proof
        one.cached, one.ends = context.start_idx, mine.ends
        one.prompt = one.again = one.cached
        assert one.cached >= mine.table.num_tokens, f"{one.name}: goes on from {one.cached} after its import"
        one.ready = one.room >= len(one.tokens)
        if self.steady:
            seam.copy_below(self.manager)
        self.books.learn()
        self.seen["imported"] += 1

    def cancel(self, mine: Import) -> None:
        """Gives an import up, either by cancelling it or by releasing its request. Its copier may continue to write for
        a while.
        """
        leaves = self.choose.integer(0, 2) == 0
        del self.imports[mine.one.name]
        if mine.copier is not None:
            self.stray.append(mine)
        if leaves:
            self.leave(mine.one)
        self.call("cancel_import", lambda: self.manager.cancel_import(mine.pending))
        self.books.learn(leaving=[(mine.one.replica, int(page)) for page in mine.pending.written[::-1]])
        self.seen["import cancelled"] += 1
        if not leaves and mine.copier is None:
            self.after_cancel(mine)

    def after_cancel(self, mine: Import) -> None:
        """Lets the request import again, compute its tokens itself, or be released."""
        one, kind = mine.one, self.choose.integer(0, 2)
        if kind == 0 and not self.is_leased(one):
            self.begin_again(mine)
        elif kind == 1 and self.replica(one).is_plain and not one.unsure:
            one.cached = 0
            one.ready = one.room >= len(one.tokens)
        elif kind == 1 and not one.unsure and not self.is_leased(one):
            one.cached, one.gives_back = 0, True
            if self.reserve_one(one, 1) is None:
                self.leave(one)
            self.seen["computes itself"] += 1
        else:
            self.leave(one)

    def begin_again(self, mine: Import) -> None:
        self.seen["import begun again"] += 1
        self.books.gives_back(mine.one)
        mine.one.private = False  # the row is claimed anew
        self.begin(mine.one, mine.table)

    def write(self, mine: Import, copies: Sequence[PageCopy]) -> None:
        """Writes the bytes that these copies transfer: the KV of the request's tokens on each shard, and the request's
        state.
        """
        one, at, count = mine.one, mine.one.replica, len(mine.one.rows)
        for number, copy in enumerate(copies):
            pages = np.asarray(copy.dst_pages)
            if number == count:
                states = self.manager.states[at]
                for shard in states.blocks if copy.tokens[0] < copy.tokens[1] else ():
                    for tensor in shard:
                        tensor[int(pages[0])] = int(kv_of(one.tokens, one.named, "state")[copy.tokens[1] - 1])
                continue
            places = self.places(mine, number, copy)
            for shard, blocks in enumerate(self.manager.device_tensors[at]):
                part, group = (shard, number) if number else shard, self.books.tables[number].group
                values = torch.from_numpy(kv_of_group(one.tokens[: mine.told], one.named, part, group))
                for token, page in places.items():
                    blocks[page, :, :, token % PAGE_SIZE] = values[token]

    def places(self, mine: Import, number: int, copy: PageCopy) -> dict[int, int]:
        """Returns the page of each token that is copied. Checks that they come from the same blocks."""
        table, (first, stop) = self.books.tables[number], copy.tokens
        pages, count = np.asarray(copy.dst_pages).tolist(), mine.table.num_tokens
        columns = [first // PAGE_SIZE + at for at in range(pages_of(stop) - first // PAGE_SIZE) if first < stop]
        if table.sinks:  # The tokens between the sinks and the window are left out.
            column_of = {page: column for column, page in mine.one.rows[number].items()}
            columns = [column_of[page] for page in pages]
            places = {
                token: page
                for column, page in zip(columns, pages, strict=True)
                for token in range(column * PAGE_SIZE, min(count, (column + 1) * PAGE_SIZE))
            }
            if stop == 0:  # An earlier call has returned all of them.
                return {}
            assert (first, stop) == (0, len(places)), f"{mine.one.name}: {stop} tokens of sinks are copied"
        else:
            places = {token: pages[token // PAGE_SIZE - first // PAGE_SIZE] for token in range(first, stop)}
        theirs = self.named_pages(mine, number)
        sources = np.asarray(copy.src_pages).tolist()[: len(columns)]
        assert sources == [theirs[column] for column in columns], f"{mine.one.name}: other pages of the source"
        return places

    def named_pages(self, mine: Import, number: int) -> dict[int, int]:
        """Returns the source's page of each block that the table names."""
        table, pages = self.books.tables[number], mine.table.groups[number]
        end = pages_of(mine.table.num_tokens)
        columns = table.columns(end - len(pages) + (table.sinks if len(pages) < end else 0), end)
        return dict(zip(columns, pages, strict=True))

    def release(self) -> bool:
        """Also releases requests that wait for an import, which closes the import."""
        one = self.any_of([one for _, one in sorted(self.live.items())])
        if one is None:
            return False
        if (mine := self.imports.get(one.name)) is not None:
            self.cancel(mine)
            return True
        self.leave(one)
        return True

    def finish(self) -> None:
        for mine in self.imports.values():
            self.manager.cancel_import(mine.pending)
        for mine in [*self.imports.values(), *self.stray]:
            if mine.copier is not None:
                mine.copier.give_up()
        super().finish()

    def close(self) -> None:
        super().close()
        if self.source is not None:
            self.source.close()
