"""Wrong calls of what moves pages between managers: imports in each of their stages, copiers, proofs and leases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from kvcache import PagedKVCacheManager, TextContext
from kvcache.replica.block_table import PendingImport
from kvcache.replica.copier import ImportCopier, ImportProof
from kvcache.replica.leases import PageLease
from tests.kvcache.build import manager_of
from tests.kvcache.moves import PAGE_SIZE, Chooser

Wrong = Callable[[], object]
STAGES = ("open", "copying", "taken", "proven", "committed", "cancelled")


class HandoverStage:
    """A manager with one import in some stage, one leased request, and what was used before.

    Args:
        other: the manager that the import is from; the request "stranger" has computed 4 tokens there.
        choose: where the choices come from.
    """

    def __init__(self, other: PagedKVCacheManager, choose: Chooser) -> None:
        self._other, self._choose = other, choose
        self.manager = manager_of(8, page_size=PAGE_SIZE, rows=3, checks=False, dtype=torch.int64)
        self._used_proof: ImportProof | None = None
        self._old_import: PendingImport | None = None
        self._made = 0
        self.stage = ""

    def begin(self) -> None:
        """An import in the stage that is drawn, and a leased request."""
        self._made += 1
        self.stage = self._choose.pick(STAGES)
        self.table = self._other.block_table("stranger")
        self.context = TextContext([1, 2, 3, 4, 5], 20, f"import {self._made}", cache_salt=f"{self._made}")
        self.leased = TextContext([7, 7, 7, 7], 20, f"leased {self._made}")
        self.manager.external_claim(self.context.request_id)
        self.manager.external_claim(self.leased.request_id)
        assert self.manager.maybe_reserve(self.leased)
        self.manager.fetch([self.leased])
        self.leased.update(1)
        self.manager.step([self.leased])
        self.lease = self.manager.lease(self.leased.request_id)
        self.context.cache_salt = None
        pending = self.manager.import_block_table(self.context, self.table)
        assert pending is not None
        self.pending: PendingImport = pending
        self.copier: ImportCopier | None = None
        self.proof: ImportProof | None = None
        if self.stage == "cancelled":
            self.manager.cancel_import(pending)
        elif self.stage != "open":
            self.copier = self.manager.copier(pending)
            if self.stage != "copying":
                self.copier.take()
            if self.stage in ("proven", "committed"):
                self.proof = self.copier.prove()
            if self.stage == "committed":
                self.manager.commit_import(self.context, pending, self.proof)

    def end(self) -> None:
        """Both requests go, and every page is free."""
        if not self.pending.closed:
            if self.copier is not None:
                self.copier.give_up()
            self.manager.cancel_import(self.pending)
        self._old_import, self._used_proof = self.pending, self.proof or self._used_proof
        self.manager.end_lease(self.lease)
        self.manager.release(self.context.request_id)
        self.manager.release(self.leased.request_id)
        self.manager.reset_prefix_cache()
        self.manager.check()
        assert self.manager.num_free_blocks == self.manager.total_num_pages

    def wrong_commit(self, no_object: list[Any]) -> Wrong:
        """`commit_import` with a wrong context, import or proof."""
        context, pending, proof = self.context, self.pending, self.proof
        forged = ImportProof(context.request_id, 1 << 20)
        proofs = [*no_object, None, forged, self._used_proof]
        proofs += [] if proof is None else [copy.copy(proof)]
        twin = TextContext(context.tokens, 20, context.request_id)
        commit = self.manager.commit_import
        calls: list[Wrong] = [
            lambda: commit(context, pending, self._choose.pick(proofs)),
            lambda: commit(self._choose.pick([*no_object, None, twin, self.leased]), pending, proof or forged),
            lambda: commit(context, self._choose.pick([*no_object, None, copy.copy(pending)]), proof or forged),
        ]
        if self._old_import is not None:
            calls.append(lambda: commit(context, self._old_import, proof))  # pyright: ignore[reportArgumentType]
        return self._choose.pick(calls)

    def wrong_extension(self, no_object: list[Any]) -> Wrong:
        """`extend_import` with a wrong context, import or table."""
        context, pending, extend = self.context, self.pending, self.manager.extend_import
        foreign = self.manager.block_table(self.leased.request_id)
        calls: list[Wrong] = [
            lambda: extend(context, pending, self._choose.pick([*no_object, None, foreign]), last=True),
            lambda: extend(self._choose.pick([*no_object, None, self.leased]), pending, self.table, last=True),
            lambda: extend(context, self._choose.pick([*no_object, None]), self.table, last=True),
        ]
        if pending.closed:
            calls.append(lambda: extend(context, pending, self.table, last=True))
        return self._choose.pick(calls)

    def wrong_cancel(self, no_object: list[Any]) -> Wrong:
        """`cancel_import` of what is none; that of a closed one is no error and does nothing."""
        return lambda: self.manager.cancel_import(self._choose.pick([*no_object, None, self.lease, self.proof]))

    def wrong_copier(self, no_object: list[Any]) -> Wrong:
        """A copier that was handed out, or of a closed import; and a copier's calls in the wrong order."""
        copier, wrong = self.copier, self._choose.pick([*no_object, None, self.lease])
        calls: list[Wrong] = [lambda: self.manager.copier(wrong)]
        if copier is not None or self.pending.closed:
            calls.append(lambda: self.manager.copier(self.pending))
        if copier is not None and self.stage != "copying":
            calls.append(copier.take)
        if copier is not None and self.stage != "taken":
            calls.append(copier.prove)
        return self._choose.pick(calls)

    def wrong_lease(self, no_object: list[Any]) -> Wrong:
        """A lease of nobody, or of a request that waits for its import."""
        wrong = [*no_object, None, "nobody", self.lease]
        if self.stage in ("open", "copying", "taken", "proven"):
            wrong.append(self.context.request_id)
        return lambda: self.manager.lease(self._choose.pick(wrong))

    def wrong_end(self, no_object: list[Any]) -> Wrong:
        """`end_lease` of what is no lease, or of one that is nobody's."""
        stray: Any = object()
        forged = PageLease(stray, self.leased.request_id, 0)
        return lambda: self.manager.end_lease(self._choose.pick([*no_object, None, forged, self.pending]))

    def foreign(self, victim: PagedKVCacheManager) -> Wrong:
        """What is right here, at another manager."""
        calls: list[Wrong] = [
            lambda: victim.copier(self.pending),
            lambda: victim.cancel_import(self.pending),
            lambda: victim.commit_import(self.context, self.pending, self.proof),
            lambda: victim.extend_import(self.context, self.pending, self.table, last=True),
            lambda: victim.end_lease(self.lease),
            lambda: victim.lease(self.leased.request_id),
        ]
        return self._choose.pick(calls)
