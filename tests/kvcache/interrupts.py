"""Calls of a manager, each interrupted anywhere in it: `python -m tests.kvcache.interrupts --count 10000`.

A loop without a model drives a manager of each kind: it claims, reserves, runs, forks, leases, imports, releases. In
some calls one bytecode of `kvcache` raises what a signal handler, Ctrl-C, or the interpreter itself may raise there.
Then either the books are right, or every call says that they are not; after `recover` they are, whatever interrupts
that, and every cached token that is read after it is the right one. At the end nothing is held.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch

import kvcache
from kvcache import (
    Batch,
    Context,
    ImportCopier,
    InterruptedCallError,
    InvalidRequestError,
    KVCacheError,
    PageCopy,
    PagedKVCacheManager,
    PageLease,
    PendingImport,
    RangeRetention,
    Recovered,
    Retention,
    TextContext,
)
from kvcache.states.state_pages import StatePages
from tests.kvcache.build import manager_of
from tests.kvcache.group_moves import GroupMoves, layouts
from tests.kvcache.hinted_moves import HintedMoves
from tests.kvcache.kv import KVTokens, Run, kv_of
from tests.kvcache.moves import LONGEST, PAGE_SIZE, ROWS, Moves, SeededChooser, tiers_of
from tests.kvcache.states.group_state_moves import GroupBelowMoves, GroupSlabMoves, GroupStateMoves
from tests.kvcache.states.hinted_slab_moves import HintedSlabMoves
from tests.kvcache.states.moves_below import BelowMoves, FileMoves
from tests.kvcache.states.slab_moves import SlabMoves
from tests.kvcache.states.state_moves import StateMoves

T = TypeVar("T")
_OURS = str(Path(kvcache.__file__).parent)
RAISED = (KeyboardInterrupt, MemoryError, RecursionError, TimeoutError)
SIGN = "interrupted here"
Lengths = defaultdict[str, deque[int]]
KINDS = ("plain", "groups", "states", "tiers", "hints")


def interrupted(call: Callable[[], T], at: int, error: type[BaseException]) -> tuple[T | None, int, bool]:
    """What the call gives, how many bytecodes of `kvcache` it ran, and whether `error` was raised at the `at`-th one.

    What the call raises instead goes on.
    """
    count, done = 0, False

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count, done
        if event == "call":
            if not frame.f_code.co_filename.startswith(_OURS):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            count += 1
            if count == at:
                done = True
                raise error(SIGN)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return call(), count, done
    except error as raised:
        if not done or raised.args != (SIGN,):
            raise
        return None, count, True
    finally:
        sys.settrace(before)


class OwnContext:
    """A caller's own context, which is no `TextContext`, and carries no hasher."""

    def __init__(self, inner: TextContext) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "prefix_hasher":
            raise AttributeError(name)
        return getattr(self.inner, name)


def managers(kind: str, seed: int, folder: Path) -> list[PagedKVCacheManager]:
    """Two managers of a kind, alike: one to drive, and the source of what that imports."""
    choose = random.Random(seed)
    of_kind: dict[str, Sequence[type[Moves]]] = {
        "plain": (Moves,),
        "groups": (GroupMoves,),
        "states": (StateMoves, SlabMoves, GroupStateMoves, GroupSlabMoves),
        "tiers": (Moves, GroupMoves, BelowMoves, GroupBelowMoves, FileMoves),
        "hints": (HintedMoves, HintedSlabMoves),
    }
    chosen = choose.choice(of_kind[kind])
    if chosen in (Moves, GroupMoves):
        return [_plain(kind, chosen, seed, folder / name) for name in ("driven", "source")]
    if chosen is FileMoves:
        return [FileMoves(SeededChooser(seed), folder / name, 2).manager for name in ("driven", "source")]
    return [chosen(SeededChooser(seed)).manager for _ in range(2)]


def _plain(kind: str, chosen: type[Moves], seed: int, folder: Path) -> PagedKVCacheManager:
    choose = random.Random(seed)
    layers, params = 1, dict[str, Any]()
    caching = kind == "tiers" or choose.randrange(5) > 0
    if chosen is GroupMoves:
        layers, params["groups"] = choose.choice(layouts())
    elif caching and choose.randrange(3) == 0:
        params["partial_reuse_min_tokens"] = 1
    if kind == "tiers" and choose.randrange(2):
        params |= {"file_tier_dir": str(folder), "file_tier_max_gb": 400_000 / 2**30, "file_tier_key": "moves"}
    return manager_of(
        12 if chosen is Moves else 30,
        page_size=PAGE_SIZE,
        rows=ROWS,
        max_seq_len=LONGEST,
        layers=layers,
        dp=choose.randint(1, 2),
        caching=caching,
        checks=False,
        dtype=torch.int64,
        host_slots=choose.choice((6, 20, 60)) if kind == "tiers" else 0,
        params=params,
    )


class Interrupts:
    """A loop over one manager of a kind whose calls are interrupted, one in `every`."""

    def __init__(self, kind: str, seed: int, folder: Path, seen: Counter[str], lengths: Lengths) -> None:
        self.random = random.Random(f"{kind} {seed}")
        self.kind, self.seen, self.lengths, self.every = kind, seen, lengths, 4
        self.manager, self.source = managers(kind, seed, folder)
        self.kv = KVTokens(self.manager)
        self.live: dict[str, Context] = {}
        self.imports: dict[str, PendingImport] = {}
        self.leases: list[PageLease] = []
        self.copiers: list[ImportCopier | None] = []
        self.past: list[list[int]] = [[1] * 12]
        self.made = 0
        if self.manager._replicas.tiers is not None:
            tiers_of(self.manager).share = self.random.choice((0.0, 10.0))

    # ---- interrupts

    def call(self, name: str, call: Callable[[], T]) -> T | None:
        """The call, which may be interrupted; None then, and the books are right again."""
        chance = self.random.randrange(2 * self.every)
        if chance > 2:
            try:
                return call()
            finally:
                assert self.manager._mark.call is None, f"{name} left the books marked"
        error = self.random.choice(RAISED)
        at = self.anywhere(name) if chance else 0  # else it is but measured
        try:
            result, count, done = interrupted(call, at, error)
        except KVCacheError:
            if self.manager._mark.call is not None:
                raise AssertionError(f"{name}: one of our own errors left the books marked") from None
            self.manager.check()
            raise
        if not done:
            if not at:
                self.lengths[name].append(count)
            return result
        self.seen[f"{name}"] += 1
        self.seen["interrupts"] += 1
        try:
            self.after(name)
        except KVCacheError as failed:
            raise AssertionError(f"{name} was interrupted") from failed
        return result

    def anywhere(self, name: str) -> int:
        """A bytecode of a call, of which there are as many as in one of the last calls of this name."""
        return self.random.randint(1, self.random.choice(self.lengths[name] or [500]))

    def after(self, name: str) -> None:
        """A call was interrupted, or has swallowed what interrupted it."""
        marked = self.manager._mark.call is not None
        if marked:
            self.seen["in the marked part"] += 1
            self.seen[f"{name}, marked"] += 1
            self.refuses()
        else:
            self.manager.check()
        report = None
        while report is None:
            done = False
            if self.random.randrange(3) == 0:
                name = "recover" if self.manager._mark.call else "recover of right books"
                again = self.random.choice(RAISED)
                report, count, done = interrupted(self.manager.recover, self.anywhere(name), again)
                self.seen[f"{name}, interrupted"] += done
                if not done:
                    self.lengths[name].append(count)
            else:
                report = self.manager.recover()
        self.manager.check()
        self.reconcile(report.released)

    def refuses(self) -> None:
        """Any call says that the books may not be right."""
        manager, one = self.manager, TextContext([1, 2], 9)
        calls: list[Callable[[], object]] = [
            *(lambda: manager.contains("r"), lambda: manager.external_claim("new"), lambda: manager.maybe_reserve(one)),
            *(lambda: manager.reserve_batch([]), lambda: manager.fetch([]), lambda: manager.step([]), manager.check),
            *(lambda: manager.release("r"), lambda: manager.lease("r"), lambda: manager.block_table("r")),
            *(lambda: manager.admission(one), manager.reset_prefix_cache, lambda: manager.batch([])),
            *(lambda: manager.prefetch(one), lambda: manager.fork(one, one), lambda: manager.get_req_blocks("r")),
            *(lambda: manager.maybe_reserve(next(iter(self.live.values()), one)), manager.flush_tiers),
            *(lambda: manager.get_replica(one), lambda: manager.get_data_parallel_splits([])),
        ]
        try:
            self.random.choice(calls)()
        except InterruptedCallError as error:
            assert "recover()" in str(error)  # noqa: PT017 - the moves run without pytest, too
            return
        raise AssertionError("a call went on over books that may not be right")

    def reconcile(self, released: Sequence[str]) -> None:
        """What the manager says that there is, and what this loop knows, are made the same."""
        report = self.manager.recover()
        assert report.call is None
        for name in released:
            context = self.live.pop(name, None)
            if (pending := self.imports.pop(name, None)) is not None:
                self.manager.cancel_import(pending)
            if context is not None:
                context.set_token_indices(start_idx=0, active_idx=context.end_idx)
            self.seen["released"] += context is not None
            if context is not None and not self.manager.contains(name) and self.random.randrange(2):
                self.anew(context)
        for copier in report.copiers:
            if copier not in self.copiers:
                self.seen["copier given back"] += 1
                copier.give_up()
        self.give_back(report)

    def give_back(self, report: Recovered) -> None:
        """What an interrupted call has made without this loop's knowing."""
        for lease in report.leases:
            if lease not in self.leases:
                self.seen["lease given back"] += 1
                self.manager.end_lease(lease)
        self.leases = [lease for lease in self.leases if not lease.is_over]
        for pending in report.imports:
            if pending not in self.imports.values():
                self.seen["import given back"] += 1
                self.cancel(pending.request_id, pending)
        for name in report.claimed:
            if name not in self.live and self.manager.contains(name):
                self.seen["claim given back"] += 1
                self.manager.release(name)
        for name in [name for name in self.live if not self.manager.contains(name)]:
            del self.live[name]
        for name, pending in list(self.imports.items()):
            if pending.closed or name not in self.live:
                self.cancel(name, self.imports.pop(name))

    def anew(self, context: Context) -> None:
        with contextlib.suppress(KVCacheError):
            self.manager.external_claim(context.request_id, self.random.randrange(self.manager.num_replicas))
            self.live[context.request_id] = context

    # ---- moves

    def move(self) -> None:
        moves = (self.claim, self.run, self.run, self.run, self.run_batch, self.fork, self.release, self.others)
        more = (self.lease, self.end_lease, self.import_one, self.import_one, self.with_claim)
        self.random.choice((*moves, *more))()

    def name(self) -> str:
        self.made += 1
        return f"r{self.made}"

    def pick(self) -> Context | None:
        ready = [name for name in sorted(self.live) if name not in self.imports]
        return self.live[self.random.choice(ready)] if ready else None

    def context(self) -> Context:
        past = self.random.choice(self.past)
        tokens = past[: self.random.randint(0, 2 * len(past))] + [self.random.randint(1, 2) for _ in range(4)]
        salt = None if self.random.randrange(5) else "other"
        keys = () if self.random.randrange(4) else ((self.random.randrange(len(tokens)), b"image"),)
        made = TextContext(tokens[: LONGEST // 2], LONGEST, self.name(), cache_salt=salt, extra_keys=keys)
        if self.kind == "hints" and self.random.randrange(2):
            made.retention = Retention(
                priority=self.random.choice((0, 50, 100)), ranges=(RangeRetention(0, 6, priority=100),)
            )
        return made if self.random.randrange(4) else OwnContext(made)  # type: ignore[return-value]

    def claim(self) -> None:
        context = self.context()
        replica = self.random.randrange(self.manager.num_replicas)
        with contextlib.suppress(KVCacheError):
            before = self.seen["interrupts"]
            self.call("external_claim", lambda: self.manager.external_claim(context.request_id, replica))
            if self.seen["interrupts"] == before:
                self.live[context.request_id] = context
                self.past = [*self.past[-7:], context.tokens.tolist()]

    def with_claim(self) -> None:
        """What interrupts a call in the block goes on, and the request is nobody's after `recover`."""
        context, before = self.context(), self.seen["interrupts"]

        def block() -> None:
            with self.manager.claim(context):
                self.manager.maybe_reserve(context)

        with contextlib.suppress(KVCacheError):
            self.call("with claim", block)
        if self.manager.contains(context.request_id):
            assert self.seen["interrupts"] > before
            raise AssertionError("a request is claimed after its block")

    def reserve(self, context: Context, steps: int = 1) -> bool:
        if self.random.randrange(4) == 0 and context.active_length > 2:
            context.set_token_indices(active_idx=self.random.randint(context.start_idx + 1, context.end_idx))
        try:
            return bool(self.call("maybe_reserve", lambda: self.manager.maybe_reserve(context, steps)))
        except KVCacheError:
            if self.manager.contains(context.request_id):
                self.give_up(context.request_id)
            return False

    def run(self) -> None:
        context = self.pick()
        if context is None or context.current_length >= LONGEST - 4 or not self.reserve(context, 1):
            return
        if self.manager.states and self.random.randrange(2) and context.active_idx == context.end_idx:
            self.speculate(context)
            return
        self.compute([context])
        if context.request_id not in self.live:
            return
        self.update(context)
        self.step([context])

    def update(self, context: Context) -> None:
        """Where it is interrupted its indices say whether it is to be called again."""
        before, last, token = context.end_idx, context.active_idx == context.end_idx, self.random.randint(1, 2)
        self.call("update", lambda: context.update(token))
        if context.active_idx < context.end_idx or (last and context.end_idx == before):
            context.update(token)
        assert (context.active_idx, context.end_idx) == (before + last, before + last)

    def update_batch(self, batch: Batch, ready: Sequence[Context], ends: list[int]) -> None:
        """Where it is interrupted either each of its contexts has its token, or none."""
        before, tokens = self.seen["interrupts"], [self.random.randint(1, 2) for _ in ready]
        with contextlib.suppress(InvalidRequestError):  # what was raised while the tokens were looked at
            self.call("batch.update", lambda: batch.update(tokens))
        now = {one.end_idx - end for one, end in zip(ready, ends, strict=True)}
        assert len(now) == 1, now
        if now == {0}:
            batch.update(tokens)
        ends[:] = [end + 1 for end in ends]
        if self.seen["interrupts"] > before:
            assert [one.end_idx for one in ready] == ends
            assert [int(one.tokens[-1]) for one in ready] == tokens

    def compute(self, batch: Sequence[Context]) -> None:
        """As a model does; where `fetch` is interrupted it is called again."""
        inputs = None
        while inputs is None:
            inputs = self.call("fetch", lambda: self.manager.fetch(batch))
            if any(context.request_id not in self.live for context in batch):
                return
        runs = [self.run_of(context) for context in batch]
        self.kv.run(runs, inputs)
        for replica, states in enumerate(self.manager.states):
            if mine := [run for run in runs if run.replica == replica]:
                self.compute_states(states, mine)

    def run_of(self, context: Context) -> Run:
        named = getattr(context, "cache_salt", None), getattr(context, "extra_keys", ())
        replica = self.manager.get_replica(context)
        return Run(context.request_id, replica, named, context.tokens.tolist(), context.start_idx, context.active_idx)

    def compute_states(self, states: StatePages, runs: Sequence[Run]) -> None:
        pages = states.pages_at([run.request_id for run in runs], [run.start for run in runs])
        for page, run in zip(pages.tolist(), runs, strict=True):
            wanted = int(kv_of(run.tokens, run.named, "state")[run.start - 1]) if run.start else 0
            for tensor in states.blocks[0]:
                assert (tensor[page] == wanted).all(), f"{run.request_id}: another state after {run.start} tokens"
        written = states.drafts.written([run.request_id for run in runs], pages)
        for page, run in zip(written.tolist(), runs, strict=True):
            for tensor in states.blocks[0]:
                tensor[page] = int(kv_of(run.tokens, run.named, "state")[run.active - 1])
        states.advance(written, [run.active for run in runs])

    def step(self, batch: Sequence[Context]) -> None:
        """Where it is interrupted it is called again, or left to the next one."""
        before = self.seen["interrupts"]
        self.call("step", lambda: self.manager.step(batch))
        again = [context for context in batch if context.request_id in self.live]
        if self.seen["interrupts"] > before and self.random.randrange(2) and again:
            self.manager.step(again)

    def speculate(self, context: Context) -> None:
        """Two guesses, of which some are taken away again."""
        states = self.manager.states[self.manager.get_replica(context)]
        start, end = context.start_idx, context.end_idx
        if end + 3 > LONGEST or not self.reserve(context, 3) or context.active_idx < context.end_idx:
            return
        start = context.start_idx
        if not self.call("draft", lambda: states.draft(context.request_id)) or context.request_id not in self.live:
            return
        for _ in range(2):
            context.update(self.random.randint(1, 2))
        context.set_token_indices(start_idx=start)
        self.compute([context])
        if context.request_id not in self.live:
            return
        right = self.random.randint(0, 2)
        if right < 2:
            if isinstance(context, TextContext):
                context.set_token_indices(active_idx=end + right, end_idx=end + right)
            else:
                right = 2
        context.update(self.random.randint(1, 2))
        self.seen["drafted"] += 1
        self.step([context])
        if context.request_id in self.live and context.request_id in states.drafts.page_of:
            self.manager.step([context])

    def run_batch(self) -> None:
        """Some steps of all that decode, as a `Batch` or a list."""
        ready = [self.live[name] for name in sorted(self.live) if name not in self.imports]
        ready = [one for one in ready if one.active_length == 1 and one.active_idx == one.end_idx]
        ready = [one for one in ready if one.start_idx and one.current_length < LONGEST - 8]
        ready = [one for one in ready if self.manager.get_req_blocks(one.request_id)]
        if not ready:
            return
        batch: Any = self.manager.batch(ready) if self.random.randrange(2) else ready
        ends = [one.end_idx for one in ready]
        for _ in range(self.random.randint(1, 6)):
            try:
                reserved = self.call("reserve_batch", lambda: self.manager.reserve_batch(batch))
            except KVCacheError:
                return
            if reserved is None or not all(reserved):
                return
            self.compute(batch)
            if any(context.request_id not in self.live for context in ready):
                return
            if isinstance(batch, Batch):
                self.update_batch(batch, ready, ends)
            else:
                for context in ready:
                    self.update(context)
            self.step(batch)
            if any(context.request_id not in self.live for context in ready):
                return

    def fork(self) -> None:
        parent = self.pick()
        if parent is None or not isinstance(parent, TextContext) or parent.active_length != 1 or not parent.start_idx:
            return
        child = parent.fork(self.name())
        with contextlib.suppress(KVCacheError):
            if self.call("fork", lambda: self.manager.fork(parent, child)):
                self.live[child.request_id] = child

    def give_up(self, name: str) -> None:
        self.call("release", lambda: self.manager.release(name))
        self.live.pop(name, None)
        if self.manager.contains(name):
            self.manager.release(name)

    def release(self) -> None:
        if self.live:
            name = self.random.choice(sorted(self.live))
            self.give_up(name)
            if (pending := self.imports.pop(name, None)) is not None:
                self.call("cancel_import", lambda: self.manager.cancel_import(pending))
                self.manager.cancel_import(pending)

    def lease(self) -> None:
        context = self.pick()
        if context is None or len(self.leases) > 3 or self.manager.states:
            return
        lease = self.call("lease", lambda: self.manager.lease(context.request_id))
        if lease is not None:
            self.leases.append(lease)
            with contextlib.suppress(KVCacheError):
                self.call("block_table", lambda: self.manager.block_table(context.request_id))

    def end_lease(self) -> None:
        if self.leases:
            lease = self.leases.pop(self.random.randrange(len(self.leases)))
            self.call("end_lease", lambda: self.manager.end_lease(lease))
            self.manager.end_lease(lease)
            assert lease.is_over

    def others(self) -> None:
        context = self.context()
        contents = self.manager.contents
        which = self.random.choice(("reset_prefix_cache", "admission", "prefetch", "contents", "flush_tiers"))
        with contextlib.suppress(KVCacheError):
            if which == "contents":
                wanted = contents.digests(context)
                self.call("contents.bring", lambda: contents.bring("reader", 0, wanted, 8))
                found = self.call("contents.lease", lambda: contents.lease("reader", 0, wanted, 8))
                if found is not None:
                    self.leases.append(found[0])
            elif which in ("admission", "prefetch"):
                self.call(which, lambda: getattr(self.manager, which)(context))
            elif which == "flush_tiers" or not self.random.randrange(3):
                self.call(which, getattr(self.manager, which))

    # ---- imports

    def import_one(self) -> None:
        """A prompt that the source manager has computed comes over, goes on to come, or is given up."""
        if self.imports:
            name, pending = self.random.choice(sorted(self.imports.items()))
            context = self.live[name]
            if self.random.randrange(4) == 0:
                del self.imports[name]
                self.call("cancel_import", lambda: self.manager.cancel_import(pending))
                self.cancel(name, pending)
            else:
                self.copy_over(context, pending)
            return
        context = self.context()
        if not isinstance(context, TextContext) or context.end_idx < 2:
            return
        try:
            self.manager.external_claim(context.request_id, self.random.randrange(self.manager.num_replicas))
        except KVCacheError:
            return
        self.live[context.request_id] = context
        told = TextContext(
            context.tokens[:-1], LONGEST, "told", cache_salt=context.cache_salt, extra_keys=context.extra_keys
        )
        with self.served(told) as table:
            if table is None:
                return
            try:
                pending = self.call("import_block_table", lambda: self.manager.import_block_table(context, table))
            except KVCacheError:
                self.give_up(context.request_id)
                return
            if pending is None:
                return
            self.imports[context.request_id] = pending
            self.seen["imports"] += 1
            if self.random.randrange(3):
                self.copy_over(context, pending)
            elif context.request_id in self.imports:
                self.call("extend_import", lambda: self.manager.extend_import(context, pending, table, last=True))

    @contextlib.contextmanager
    def served(self, told: TextContext) -> Any:
        """The block table of what the source computes, None where it cannot; its pages stay for the block alone."""
        self.source.reset_prefix_cache()
        self.source.external_claim(told.request_id, 0)
        try:
            if not self.source.maybe_reserve(told):
                yield None
                return
            kv = KVTokens(self.source)
            while told.start_idx < told.end_idx - 1 or told.active_length:
                run = Run.of(self.source, told)
                kv.run([run], self.source.fetch([told]))
                if self.source.states:
                    self.compute_states(self.source.states[0], [run])
                last = told.active_idx == told.end_idx
                told.update(1)
                self.source.step([told])
                if last:
                    break
                self.source.maybe_reserve(told)
            yield self.source.block_table(told.request_id)
        except kvcache.PromptTooLongError:
            yield None
        finally:
            self.source.release(told.request_id)

    def copy_over(self, context: Context, pending: PendingImport) -> None:
        """The import gets its bytes, and is committed, or given up."""
        copier = self.call("copier", lambda: self.manager.copier(pending)) if not self.taken(pending) else None
        self.copiers = [copier]
        if copier is None or pending.closed or context.request_id not in self.imports:
            return
        self.write(context, pending, copier.take(last=True))
        if self.random.randrange(8) == 0:
            self.call("give_up", copier.give_up)
            copier.give_up()
            self.imports.pop(context.request_id, None)
            self.cancel(context.request_id, pending)
            return
        proof = self.call("prove", copier.prove)
        if proof is None:
            copier.give_up()
            if context.request_id in self.imports:
                self.cancel(context.request_id, self.imports.pop(context.request_id))
            return
        if self.imports.pop(context.request_id, None) is None:
            return
        before = self.seen["interrupts"]
        self.call("commit_import", lambda: self.manager.commit_import(context, pending, proof))
        if self.seen["interrupts"] > before:
            self.cancel(context.request_id, pending)

    def write(self, context: Context, pending: PendingImport, copies: Sequence[PageCopy]) -> None:
        """What the copies would bring: it is the same at any time."""
        values = context.tokens.tolist()
        tables = self.manager.layer_tables.tables
        named = getattr(context, "cache_salt", None), getattr(context, "extra_keys", ())
        replica = pending.replica_idx
        for number, copy in enumerate(copies):
            if number == len(tables):
                states = self.manager.states[replica]
                page = int(np.asarray(copy.dst_pages)[0])
                for tensor in states.blocks[0]:
                    tensor[page] = int(kv_of(values, named, "state")[pending.num_tokens - 1])
                continue
            first, stop = copy.tokens
            part = (0, number) if number else 0
            kept = torch.from_numpy(kv_of(values, named, part))
            pages = np.asarray(copy.dst_pages)
            blocks = self.manager.device_tensors[replica][0]
            for token in range(first, stop):
                blocks[pages[token // PAGE_SIZE - first // PAGE_SIZE], :, :, token % PAGE_SIZE] = kept[token]

    def cancel(self, name: str, pending: PendingImport) -> None:
        """The import is over, and its request with it: windows that it has not got are not its own to compute."""
        self.manager.cancel_import(pending)
        if self.live.pop(name, None) is not None and self.manager.contains(name):
            self.manager.release(name)

    def taken(self, pending: PendingImport) -> bool:
        return any(pending in replica.imports.copiers for replica in self.manager._replicas.each)

    def finish(self) -> None:
        """Everything is released: every page is free."""
        for name in list(self.live):
            self.manager.release(name)
        for pending in self.imports.values():
            self.manager.cancel_import(pending)
        for lease in self.leases:
            self.manager.end_lease(lease)
        report = self.manager.recover()
        assert (report.claimed, report.leases, report.imports) == ((), (), ()), report
        assert self.manager.num_free_blocks == self.manager.total_num_pages
        assert self.manager.num_held_blocks == 0
        self.manager.check()
        self.seen["tokens compared"] += self.kv.compared
        self.manager.close()
        self.source.close()


MOVES_A_MANAGER = 60


def new_lengths() -> Lengths:
    """By call, of its last calls how many bytecodes they ran."""
    return defaultdict(lambda: deque(maxlen=20))


def run(kind: str, count: int, seed: int, seen: Counter[str], lengths: Lengths) -> int:
    """Drive managers of a kind until `count` calls were interrupted; the next seed."""
    before = seen["interrupts"]
    while seen["interrupts"] - before < count:
        with tempfile.TemporaryDirectory() as folder:
            loop = Interrupts(kind, seed, Path(folder), seen, lengths)
            try:
                for _ in range(MOVES_A_MANAGER):
                    loop.move()
                loop.finish()
            except BaseException:
                print(f"{kind}: seed {seed} fails")  # noqa: T201
                raise
        seed += 1
    return seed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="interrupts of each kind of manager")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--kind", choices=KINDS, help="of this kind alone")
    chosen = parser.parse_args(arguments)
    for kind in KINDS if chosen.kind is None else (chosen.kind,):
        start, seen = time.monotonic(), Counter[str]()
        seed = run(kind, chosen.count, chosen.seed, seen, new_lengths())
        text = ", ".join(f"{name}: {count}" for name, count in sorted(seen.items()))
        print(f"{kind}, seeds {chosen.seed} to {seed - 1}, {time.monotonic() - start:.0f} s: {text}", flush=True)  # noqa: T201


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
