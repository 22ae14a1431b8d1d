"""`recover` releases every request. Cached pages, leases, imports and steps in flight go on, whatever was interrupted.

Each call is interrupted at many bytecodes, with every kind of layers, with tiers, replicas and events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kvcache import (
    ImportCopier,
    InvalidRequestError,
    KVEvents,
    PagedKVCacheManager,
    PageLease,
    PendingImport,
    Recovered,
    StepInFlight,
    TextContext,
)
from kvcache.replica.context import read_context
from kvcache.replica.copier import ImportBook
from kvcache.replica.leases import PageLeases
from kvcache.replica.replica import Replica
from kvcache.replicas import Replicas
from kvcache.steps_in_flight import StepsInFlight
from kvcache.under_way import Call
from tests.kvcache.build import as_long_as, manager_of, proven
from tests.kvcache.contents_oracle import KINDS
from tests.kvcache.events.mirror import Mirror
from tests.kvcache.kv import KVTokens, Run
from tests.kvcache.random_model.interrupts import end_unknown, interrupted

PAGE, PAGES = 4, 96
CACHED, LEASED, RUNNING, COMING = (range(100 * at, 100 * at + 22) for at in range(1, 5))
Worlds = dict[str, tuple[str, dict[str, Any]]]
EVENTS = {"kv_events": KVEvents("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")}
WORLDS: Worlds = {
    **{kind: (kind, {}) for kind in KINDS},
    "states apart": ("state", {"params": {"state_copies": 12}}),
    "tiers": ("full", {"host_slots": 48}),
    "tiers of a window": ("window", {"host_slots": 48}),
    "tiers of states": ("state", {"host_slots": 64, "params": {"tier_state_share": 0.5}}),
    "replicas": ("window", {"dp": 2}),
    "quotas": ("full", {"params": {"tenant_quota": 0.5}}),
    "events": ("window", {"host_slots": 48, "params": EVENTS}),
}


def made(world: str) -> PagedKVCacheManager:
    kind, options = WORLDS[world]
    params = {**KINDS[kind], **options.get("params", {})}
    told: dict[str, Any] = {**options, "params": params}
    return manager_of(PAGES, page_size=PAGE, layers=2, dtype=torch.int64, checks=False, **told)


class Scene:
    """A manager with a cached prompt, a lease of a released request, a leased request that runs, and an open import
    to which a copier may write.
    """

    def __init__(self, manager: PagedKVCacheManager, source: PagedKVCacheManager) -> None:
        self.manager, self.source, self.kv = manager, source, KVTokens(manager)
        # for each request, the token after its last step: draft layers compute the KV before it again
        self.ended: dict[str, int] = {}
        self.leases: list[PageLease] = []
        self.imports: list[PendingImport] = []
        self.copiers: list[ImportCopier] = []
        self.steps: list[StepInFlight] = []
        self.told: list[tuple[tuple[int, ...], ...]] = []  # pages that readers of a lease know
        for name in range(6):  # all pages are in use or cached
            self.served(range(1000 * name, 1000 * name + 60), "old")
            manager.release("old")
        self.served(CACHED, "cached")
        manager.release("cached")
        self.served(LEASED, "leased")
        self.lease("leased")
        manager.release("leased")
        self.running = self.served(RUNNING, "running")
        self.lease("running")
        self.reader = self.claimed([*COMING, 7], "reader")
        self.pending = self.import_of(self.reader)
        self.copier = manager.copier(self.pending)
        self.copiers.append(self.copier)
        self.copier.take()
        self.hit = self.found(CACHED)

    def claimed(self, tokens: Sequence[int], name: str) -> TextContext:
        self.manager.external_claim(name, 0)
        return TextContext([*tokens], 64, name)

    def compute(self, context: TextContext) -> None:
        again = self.ended.get(context.request_id, -1)
        self.kv.run([Run.of(self.manager, context)._replace(again=again)], self.manager.fetch([context]))
        self.ended[context.request_id] = context.active_idx

    def run(self, context: TextContext) -> None:
        self.compute(context)
        for states in self.manager.states[:1]:
            page = states.pages_at([context.request_id], [context.start_idx])
            states.advance(page, [context.active_idx])
        context.update(7)
        self.manager.step([context])

    def served(self, tokens: range, name: str) -> TextContext:
        return self.go_on(self.claimed(tokens, name))

    def go_on(self, context: TextContext) -> TextContext:
        length = context.end_idx
        for _ in as_long_as(lambda: context.end_idx == length):
            assert self.manager.maybe_reserve(context)
            self.run(context)
        return context

    def lease(self, name: str) -> None:
        self.leases.append(self.manager.lease(name))
        self.told.append(self.manager.block_table(name).groups)

    def import_of(self, context: TextContext) -> PendingImport:
        """Imports the prompt that the other manager has computed."""
        pending = self.manager.import_block_table(context, self.source.block_table("source"))
        assert pending is not None
        self.imports.append(pending)
        return pending

    def found(self, tokens: range) -> int:
        """Returns how many tokens of a prompt a new request would find on the first replica."""
        contents = self.manager.contents
        return contents.cached(0, contents.digests(TextContext([*tokens, 1], 64)))

    def bytes_of(self, groups: tuple[tuple[int, ...], ...]) -> list[bytes]:
        """The content of pages that a block table names, in the first replica."""
        (blocks,), tables = self.manager.device_tensors[0], len(self.manager.layer_tables.tables)
        found = [blocks[list(pages)].numpy().tobytes() for pages in groups[:tables]]
        for states, pages in zip(self.manager.states, groups[tables:], strict=False):
            found += [one[list(pages)].numpy().tobytes() for shard in states.blocks for one in shard]
        return found

    def write_everywhere(self) -> None:
        """Overwrites all pages and states that other requests could get now."""
        for replica, (blocks,) in zip(self.manager._replicas.each, self.manager.device_tensors, strict=True):
            pool = replica.pool
            free = (pool.holders == 0) & (pool.writers == 0) & ~pool.index.published
            blocks[np.flatnonzero(free)] = 99
        for states in self.manager.states if not self.manager.slab_pages else ():
            of = states.pool
            unused = np.flatnonzero((of.holders == 0) & (of.writers == 0) & ~of.index.published)
            for one in states.blocks[0]:
                one[unused[unused > 0]] = 99

    @property
    def written(self) -> set[int]:
        """The pages of the first replica that a copier or a step in flight may write."""
        pages = {int(page) for one in self.imports if not one.closed for page in one.written}
        for step in self.manager.steps_in_flight:
            pages |= {*step.inputs[0].lookup_table.numpy().ravel().tolist()} - {0}
        return pages


def fork(scene: Scene) -> None:
    scene.manager.fork(scene.running, scene.running.fork("child"))


def step(scene: Scene) -> Callable[[], object]:
    if scene.manager.states:  # otherwise the lease forbids overwriting the state
        scene.manager.end_lease(scene.leases.pop())
        scene.told.pop()
    for _ in as_long_as(lambda: scene.running.end_idx % PAGE > 0):  # the next step fills a page
        scene.go_on(scene.running)
    assert scene.manager.maybe_reserve(scene.running)
    scene.compute(scene.running)
    for states in scene.manager.states[:1]:
        states.advance(states.pages_at(["running"], [scene.running.start_idx]), [scene.running.active_idx])
    scene.running.update(7)
    return lambda: scene.manager.step([scene.running])


def duplicate(scene: Scene) -> Callable[[], object]:
    """A step that publishes pages which another request has published meanwhile, and which readers of a lease know."""
    contexts = [scene.claimed(range(600, 622), name) for name in ("first", "second")]
    for tokens in (6, 8):
        for context in contexts:
            context.set_token_indices(active_idx=tokens)
            assert scene.manager.maybe_reserve(context)
        for context in contexts[: 2 if tokens == 6 else 1]:
            scene.run(context)
        if tokens == 6:
            scene.lease("second")
    scene.compute(contexts[1])
    contexts[1].update(7)
    return lambda: scene.manager.step(contexts[1:])


def reserve(scene: Scene) -> Callable[[], object]:
    """A reservation that finds cached pages, and evicts others."""
    scene.manager.external_claim("new", 0)
    context = TextContext([*CACHED, *range(700, 730)], 64, "new")
    return lambda: scene.manager.maybe_reserve(context)


def reserve_batch(scene: Scene) -> Callable[[], object]:
    contexts = [scene.claimed(range(first, first + 30), f"r{first}") for first in (100, 700)]
    return lambda: scene.manager.reserve_batch([*contexts, scene.running])


def fetch_ahead(scene: Scene) -> Callable[[], object]:
    return lambda: scene.steps.append(scene.manager.fetch_ahead([scene.running]))


def end_step(scene: Scene) -> Callable[[], object]:
    fetch_ahead(scene)()
    scene.manager.release("running")
    return lambda: scene.manager.end_step(scene.steps[0])


def import_another(scene: Scene) -> Callable[[], object]:
    context = scene.claimed([*COMING, 7], "another")
    return lambda: scene.import_of(context)


def copier(scene: Scene) -> Callable[[], object]:
    pending = scene.import_of(scene.claimed([*COMING, 7], "another"))
    return lambda: scene.copiers.append(scene.manager.copier(pending))


def commit(scene: Scene) -> Callable[[], object]:
    context = scene.claimed([*COMING, 7], "another")
    pending = scene.import_of(context)
    copy = scene.manager.copier(pending)
    scene.copiers.append(copy)
    for part, of_part in zip(copy.take(), pending.parts, strict=True):
        if not len(of_part.besides):  # both managers have the same layout
            ours, theirs = scene.manager.device_tensors[0][0], scene.source.device_tensors[0][0]
            ours[np.asarray(part.dst_pages)] = theirs[np.asarray(part.src_pages)]
    proof = copy.prove()
    return lambda: scene.manager.commit_import(context, pending, proof)


def lend(scene: Scene) -> Callable[[], object]:
    wanted = scene.manager.contents.digests(TextContext([*CACHED, 1], 64))
    return lambda: scene.manager.contents.lease("peer", 0, wanted, PAGES)


CALLS: dict[str, Callable[[Scene], Callable[[], object]]] = {
    "external_claim": lambda scene: lambda: scene.manager.external_claim("claimed", 0),
    "maybe_reserve": reserve,
    "reserve_batch": reserve_batch,
    "fetch": lambda scene: lambda: scene.manager.fetch([scene.running]),
    "step": step,
    "step of duplicates": duplicate,
    "fork": lambda scene: partial(fork, scene),
    "release": lambda scene: lambda: scene.manager.release("running"),
    "fetch_ahead": fetch_ahead,
    "end_step": end_step,
    "lease": lambda scene: lambda: scene.leases.append(scene.manager.lease("running")),
    "end_lease": lambda scene: lambda: scene.manager.end_lease(scene.manager.lease("running")),
    "import_block_table": import_another,
    "copier": copier,
    "commit_import": commit,
    "cancel_import": lambda scene: lambda: scene.manager.cancel_import(scene.pending),
    "contents.lease": lend,
    "reset_prefix_cache": lambda scene: scene.manager.reset_prefix_cache,
    "flush_tiers": lambda scene: scene.manager.flush_tiers,
}


def check(scene: Scene, call: str, before: set[str], content: list[list[bytes]], report: Recovered) -> None:
    """Checks all that `recover` promises."""
    manager = scene.manager
    manager.check()
    assert (report.claimed, manager.recover().claimed) == ((), ())
    assert {*report.released} <= before | {"claimed", "child"}
    assert not any(manager.contains(name) for name in before | {*report.released})
    assert {*scene.leases} - {*report.leases} == set(), "a lease of before is lost"
    scene.write_everywhere()
    for pages, held in zip(scene.told, content, strict=True):
        assert scene.bytes_of(pages) == held, "a page that readers of a lease know was overwritten"
    pool = manager._replicas.each[0].pool
    assert all(pool.writers[page] for page in scene.written)
    if call != "cancel_import":
        assert {scene.pending} <= {*report.imports}
        assert {scene.copier} <= {*report.copiers}
    found = [scene.found(tokens) for tokens in (CACHED, LEASED, RUNNING)]
    if report.call == "reset_prefix_cache":
        assert found == [0, 0, 0]
    elif call != "reset_prefix_cache":
        assert found[0] == scene.hit > 0


def end(scene: Scene, report: Recovered) -> None:
    """Requests go on as after a preemption. Then everything that is open ends, and nothing is held."""
    manager = scene.manager
    end_unknown(manager, report, scene.leases, scene.imports, scene.copiers)
    for one in manager.steps_in_flight:
        manager.end_step(one)
    for lease in scene.leases:
        manager.end_lease(lease)
    manager.external_claim("running", 0)
    scene.ended.clear()
    for _ in range(3):
        scene.go_on(scene.running)
    manager.release("running")
    for pending in scene.imports:
        manager.cancel_import(pending)
    for one in scene.copiers:
        one.give_up()
    assert not report.copiers or not any(one not in scene.copiers and not one.is_over for one in report.copiers)
    manager.flush_tiers()
    manager.check()
    assert (manager.num_held_blocks, manager.num_leased_blocks) == (0, 0)
    manager.reset_prefix_cache()


def points(call: Callable[[], object], count: int) -> list[int]:
    """Returns the numbers of `count` bytecodes of a call, which this function makes once."""
    _, length, _ = interrupted(call, 0, KeyboardInterrupt)
    return [*dict.fromkeys(np.linspace(1, length, count).astype(int).tolist())]


def is_possible(world: str, call: str) -> bool:
    """Steps with recurrent states do not overlap. Their chunks end where a state is to be kept."""
    return not (call in ("fetch_ahead", "end_step", "step of duplicates") and "state" in world)


def source_of(world: str) -> PagedKVCacheManager:
    """Returns another manager, which has computed the prompt that is imported."""
    kind = WORLDS[world][0]
    params = dict(KINDS[kind])
    source = manager_of(PAGES, page_size=PAGE, layers=2, dtype=torch.int64, checks=False, params=params)
    context = TextContext([*COMING], 64, "source")
    source.external_claim("source", 0)
    for _ in as_long_as(lambda: context.end_idx == len(COMING)):
        assert source.maybe_reserve(context)
        KVTokens(source).run_contexts([context], source.fetch([context]))
        for states in source.states:
            states.advance(states.pages_at(["source"], [context.start_idx]), [context.active_idx])
        context.update(7)
        source.step([context])
    source.lease("source")
    return source


@pytest.mark.few(8)
@pytest.mark.parametrize("world", sorted(WORLDS, key=lambda world: world in KINDS))
def test_after_any_call_is_interrupted_anywhere_nothing_is_lost_but_the_claims(world: str) -> None:
    manager, source, marked = made(world), source_of(world), 0
    mirror = Mirror(manager.kv_event_endpoints[0]).begin() if manager.kv_event_endpoints else None
    for call in (one for one in CALLS if is_possible(world, one)):
        scene = Scene(manager, source)
        at_each = points(CALLS[call](scene), 7)
        manager._mark.call = Call("none")
        end(scene, manager.recover())
        for at in at_each:
            scene = Scene(manager, source)
            interruptible = CALLS[call](scene)
            before, content = {*manager.recover().claimed}, [*map(scene.bytes_of, scene.told)]
            interrupted(interruptible, at, KeyboardInterrupt)
            marked += manager._mark.is_interrupted
            if not manager._mark.is_interrupted:
                manager._mark.call = Call("next")  # the next call was interrupted before its first change
            report = manager.recover()
            check(scene, call, before, content, report)
            if mirror is not None:
                mirror.settle(manager, 0)
                mirror.check_same(manager, 0)
            end(scene, report)
    assert marked > 40
    if mirror is not None:
        mirror.close()
    manager.close()
    source.close()


@pytest.mark.parametrize("world", ["full", "window and state", "tiers", "quotas"])
def test_a_recovery_that_is_interrupted_anywhere_and_made_again_loses_nothing(world: str) -> None:
    manager, source = made(world), source_of(world)
    scene = Scene(manager, source)
    manager._mark.call = Call("next")
    at_each = points(manager.recover, 16)
    end(scene, manager.recover())
    for at in at_each:
        scene = Scene(manager, source)
        before, content = {*manager.recover().claimed}, [*map(scene.bytes_of, scene.told)]
        manager._mark.call = Call("next")  # it was interrupted
        interrupted(manager.recover, at, KeyboardInterrupt)
        report = manager.recover()
        check(scene, "next", before, content, report)
        assert at == at_each[-1] or {*report.released} == before, "the repeated call names all requests"
        end(scene, report)
    manager.close()
    source.close()


class Ctrl(BaseException):
    """An exception that a signal handler raises in the middle of a call."""


def after(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, call: Callable[[], object]) -> None:
    """Makes a call, and raises an interrupt after this method has done its work."""
    real = getattr(owner, method)

    def stops(*arguments: Any, **options: Any) -> Any:
        real(*arguments, **options)
        raise Ctrl

    with monkeypatch.context() as patched:
        patched.setattr(owner, method, stops)
        with pytest.raises(Ctrl):
            call()


def import_pages(scene: Scene) -> object:
    wanted = scene.source.contents.digests(TextContext([*COMING, 7], 64))
    lent = scene.source.contents.lease("peer", 0, wanted, PAGES)
    assert lent is not None
    return scene.manager.contents.import_pages(TextContext([*COMING, 7], 64, "nobody"), 0, lent[1])


UNKNOWN: dict[str, tuple[Any, str, Callable[[Scene], object]]] = {
    "lease": (Replica, "grant", lambda scene: scene.manager.lease("running")),
    "contents.lease": (PageLeases, "grant_pages", lambda scene: lend(scene)()),
    "import_block_table": (ImportBook, "begin", lambda scene: import_another(scene)()),
    "contents.import_pages": (ImportBook, "begin", import_pages),
    "fetch_ahead": (StepsInFlight, "begin", lambda scene: fetch_ahead(scene)()),
}


@pytest.mark.parametrize("call", UNKNOWN)
def test_recover_ends_what_the_interrupted_call_has_made_and_its_caller_has_not_received(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(made("full"), source_of("full"))
    owner, method, make = UNKNOWN[call]
    after(monkeypatch, owner, method, lambda: make(scene))
    report = scene.manager.recover()
    assert report.call == call
    assert {*report.leases} == {*scene.leases}
    assert (report.imports, report.copiers, report.steps) == ((scene.pending,), (scene.copier,), ())
    end(scene, report)


def test_a_copier_that_its_caller_has_not_received_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(made("full"), source_of("full"))
    pending = scene.import_of(scene.claimed([*COMING, 7], "another"))
    after(monkeypatch, ImportBook, "make_copier", lambda: scene.manager.copier(pending))
    report = scene.manager.recover()
    assert (report.call, report.copiers, report.imports) == ("copier", (scene.copier,), (scene.pending, pending))
    scene.copiers.append(scene.manager.copier(pending))
    end(scene, report)


@pytest.mark.parametrize("call", ["end_lease", "end_step"])
def test_recover_ends_what_the_interrupted_call_was_to_end(call: str) -> None:
    at, done = 1, True
    while done:
        scene = Scene(made("full"), source_of("full"))
        lease, step = scene.manager.lease("running"), scene.manager.fetch_ahead([scene.running])
        one = lease if call == "end_lease" else step
        _, _, done = interrupted(partial(getattr(scene.manager, call), one), at, KeyboardInterrupt)
        assert one.is_over or scene.manager.recover().call is None or one.is_over, f"interrupted at {at}"
        if not scene.manager.recover().claimed:
            assert one.is_over
        scene.manager.end_lease(lease)
        scene.manager.end_step(step)
        scene.manager.check()
        at += 7
    assert at > 40


def test_a_close_that_was_interrupted_can_be_made_again_after_a_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(made("tiers"), source_of("tiers"))
    after(monkeypatch, Replicas, "close", scene.manager.close)
    assert scene.manager.recover().call == "close"
    scene.manager.check()
    scene.manager.close()
    scene.manager.end_lease(scene.leases[0])
    assert scene.manager.recover().call is None


class Own:
    """A caller's own context, which raises errors after the test has set a flag."""

    def __init__(self, own: TextContext) -> None:
        self.request_id, self.is_broken, self._own = own.request_id, False, own

    def __getattr__(self, name: str) -> Any:
        if self.is_broken:
            raise OSError("gone")
        return getattr(self._own, name)


def test_contexts_start_anew_even_if_one_of_them_is_broken() -> None:
    manager = manager_of(40, page_size=4, checks=False)
    contexts: list[Any] = [Own(TextContext(range(100 * at, 100 * at + 10), 64, f"own {at}")) for at in range(2)]
    contexts.append(TextContext(range(50), 64, "ours"))
    for context in contexts:
        manager.external_claim(context.request_id, 0)
        context.set_token_indices(active_idx=8)
        assert manager.maybe_reserve(context)
        manager.fetch([context])
        context.update(1)
        manager.step([context])
    batch = manager.batch(contexts)
    contexts[0].is_broken = True
    manager._mark.call = Call("next")  # it was interrupted
    assert manager.recover().released == ("own 0", "own 1", "ours")
    contexts[0].is_broken = False
    assert [one.start_idx for one in contexts] == [8, 0, 0]
    assert [one.active_idx for one in contexts] == [10, 10, 50]
    for context in contexts:
        manager.external_claim(context.request_id, 0)
    assert manager.reserve_batch(contexts).all()
    assert [one.start_idx for one in contexts] == [8, 8, 16], "their full pages are still cached"
    manager.release("ours")
    with pytest.raises(InvalidRequestError, match="'ours': fetch: it was released after the batch was made"):
        manager.fetch(batch)
    manager.close()


def test_a_token_that_a_step_in_flight_computes_is_not_lost() -> None:
    manager = manager_of(40, page_size=4, checks=False)
    context = TextContext(range(7), 64, "r")
    manager.external_claim("r", 0)
    assert manager.maybe_reserve(context)
    step = manager.fetch_ahead([context])
    context.update_with_future_token()
    manager._mark.call, manager._mark.context = Call("next"), read_context(context)  # it was interrupted
    assert manager.recover().steps == (step,)
    assert manager._mark.context is None
    manager.end_step(step)
    context.realize_future_token(5)
    manager.external_claim("r", 0)
    assert manager.maybe_reserve(context)
    assert (context.start_idx, context.tokens.tolist()) == (0, [*range(7), 5])
    manager.fetch([context])
    context.update(6)
    manager.step([context])
    manager.release("r")
    assert manager.num_free_blocks == 40


def test_a_copier_that_gives_up_meanwhile_does_not_hide_which_call_was_interrupted() -> None:
    scene = Scene(made("full"), source_of("full"))
    scene.manager.cancel_import(scene.pending)
    scene.manager._mark.call = Call("fork")  # it was interrupted
    scene.copier.give_up()
    assert scene.manager.recover().call == "fork"
    assert scene.manager.recover().imports == ()


def test_a_recovery_of_a_right_state_changes_nothing_and_reports_what_is_open() -> None:
    scene = Scene(made("full"), source_of("full"))
    pages = scene.manager.get_req_blocks("running")
    for _ in range(2):
        found = scene.manager.recover()
        assert (found.call, found.released) == (None, ())
        assert {*found.claimed} == {"running", "reader"}
        assert {*found.leases} == {*scene.leases}
        assert (found.imports, found.copiers) == ((scene.pending,), (scene.copier,))
    assert scene.manager.get_req_blocks("running") == pages
    scene.manager.cancel_import(scene.pending)
    assert scene.manager.recover().copiers == (scene.copier,)
    scene.copier.give_up()
    assert scene.manager.recover().imports == ()
    pending = scene.import_of(scene.claimed([*COMING, 7], "another"))
    proven(scene.manager, pending)
    assert (scene.manager.recover().imports, scene.manager.recover().copiers) == ((pending,), ())
