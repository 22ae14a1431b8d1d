"""Wrong calls between right calls. Each wrong call must raise an error of pagewire and leave the manager's state
unchanged.
"""

from __future__ import annotations

import dataclasses
import types
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from kvcache import (
    Batch,
    BlockTable,
    ImportProof,
    KVCacheError,
    KVCacheParams,
    PagedKVCacheManager,
    RangeRetention,
    Retention,
    Routing,
    TextContext,
)
from kvcache.replica.hashing import PrefixHasher
from kvcache.steps_in_flight import StepInFlight, StepsInFlight
from tests.kvcache.books import Books, books_of, first_difference
from tests.kvcache.build import manager_of
from tests.kvcache.random_model import seam
from tests.kvcache.random_model.matrix import PAGE_SIZE, Chooser
from tests.kvcache.random_model.plain import Request

Wrong = Callable[[], object]


class Wild:
    """An object that no parameter accepts."""

    def __repr__(self) -> str:
        return "wild\nobject"


def nothing_right() -> list[Any]:
    """Values that no parameter accepts."""
    return [Wild(), Wild, 1.5, float("nan"), float("inf"), [], {}, b"x", (None for _ in ()), np.zeros(2), np.float64(1)]


def no_integer(least: int = 1) -> list[Any]:
    return [*nothing_right(), None, True, np.bool_(1), "1", least - 1, -(10**18), 10**5000, torch.tensor([1, 2])]


def no_size() -> list[Any]:
    return [*no_integer(), 10**18, 1 << 40]


def no_text() -> list[Any]:
    return [*nothing_right(), 1, True]


def no_keys() -> list[Any]:
    pairs = [[(1,)], [(1, b"x", 2)], [(b"x", 1)], [(-1, b"x")], [(1 << 31, b"x")], [(0.0, b"x")], [(0, "x")], [(0, 5)]]
    return [None, 1, 1.5, "ab", [None], ["ab"], Wild(), [(True, b"x")], np.zeros(2), *pairs]


NO_SALT = ["\ud800", 1, b"salt", 1.5, True, [], Wild()]
NO_HINT = ["soon", 1, True, {}, Wild(), RangeRetention(0)]


class WrongCalls:
    """Makes wrong calls on a manager.

    Args:
        live: the claimed requests, by name.
        imports: an open import with its context and its copier (None if no caller has one); None if none is open.
        tails: an open import that no request waits for, with its copier; None if none is open.
        old: a closed import, and the proof with which it was committed. Each is None if there is none.

    Attributes:
        seen: how often each wrong call was made.
    """

    def __init__(
        self,
        manager: PagedKVCacheManager,
        choose: Chooser,
        live: dict[str, Request],
        imports: Callable[[], tuple[Any, TextContext, Any] | None],
        tails: Callable[[], tuple[Any, Any] | None],
        old: Callable[[], tuple[Any, Any]],
    ) -> None:
        self.manager, self.choose, self.live = manager, choose, live
        self.imports, self.tails, self.old = imports, tails, old
        self.seen: Counter[str] = Counter()
        self.other = manager_of(8, page_size=PAGE_SIZE, rows=2, checks=False, dtype=torch.int64)
        self.stranger = TextContext([1, 2, 3, 4], 20, "stranger")
        self.other.external_claim("stranger")
        assert self.other.maybe_reserve(self.stranger)
        self.foreign_batch = self.other.batch([self.stranger])
        self.other.fetch([self.stranger])
        self.stranger.update(5)
        self.other.step([self.stranger])
        # The threads of lower tiers may change the manager's state at any time.
        self.is_quiet = not (manager.params.file_tier_dir or manager.params.object_tier_io)
        self.calls = [name for name in dir(self) if name.startswith("wrong_")]

    def make(self) -> bool:
        """Makes one wrong call if its arguments exist, and checks that the state stays the same."""
        name = self.choose.pick(self.calls)
        call: Callable[[], Wrong | None] = getattr(self, name)
        wrong = call()
        if wrong is None:
            return False
        before = self.books()
        try:
            wrong()
            said = ""
        except KVCacheError as refusal:
            said = str(refusal)
        assert said, f"{name}: a wrong call went through"
        assert "\n" not in said, name
        assert not (changed := first_difference(before, self.books())), f"{name}: {changed}"
        self.seen[name] += 1
        return True

    def books(self) -> Books:
        contexts = [one.context for one in self.live.values()]
        return books_of(self.manager, contexts) if self.is_quiet else []

    def any_context(self) -> TextContext | None:
        names = sorted(self.live)
        return self.live[self.choose.pick(names)].context if names else None

    def with_pages(self) -> TextContext | None:
        held = [name for name in sorted(self.live) if self.live[name].has_pages]
        return self.live[self.choose.pick(held)].context if held else None

    def no_context(self) -> Any:
        """Returns an object that is not a context of this manager, or a second context object for a request that holds
        pages.
        """
        held = self.with_pages()
        twins = [] if held is None else [TextContext(np.maximum(held.tokens, 0), 99, held.request_id)]
        shape = types.SimpleNamespace(request_id="stranger", start_idx=0)
        return self.choose.pick([*nothing_right(), *twins, None, 1, "r1", shape, self.stranger])

    def no_batch(self) -> Any:
        context = self.any_context()
        some = [] if context is None else [[context, context], [context, None], [context, self.no_context()]]
        lists = [None, 1, 1.5, "abc", {"a": 1}, [None], [self.stranger], np.ones(2), (None for _ in range(2)), Wild()]
        return self.choose.pick([*some, *lists, self.foreign_batch, [self.no_context()]])

    def pick(self, values: Sequence[Any]) -> Any:
        return self.choose.pick(values)

    # ---- wrong calls: each method returns None if the manager has no suitable object

    def wrong_claim(self) -> Wrong:
        wrong = self.pick([*no_text(), None])
        return lambda: self.manager.external_claim(wrong, 0)

    def wrong_replica(self) -> Wrong:
        wrong = self.pick([*no_integer(0), self.manager.num_replicas])
        if wrong is None and self.manager.num_replicas == 1:
            wrong = -1
        return lambda: self.manager.external_claim("new", wrong)

    def wrong_second_claim(self) -> Wrong | None:
        context = self.any_context()
        return context and (lambda: self.manager.external_claim(context.request_id, 0))

    def wrong_contains(self) -> Wrong:
        wrong = self.pick(no_text())
        return lambda: self.manager.contains(wrong)

    def wrong_request_id(self) -> Wrong:
        wrong = self.pick([*no_text(), None, "nobody", self.stranger])
        manager = self.manager
        return lambda: self.pick([manager.release, manager.get_req_blocks, manager.block_table])(wrong)

    def wrong_context(self) -> Wrong:
        wrong, manager = self.no_context(), self.manager
        calls: list[Callable[[Any], object]] = [
            manager.maybe_reserve,
            lambda context: manager.fork(context, TextContext([1], 9)),
            lambda context: manager.import_block_table(context, self.other.block_table("stranger")),
        ]
        if not isinstance(wrong, TextContext):  # The calls below also accept the name of a request that is not claimed.
            calls += [manager.get_replica, manager.get_or_recommend_replica, manager.admission, manager.prefetch]
            calls.append(lambda context: manager.claim(context).__enter__())
        return lambda: self.pick(calls)(wrong)

    def wrong_steps(self) -> Wrong | None:
        context, wrong, manager = self.any_context(), self.pick(no_integer()), self.manager
        calls: list[Callable[[Any], object]] = [
            lambda one: manager.maybe_reserve(one, wrong),
            lambda one: manager.reserve_batch([one], wrong),
            lambda one: manager.fetch([one], wrong),
            lambda one: manager.fetch_ahead([one], wrong),
            lambda one: manager.admission(one, wrong),
            lambda one: manager.fork(one, TextContext([1], 9), wrong),
            lambda one: manager.import_block_table(one, self.other.block_table("stranger"), wrong),
        ]
        return context and (lambda: self.pick(calls)(context))

    def wrong_batch(self) -> Wrong:
        wrong, manager = self.no_batch(), self.manager
        calls: list[Callable[[Any], object]] = [manager.reserve_batch, manager.fetch, manager.step]
        calls.append(manager.fetch_ahead)
        if not isinstance(wrong, Batch):  # A batch is a sequence of contexts, so `batch` accepts it.
            calls.append(manager.batch)
        return lambda: self.pick([*calls, manager.get_data_parallel_splits])(wrong)

    def wrong_order(self) -> Wrong | None:
        """Runs a request without pages, or computes more tokens than fit into the request's pages."""
        waiting = [one.context for _, one in sorted(self.live.items()) if not one.has_pages]
        call = self.pick([self.manager.fetch, self.manager.fetch_ahead])
        return (lambda: call([self.pick(waiting)])) if waiting else None

    def wrong_start(self) -> Wrong | None:
        """Makes the context of a request with pages claim more computed tokens than the request has."""
        context = self.with_pages()
        if context is None:
            return None
        before, (most, is_through) = context.start_idx, seam.most_computed(self.manager, context.request_id)
        if most >= context.active_idx - 1:
            return None
        start, manager = self.choose.integer(most + 1, context.active_idx - 1), self.manager
        # A context with one token to run makes a decode step. `maybe_reserve` accepts a decode step whose pages the
        # request has. Only the calls that run the step refuse it.
        asks = [] if start == context.active_idx - 1 and not is_through else [manager.maybe_reserve]
        calls: list[Callable[[Any], object]] = [*asks, lambda one: manager.fetch([one])]
        calls.append(lambda one: manager.fetch(manager.batch([one])))
        calls += [lambda one: manager.reserve_batch([one])] * bool(asks)

        def call() -> None:
            context.set_token_indices(start_idx=start)
            try:
                self.pick(calls)(context)
            finally:
                context.set_token_indices(start_idx=before)

        return call

    def wrong_fork(self) -> Wrong | None:
        parent, child = self.with_pages(), self.no_context()
        if parent is None:
            return None
        return lambda: self.manager.fork(parent, self.pick([child, parent, TextContext([9, 9], 9)]))

    def wrong_table(self) -> Wrong | None:
        context = self.any_context()
        table = self.other.block_table("stranger")
        calls: list[Callable[[Any], object]] = [
            lambda one: self.manager.import_block_table(one, self.pick([*nothing_right(), table])),
            lambda one: self.manager.import_block_table(one, table, others=self.no_tables()),
        ]
        return context and (lambda: self.pick(calls)(context))

    def no_tables(self) -> Any:
        """Returns an object that is not a list of block tables."""
        # An empty list is valid, because it names no further table.
        nothing = [one for one in nothing_right() if type(one) is not list]
        return self.pick([*nothing, None, 5, "ab", [None], [self.stranger], [[]], {1: 2}])

    def wrong_tail(self) -> Wrong:
        """Calls `import_pages` with a wrong context, replica or table, or on a manager that cannot import
        such pages.
        """
        contents, context = self.manager.contents, TextContext([1] * (2 * PAGE_SIZE + 1), 99, "tail")
        algorithm = self.manager.params.hash_algorithm
        hasher = PrefixHasher(algorithm, PAGE_SIZE, None, ())
        digests = hasher.digests(context.tokens, 0, 2).tobytes()
        fine = BlockTable("told", 0, 2 * PAGE_SIZE, PAGE_SIZE, ((1, 2),), "", algorithm, digests)
        if not contents.takes_any_part:
            return lambda: contents.import_pages(context, 0, fine)
        field, values = self.pick(
            [
                ("num_tokens", [*no_integer(), 5, 7, 2 * PAGE_SIZE + 1, 3 * PAGE_SIZE]),
                ("page_size", [*no_size(), 2 * PAGE_SIZE, PAGE_SIZE - 1]),
                ("first_page", [*no_integer(0), 1, 2, 3]),
                ("groups", [*nothing_right(), None, ((1,),), ((1, 1),), ((0, 1),), ((1, 2, 3),), ((1, 2), (1,))]),
                ("digests", [*nothing_right(), None, b"", digests[:-1], digests[::-1], bytes(len(digests))]),
                ("hash_algorithm", [*no_text(), None, "", "md5", "xxh3_128" if algorithm == "sha256" else "sha256"]),
                ("kinds", [Wild(), 1.5, None, ("window",), ("full",)]),
            ]
        )
        wrong = msgspec.structs.replace(fine, **{field: self.pick(values)})
        named = TextContext(context.tokens, 99, "tail", cache_salt="of another tenant")
        short, replica = (
            TextContext(context.tokens[:-1], 99, "tail"),
            self.pick([*no_integer(0), self.manager.num_replicas]),
        )
        calls: list[Wrong] = [
            lambda: contents.import_pages(self.pick([*nothing_right(), None, named, short]), 0, fine),
            lambda: contents.import_pages(context, replica, fine),
            lambda: contents.import_pages(context, 0, self.pick([*nothing_right(), None, wrong])),
            lambda: contents.import_pages(context, 0, fine, self.pick([self.no_tables(), [wrong], [fine, None]])),
        ]
        return self.pick(calls)

    def wrong_replica_of_contents(self) -> Wrong | None:
        """Looks up contents on a replica that does not exist."""
        if not self.manager.enable_prefix_caching:
            return None
        contents, wrong = self.manager.contents, self.pick([*no_integer(0), self.manager.num_replicas])
        wanted = contents.digests(TextContext([1] * 9, 99, "asker"))
        calls: list[Wrong] = [
            lambda: contents.cached(wrong, wanted),
            lambda: contents.lease("asker", wrong, wanted, 9),
            lambda: contents.bring("asker", wrong, wanted, 9),
        ]
        return self.pick(calls)

    def wrong_end_of_a_tail(self) -> Wrong | None:
        """Calls `commit_pages` with a wrong import or proof. Also makes other calls that are wrong for an import
        without a request.
        """
        manager, commit, context = self.manager, self.manager.contents.commit_pages, self.any_context()
        (old, used), tail, mine = self.old(), self.tails(), self.imports()
        forged = ImportProof("tail", 1 << 20)
        proofs = [*nothing_right(), None, forged, *([] if used is None else [used])]
        calls: list[Wrong] = [lambda: commit(self.pick([*nothing_right(), None]), forged)]
        if old is not None:
            calls += [lambda: commit(old, used)]
        if mine is not None:
            calls += [lambda: commit(mine[0], None if mine[2] is None else mine[2].proof)]
        if tail is not None:
            pending, copier = tail
            calls += [
                lambda: commit(pending, self.pick(proofs)),
                lambda: commit(dataclasses.replace(pending), self.pick(proofs)),
                lambda: manager.cancel_import(dataclasses.replace(pending)),
                lambda: self.other.contents.commit_pages(pending, forged),
                lambda: self.other.cancel_import(pending),
                lambda: copier.prove() if copier is not None else commit(pending, None),
            ]
            if context is not None:
                table = self.other.block_table("stranger")
                calls += [lambda: manager.commit_import(context, pending, self.pick(proofs))]
                calls += [lambda: manager.extend_import(context, pending, table, last=True)]
        return self.pick(calls)

    def wrong_commit(self) -> Wrong | None:
        """Calls `commit_import` with a wrong context, import or proof, or for an import that is closed."""
        if (mine := self.imports()) is None:
            return None
        (pending, context, copier), (old, used) = mine, self.old()
        forged, commit = ImportProof(context.request_id, 1 << 20), self.manager.commit_import
        proof = None if copier is None else copier.proof
        proofs = [*nothing_right(), forged, *[None] * pending.needs_copy, *([] if used is None else [used])]
        twin = TextContext(context.tokens, 99, context.request_id)
        calls: list[Wrong] = [
            lambda: commit(context, pending, self.pick(proofs)),
            lambda: commit(self.pick([*nothing_right(), None, twin, self.stranger]), pending, proof or forged),
            lambda: commit(context, self.pick([*nothing_right(), None, dataclasses.replace(pending)]), proof or forged),
        ]
        return self.pick([*calls, *([] if old is None else [lambda: commit(context, old, used)])])

    def wrong_extension(self) -> Wrong | None:
        """Calls `extend_import` with a wrong context, import or table."""
        if (mine := self.imports()) is None:
            return None
        (pending, context, _), (old, _), extend = mine, self.old(), self.manager.extend_import
        table = self.other.block_table("stranger")
        calls: list[Wrong] = [
            lambda: extend(context, pending, self.pick([*nothing_right(), None]), last=True),
            lambda: extend(self.pick([*nothing_right(), None, self.stranger]), pending, table, last=True),
            lambda: extend(context, self.pick([*nothing_right(), None, old]), table, last=True),
        ]
        return self.pick(calls)

    def wrong_cancel(self) -> Wrong:
        """Calls `cancel_import` with something that is not an import. For a closed import the call is a no-op."""
        return lambda: self.manager.cancel_import(self.pick([*nothing_right(), None, self.old()[1]]))

    def wrong_copier(self) -> Wrong:
        """Asks for the copier of an import a second time, or for the copier of a closed import, or makes a copier's
        calls in the wrong order.
        """
        mine, (old, _), wrong = self.imports(), self.old(), self.pick([*nothing_right(), None])
        calls: list[Wrong] = [lambda: self.manager.copier(wrong)]
        calls += [] if old is None else [lambda: self.manager.copier(old)]
        if mine is not None and (copier := mine[2]) is not None:
            calls += [lambda: self.manager.copier(mine[0])] + ([] if copier.proof is not None else [copier.prove])
        return self.pick(calls)

    def wrong_lease(self) -> Wrong:
        """Leases an unknown request, or a request that waits for its import."""
        wrong, mine = [*nothing_right(), None, "nobody"], self.imports()
        return lambda: self.manager.lease(self.pick([*wrong, *([] if mine is None else [mine[1].request_id])]))

    def wrong_end_of_a_lease(self) -> Wrong:
        """Calls `end_lease` with an object that is not a lease."""
        return lambda: self.manager.end_lease(self.pick([*nothing_right(), None]))

    def wrong_end_of_a_step(self) -> Wrong:
        """Calls `end_step` with an object that is not a step, or with an unknown step."""
        return lambda: self.manager.end_step(
            self.pick([*nothing_right(), None, StepInFlight(StepsInFlight([]), 0, 1, [])])
        )

    def wrong_foreign_handover(self) -> Wrong | None:
        """Passes valid arguments of one manager to another manager."""
        if (mine := self.imports()) is None:
            return None
        (pending, context, copier), victim = mine, self.other
        table, proof = victim.block_table("stranger"), None if copier is None else copier.proof
        calls: list[Wrong] = [
            lambda: victim.copier(pending),
            lambda: victim.cancel_import(pending),
            lambda: victim.commit_import(context, pending, proof),
            lambda: victim.extend_import(context, pending, table, last=True),
            lambda: victim.lease(context.request_id),
        ]
        return self.pick(calls)

    def wrong_inputs(self) -> Wrong:
        inputs = self.manager.fetch([])
        wrong = self.pick([*nothing_right(), None, types.SimpleNamespace(input_row_offsets="x")])
        return lambda: self.manager.increment_cache_lengths(inputs, wrong)

    def wrong_symbols(self) -> Wrong:
        if self.choose.integer(0, 1):
            wrong = self.pick([*no_size(), "cpu"])
            return lambda: self.manager.input_symbols(devices=wrong if wrong is not None else "cpu")
        wrong = self.pick([value for value in no_size() if value is not None])
        return lambda: self.manager.input_symbols(num_layers=wrong)

    def wrong_tokens(self) -> Wrong:
        wrong = self.pick([*nothing_right(), None, 5, "12", [-1], [1 << 31], [1.0], [None], [[1]], [True], [10**30]])
        return lambda: TextContext(wrong, 9)

    def wrong_token_of_a_context(self) -> Wrong:
        context, wrong = TextContext([1, 2], 9), self.pick([*no_integer(0), 1 << 31])
        return lambda: self.pick(
            [context.update, lambda one: context.set_token_indices(active_idx=-1 if one is None else one)]
        )(wrong)

    def wrong_tokens_of_a_batch(self) -> Wrong | None:
        context = self.with_pages()
        if context is None:
            return None
        batch = self.manager.batch([context])
        wrong = self.pick(
            [*nothing_right(), None, 5, "1", [1, 2], [-1], [1 << 31], [1.0], [None], [[1]], [True], Wild()]
        )
        return lambda: batch.update(wrong)

    def wrong_parts_of_a_context(self) -> Wrong | None:
        context = self.any_context()
        name, values = self.pick([("cache_salt", NO_SALT), ("extra_keys", no_keys()), ("retention", NO_HINT)])
        wrong = self.pick(values)
        if self.choose.integer(0, 1):
            return lambda: TextContext([1], 9, **{name: wrong})
        return context and (lambda: setattr(context, name, wrong))

    def wrong_context_sizes(self) -> Wrong:
        wrong = self.pick(no_size())
        return lambda: TextContext([1], wrong)

    def wrong_context_id(self) -> Wrong:
        wrong = self.pick(no_text())
        return lambda: TextContext([1], 9, wrong)

    def wrong_hint(self) -> Wrong:
        kind = self.pick([Retention, lambda **hint: RangeRetention(0, **hint)])
        name, values = self.pick(
            [
                ("priority", [*no_integer(0), 101]),
                ("ttl_s", [Wild(), "1", 0, -1.0, float("nan"), float("inf"), True, 10**30, []]),
                ("session_continues", ["yes", 1, Wild(), [], float("nan")]),
            ]
        )
        wrong = self.pick(values)
        return lambda: kind(**{name: wrong})

    def wrong_range(self) -> Wrong:
        if self.choose.integer(0, 1):
            wrong = self.pick([None, [1], {}, 1, "x", (1,), Wild()])
            return lambda: Retention(ranges=wrong)
        start, end = self.pick([*no_integer(0), 5]), 5
        return lambda: RangeRetention(start, end)

    def wrong_params(self) -> Wrong:
        name, values = self.pick(
            [
                *((name, no_integer()) for name in ("n_kv_heads", "head_dim", "n_devices", "data_parallel_degree")),
                ("page_size", [value for value in no_size() if value is not None]),
                *((name, [Wild(), None, 1, "no", 1.5, []]) for name in ("enable_prefix_caching", "is_mla")),
                ("dtype", ["float32", None, np.float32, Wild()]),
                *((name, [*no_text(), None]) for name in ("hash_algorithm", "page_order", "file_tier_key")),
                ("routing", [None, "prefix", Wild(), {}]),
                *(
                    (name, [Wild(), None, "1", -0.1, 1.1, float("nan"), True])
                    for name in ("max_hint_share", "tenant_quota")
                ),
                ("tenant_quotas", [None, 1, [("a", 1.0)], {"a": 2.0}, {1: 0.5}, {"a": "x"}]),
                *((name, ["1", float("nan"), float("inf"), Wild()]) for name in ("file_tier_max_gb",)),
                ("file_tier_dir", [1, b"x", Wild()]),
                ("object_tier_io", [1, "bucket"]),
                ("object_tier_pages", no_integer()),
                *(
                    (name, ["1", 0, -1.0, float("nan"), Wild()])
                    for name in ("object_tier_timeout_s", "object_tier_tokens_per_s")
                ),
            ]
        )
        wrong = self.pick(values)
        fine = {"dtype": torch.float32, "n_kv_heads": 1, "head_dim": 1}
        return lambda: KVCacheParams(**{**fine, name: wrong})

    def wrong_routing(self) -> Wrong:
        name, values = self.pick(
            [
                ("rule", [None, 1, "nearest", [], Wild()]),
                ("load_weight", [None, "1", -1.0, float("nan"), float("inf"), True]),
                ("load_decay", [None, "1", -0.1, 1.0, float("nan")]),
            ]
        )
        wrong = self.pick(values)
        return lambda: Routing(**{name: wrong})

    def wrong_manager(self) -> Wrong:
        fine: dict[str, Any] = {
            "params": KVCacheParams(torch.float32, 1, 1, page_size=4),
            "max_batch_size": 2,
            "max_seq_len": 8,
            "num_layers": 1,
            "devices": ["cpu"],
            "available_cache_memory": 1 << 10,
        }
        asking = self.choose.integer(0, 2)
        name, values = self.pick(
            [
                ("params", [None, {}, Wild(), KVCacheParams]),
                *((name, no_size()) for name in ("max_batch_size", "num_layers")),
                ("max_seq_len", no_size()),
                ("devices", [None, "cpu", [], ["cpu", "cpu"], ["meta"], ["tpu"], [None], [1], [Wild()], 1, ["cpu:3"]]),
                ("available_cache_memory", [*no_integer(0), *([] if asking else [0, 1 << 50, 10**18])]),
                ("page_size", [value for value in no_size() if value is not None]),
                *([] if asking else [("session", [Wild(), 1, "stream"]), ("enable_runtime_checks", [None, 1, Wild()])]),
                *([] if asking else [("zmq_endpoint_base", [1, b"x", Wild(), "nowhere"])]),
                *([("unheard_of", [1])] if asking else []),
            ]
        )
        wrong = self.pick(values)
        if name == "zmq_endpoint_base":
            fine["params"] = KVCacheParams(torch.float32, 1, 1, page_size=4, enable_prefix_caching=True)
        if name == "page_size":
            fine["params"] = KVCacheParams(torch.float32, 1, 1)
        if not asking:
            return lambda: PagedKVCacheManager(**{**fine, name: wrong})
        return lambda: PagedKVCacheManager.estimated_memory_size(**{**fine, name: wrong})
