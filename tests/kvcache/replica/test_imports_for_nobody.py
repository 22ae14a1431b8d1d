"""Imports for which no request waits. They publish later pages of a prompt before its first pages are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from kvcache import (
    BlockTable,
    BlockTableMismatchError,
    InvalidRequestError,
    KVEvents,
    LayerGroup,
    PendingImport,
    TextContext,
)
from kvcache.replica.copier import ImportBook
from tests.kvcache.build import as_long_as, proven
from tests.kvcache.events.mirror import Mirror
from tests.kvcache.served import SIZE, Served

PROMPT = range(33)  # eight full pages of 4 tokens, and one more token


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(pages: int = 24, host_slots: int = 0, **options: Any) -> Served:
        made.append(Served(pages, host_slots, **options))
        return made[-1]

    yield make
    for one in made:
        one.manager.check()
        assert one.manager.num_held_blocks == 0
        one.manager.close()


def lent(source: Served, first: int, stop: int = 8, tokens: Sequence[int] = PROMPT, **named: Any) -> BlockTable:
    """Returns a table of the pages `first` to `stop` of a prompt that the source has served. The source has leased them
    as it does for a reader.
    """
    contents = source.manager.contents
    context = TextContext([*tokens], 256, "theirs", **named)
    found = contents.lease("theirs", 0, contents.digests(context, first), stop - first)
    assert found is not None
    # The source runs no other request, so the pages keep their contents after the lease.
    source.manager.end_lease(found[0])
    return found[1]


def running(it: Served, chunk: int, tokens: Sequence[int] = PROMPT, **named: Any) -> TextContext:
    """Returns a request that has computed one chunk of the prompt and is still running."""
    context = it.claim(tokens, **named)
    assert it.manager.maybe_reserve(context)
    context.set_token_indices(active_idx=context.start_idx + chunk)
    it.run(context)
    return context


def brought(it: Served, source: Served, context: TextContext, table: BlockTable) -> PendingImport:
    """Begins an import of the pages in this table and copies them."""
    pending = it.manager.contents.import_pages(context, 0, table)
    assert pending is not None
    part = pending.parts[0]
    it.manager.device_tensors[0][0][part.dst_pages.tolist()] = source.manager.device_tensors[0][0][
        part.src_pages.tolist()
    ]
    return pending


def rest(it: Served, context: TextContext, chunk: int = 4) -> list[int]:
    """Runs the rest of a prompt. Returns the start of each chunk."""
    starts, length = list[int](), context.end_idx
    for _ in as_long_as(lambda: context.end_idx == length):
        assert it.manager.maybe_reserve(context)
        starts.append(context.start_idx)
        context.set_token_indices(active_idx=min(length, context.start_idx + chunk))
        it.run(context)
    it.manager.release(context.request_id)
    return starts


def test_a_running_prompt_continues_after_imported_pages_once_it_reaches_them(served: Any) -> None:
    source, it = served(), served()
    source.serve(PROMPT)
    context = running(it, 8)
    pending = brought(it, source, context, lent(source, 4))
    assert (pending.tokens, pending.num_tokens) == ((16, 32), 32)
    assert it.manager.num_held_blocks == 9 + 4
    it.manager.contents.commit_pages(pending, proven(it.manager, pending))
    it.manager.check()
    assert it.manager.num_held_blocks == 9
    assert rest(it, context) == [8, 12, 32]  # `kv` has compared all KV that these chunks have read.
    assert it.kv.compared == 8 + 12 + 32
    assert it.manager.metrics.cache_tokens == 16
    assert it.serve(PROMPT) == 32


def test_several_imports_of_one_prompt_end_in_any_order(served: Any) -> None:
    source, it = served(), served()
    source.serve(PROMPT)
    context = running(it, 4)
    later, earlier = (brought(it, source, context, lent(source, *part)) for part in ((6, 8), (3, 6)))
    for pending in (earlier, later):
        it.manager.contents.commit_pages(pending, proven(it.manager, pending))
    assert rest(it, context) == [4, 8, 32]


def test_pages_that_were_computed_meanwhile_are_published_once(served: Any) -> None:
    source, it = served(), served()
    source.serve(PROMPT)
    context = running(it, 4)
    pending = brought(it, source, context, lent(source, 2))
    context.set_token_indices(active_idx=20)
    it.run(context)
    it.manager.contents.commit_pages(pending, proven(it.manager, pending))
    assert it.manager.num_held_blocks == 9
    assert rest(it, context) == [32]
    assert it.manager.metrics.cache_tokens == 12


def test_an_import_that_ends_early_publishes_the_proven_pages(served: Any) -> None:
    source, it = served(), served()
    source.serve(PROMPT)
    context = running(it, 4)
    pending = brought(it, source, context, lent(source, 3))
    copier = it.manager.copier(pending)
    copier.take()
    it.manager.contents.commit_pages(pending, copier.prove(5 * SIZE))
    assert it.manager.num_held_blocks == 9
    assert rest(it, context) == [4, 8, 20, 24, 28, 32]


@pytest.mark.parametrize("taken", [False, True])
def test_a_cancelled_import_publishes_nothing_and_keeps_its_pages_while_they_may_be_written(
    served: Any, taken: bool
) -> None:
    source, it = served(), served()
    source.serve(PROMPT)
    context = running(it, 4)
    pending = brought(it, source, context, lent(source, 4))
    copier = it.manager.copier(pending) if taken else None
    it.manager.release(context.request_id)
    it.manager.cancel_import(pending)
    it.manager.cancel_import(pending)
    it.manager.check()
    assert it.manager.num_held_blocks == (4 if taken else 0)
    if copier is not None:
        copier.give_up()
    assert it.manager.num_held_blocks == 0
    assert it.serve(PROMPT) == 4
    with pytest.raises(InvalidRequestError, match="commit_pages: this import was already finished or cancelled"):
        it.manager.contents.commit_pages(pending, None)


def test_half_of_the_free_pages_stay_free_for_the_manager_s_own_requests(served: Any) -> None:
    source, it = served(), served(pages=15)
    source.serve(PROMPT)
    context, table = running(it, 4), lent(source, 4)
    assert it.manager.num_free_blocks == 6
    assert it.manager.contents.import_pages(context, 0, table) is None
    assert it.manager.num_free_blocks == 6
    pending = it.manager.contents.import_pages(context, 0, lent(source, 5))
    assert it.manager.num_free_blocks == 3
    it.manager.cancel_import(pending)
    it.manager.release(context.request_id)


def test_only_a_proof_of_this_import_counts(served: Any) -> None:
    source, it = served(), served()
    source.serve(PROMPT)
    context = running(it, 4)
    pending, other = (brought(it, source, context, lent(source, *part)) for part in ((6, 8), (3, 6)))
    for proof, reason in (
        (None, "without a proof"),
        (proven(it.manager, other), "commit_pages with the proof of another import"),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            it.manager.contents.commit_pages(pending, proof)
    assert it.manager.contents.cached(0, it.manager.contents.digests(context, 3)) == 0
    for one in (pending, other):
        it.manager.cancel_import(one)
    it.manager.release(context.request_id)


def test_neither_commit_takes_the_import_of_the_other(served: Any) -> None:
    source, it = served(), served()
    source.serve(PROMPT)
    context = running(it, 4)
    nobodys = brought(it, source, context, lent(source, 4))
    with pytest.raises(InvalidRequestError, match="'r1'.*belongs to another request"):
        it.manager.commit_import(context, nobodys, proven(it.manager, nobodys))
    waiting = it.claim(PROMPT)
    own = it.manager.import_block_table(waiting, lent(source, 0))
    with pytest.raises(InvalidRequestError, match="'r2': commit_pages: a request waits for this import"):
        it.manager.contents.commit_pages(own, proven(it.manager, own))
    for one, of in ((nobodys, context), (own, waiting)):
        it.manager.cancel_import(one)
        it.manager.release(of.request_id)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "other tokens": ({"digests": bytes(4 * 32)}, "holds other tokens"),
    "no digests": ({"digests": b"", "hash_algorithm": ""}, "by ''; full pages of 4 by 'sha256' are needed"),
    "half a page": ({"num_tokens": 30}, "covers 30 tokens|3 full pages"),
    "a page twice": ({"groups": ((5, 5, 6, 7),)}, "names a page twice"),
    "a page of many digits": ({"groups": ((10**5000, 5, 6, 7),)}, "names page a int"),
    "a first page of many digits": ({"first_page": 10**5000}, "begins with page a int"),
    "a page size of many digits": ({"page_size": 10**5000}, "has pages of a int"),
    "tokens of many digits": ({"num_tokens": 10**5000}, "covers a int"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_tables_are_refused_and_nothing_is_taken(served: Any, wrong: str) -> None:
    changes, reason = WRONG[wrong]
    source, it = served(), served()
    source.serve(PROMPT)
    context, table = it.waiting(PROMPT), msgspec.structs.replace(lent(source, 4), **changes)
    with pytest.raises(BlockTableMismatchError, match=reason):
        it.manager.contents.import_pages(context, 0, table)
    claimed = it.claim(PROMPT)
    with pytest.raises(BlockTableMismatchError):
        it.manager.import_block_table(claimed, table)
    assert it.manager.num_held_blocks == 0
    it.manager.release(claimed.request_id)


def test_pages_of_another_salt_are_refused(served: Any) -> None:
    source, it = served(), served()
    source.serve(PROMPT, "theirs")
    table = lent(source, 4, cache_salt="theirs")
    with pytest.raises(BlockTableMismatchError, match="holds other tokens"):
        it.manager.contents.import_pages(it.waiting(PROMPT, "ours"), 0, table)
    assert it.manager.contents.import_pages(it.waiting(PROMPT, "theirs"), 0, table) is not None
    (pending,) = it.manager._replicas.each[0].imports.each
    it.manager.cancel_import(pending)


@pytest.mark.parametrize("replica", [-1, 1, None, True, "0", 0.0])
def test_a_replica_that_does_not_exist_is_named_with_the_request(served: Any, replica: Any) -> None:
    source, it = served(), served()
    source.serve(PROMPT)
    contents, context, table = it.manager.contents, it.waiting(PROMPT), lent(source, 4)
    wanted = contents.digests(context)
    calls: list[tuple[str, Callable[[], object]]] = [
        (f"request {context.request_id!r}", lambda: contents.import_pages(context, replica, table)),
        ("request 'asker'", lambda: contents.lease("asker", replica, wanted, 9)),
        ("request 'asker'", lambda: contents.bring("asker", replica, wanted, 9)),
        ("cached", lambda: contents.cached(replica, wanted)),
    ]
    for name, call in calls:
        with pytest.raises(InvalidRequestError, match=f"{name}: replica_idx is {replica!r}: an integer from 0 to 0"):
            call()
    assert it.manager.num_held_blocks == 0


@pytest.mark.parametrize("others", [5, None, "ab", [None], {1}, [b""]])
def test_an_invalid_list_of_further_tables_is_refused_and_the_manager_continues(served: Any, others: Any) -> None:
    source, it = served(), served()
    source.serve(PROMPT)
    context, table = it.claim(PROMPT), lent(source, 0)
    for call in (
        lambda: it.manager.contents.import_pages(context, 0, table, others),
        lambda: it.manager.import_block_table(context, table, others=others),
    ):
        with pytest.raises(
            BlockTableMismatchError, match=rf"request '{context.request_id}': .* is .*BlockTable.* is needed"
        ):
            call()
    assert it.manager.num_held_blocks == 0
    assert rest(it, context)[0] == 0


@pytest.mark.parametrize("options", [{"caching": False}, {"groups": True}])
def test_a_model_that_has_no_use_for_later_pages_takes_none(served: Any, options: dict[str, Any]) -> None:
    source = served()
    source.serve(PROMPT)
    window = {"layers": 2, "params": {"groups": (LayerGroup("full", (0,)), LayerGroup("window", (1,), 100))}}
    it = served(**(window if options.pop("groups", False) else options))
    assert not it.manager.contents.takes_any_part
    assert source.manager.contents.takes_any_part
    with pytest.raises(BlockTableMismatchError, match="needs prefix caching and a single table of full attention"):
        it.manager.contents.import_pages(it.waiting(PROMPT), 0, lent(source, 4))


class Ctrl(BaseException):
    """An exception that a signal handler raises in the middle of a call."""


@pytest.mark.parametrize("call", ["import_pages", "commit_pages"])
def test_after_an_interrupt_nothing_is_lost(served: Any, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def after(name: str) -> None:
        real = getattr(ImportBook, name)

        def interrupted(*arguments: Any) -> None:
            real(*arguments)
            raise Ctrl

        monkeypatch.setattr(ImportBook, name, interrupted)

    source, it = served(), served()
    source.serve(PROMPT)
    context, pending = running(it, 4), None
    contents = it.manager.contents
    if call == "commit_pages":
        pending = brought(it, source, context, lent(source, 4))
        proof = proven(it.manager, pending)
        after("commit")
        with pytest.raises(Ctrl):
            contents.commit_pages(pending, proof)
    else:
        after("begin")
        with pytest.raises(Ctrl):
            contents.import_pages(context, 0, lent(source, 4))
    recovered = it.manager.recover()
    assert recovered.call == f"contents.{call}"
    assert (recovered.released, recovered.imports) == ((context.request_id,), ())
    it.manager.check()
    assert it.manager.num_held_blocks == 0
    it.manager.external_claim(context.request_id)
    assert rest(it, context) == ([4, 8, 12, 32] if pending else [4, 8, 12, 16, 20, 24, 28, 32])


def test_routers_learn_of_the_pages_and_their_order(served: Any) -> None:
    source, it = served(), served(params={"kv_events": KVEvents("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")})
    source.serve(PROMPT)
    with Mirror(it.manager.kv_event_endpoints[0]).begin() as mirror:
        context = running(it, 4)
        pending = brought(it, source, context, lent(source, 4))
        it.manager.contents.commit_pages(pending, proven(it.manager, pending))
        mirror.settle(it.manager, 0)
        mirror.check_same(it.manager, 0)
        assert len(mirror.tree) == 1, "Dynamo's index takes no page whose parent is missing"
        assert rest(it, context) == [4, 8, 12, 32]
        mirror.settle(it.manager, 0)
        mirror.check_same(it.manager, 0)
        assert len(mirror.tree) == 8


def test_routers_learn_the_tokens_of_the_pages_even_if_the_prompt_has_changed(served: Any) -> None:
    source, it = served(), served(params={"kv_events": KVEvents("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")})
    source.serve(PROMPT)
    with Mirror(it.manager.kv_event_endpoints[0]).begin() as mirror:
        context = it.waiting(PROMPT)
        pending = brought(it, source, context, lent(source, 4))
        context.set_token_indices(active_idx=20, end_idx=20)  # The request drops the tokens of its last three pages.
        for token in range(100, 113):
            context.update(token)
        it.manager.contents.commit_pages(pending, proven(it.manager, pending))
        mirror.settle(it.manager, 0)
        tokens = {one for one, _ in mirror.there["GPU"].values()}
        assert tokens == {(*PROMPT,)[first : first + SIZE] for first in range(16, 32, SIZE)}
    assert it.serve(PROMPT) == 0
    assert it.serve(PROMPT) == 32


def test_evicted_imported_pages_stay_in_the_host(served: Any) -> None:
    source, it = served(), served(host_slots=80)
    source.serve(PROMPT)
    context = running(it, 4)
    pending = brought(it, source, context, lent(source, 4))
    it.manager.contents.commit_pages(pending, proven(it.manager, pending))
    it.manager.release(context.request_id)
    for _ in range(2):
        it.fill(24)
    assert it.manager.contents.cached(0, it.manager.contents.digests(it.waiting(PROMPT), 4)) == 0
    context = running(it, 12)
    assert rest(it, context) == [32]
    assert it.manager.metrics.h2d_blocks_copied == 1 + 4


def test_a_tenant_s_quota_counts_imported_pages(served: Any) -> None:
    source, it = served(), served(params={"tenant_quota": 0.25})
    source.serve(PROMPT, "a")
    context = running(it, 4, salt="a")
    pending = brought(it, source, context, lent(source, 4, cache_salt="a"))
    it.manager.contents.commit_pages(pending, proven(it.manager, pending))
    quotas: Any = it.manager._replicas.each[0].hints._quotas
    assert not quotas.ownerless(pending.written).any()
    it.manager.check()
    it.manager.release(context.request_id)
