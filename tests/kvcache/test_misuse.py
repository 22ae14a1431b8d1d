"""Mistakes of callers, one case at a time. The random model makes the same wrong calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from kvcache import (
    BlockTableMismatchError,
    InvalidParamsError,
    InvalidRequestError,
    KVCacheParams,
    PageDigests,
    PagedKVCacheManager,
    PageLease,
    PoolTooSmallError,
    StepInFlight,
    TextContext,
    UnknownArgumentError,
)
from kvcache.params import StateShape
from tests.forged import forged
from tests.kvcache.random_model.moves import OwnContext


def running(manager: PagedKVCacheManager, tokens: Any, name: str = "r", **options: Any) -> TextContext:
    """A claimed and reserved request."""
    context = TextContext(tokens, 64, name, **options)
    manager.external_claim(name)
    assert manager.maybe_reserve(context)
    return context


@pytest.mark.parametrize(
    "wrong", [1.5, float("nan"), True, np.float64(1), "1", None, 0, pytest.param(10**5000, id="long")]
)
@pytest.mark.parametrize("computed", [False, True])
def test_a_wrong_number_of_steps_changes_nothing(make: Any, wrong: Any, computed: bool) -> None:
    manager = make(16)
    context = TextContext(range(9), 64, "r")
    manager.external_claim("r")
    if computed:  # Without computed tokens, the next call would take the fast path.
        assert manager.maybe_reserve(context)
        context.update(1)
    before = manager.num_free_blocks
    with pytest.raises(InvalidRequestError, match="num_steps is"):
        manager.maybe_reserve(context, wrong)
    assert manager.num_free_blocks == before
    assert manager.maybe_reserve(context, np.int64(3))


@pytest.mark.parametrize("call", ["maybe_reserve", "fetch", "step", "reserve_batch", "batch", "import_block_table"])
def test_another_context_object_of_a_request_is_refused(make: Any, call: str) -> None:
    manager = make(16)
    context = running(manager, range(9))
    stranger = TextContext(range(100, 112), 64, "r")
    stranger.set_token_indices(start_idx=8)
    calls: dict[str, Callable[[], object]] = {
        "maybe_reserve": lambda: manager.maybe_reserve(stranger),
        "import_block_table": lambda: manager.import_block_table(stranger, None),
    }
    with pytest.raises(InvalidRequestError, match="'r': .* got another context object"):
        calls.get(call, lambda: getattr(manager, call)([stranger]))()
    context.update(1)
    manager.step([context])
    assert manager._replicas.each[0].find(TextContext(range(9), 64)).end == 2
    assert not manager._replicas.each[0].find(TextContext(range(100, 112), 64)).end


def test_a_request_that_waits_may_be_rebuilt_and_a_released_one_is_bound_anew(make: Any) -> None:
    manager = make(16)
    manager.external_claim("r")
    batch = manager.batch([TextContext(range(9), 64, "r")])
    rebuilt = TextContext(range(9), 64, "r")
    assert manager.maybe_reserve(rebuilt)
    with pytest.raises(InvalidRequestError, match="another context object"):
        manager.reserve_batch(batch)  # The batch was made before its requests had pages.
    manager.release("r")
    assert running(manager, range(9)).start_idx == 0
    manager.release("r")


@dataclass
class Equal:
    """A caller's own context class that compares by value. Its objects are therefore unhashable."""

    request_id: str
    own: TextContext

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


class Rehashed(Equal):
    """A caller's own context class whose hash changes with its tokens."""

    __eq__ = object.__eq__

    def __hash__(self) -> int:
        return self.own.end_idx


def test_a_context_whose_hash_changes_stays_the_context_of_its_request(make: Any) -> None:
    manager = make(16)
    context: Any = Rehashed("r", TextContext(range(9), 64, "r"))
    manager.external_claim("r")
    for _ in range(3):
        assert manager.maybe_reserve(context)
        assert len(manager.fetch([context])) == 1
        context.update(1)
        manager.step([context])
    manager.release("r")


def test_contexts_that_compare_equal_are_told_apart(make: Any) -> None:
    manager = make(16)
    own = TextContext(range(9), 64, "r")
    one, twin = Equal("r", own), Equal("r", own)
    assert one == twin
    manager.external_claim("r")
    assert manager.maybe_reserve(one)  # type: ignore[arg-type]
    assert len(manager.fetch([one])) == 1
    with pytest.raises(InvalidRequestError, match="another context object"):
        manager.fetch([twin])
    own.update(1)
    assert manager.maybe_reserve(one)  # type: ignore[arg-type]
    manager.step([one])


def test_the_batch_of_another_manager_is_refused(make: Any) -> None:
    mine, other = make(16), make(16)
    context = TextContext(range(9), 64, "r")
    for manager in (mine, other):
        manager.external_claim("r")
    assert mine.maybe_reserve(context)
    batch = mine.batch([context])
    for call in ("reserve_batch", "fetch", "step", "get_data_parallel_splits"):
        with pytest.raises(InvalidRequestError, match="another manager made"):
            getattr(other, call)(batch)


@pytest.mark.parametrize("change", [{"extra_keys": [(1, b"new")]}, {"cache_salt": "new"}])
@pytest.mark.parametrize("batched", [False, True])
def test_keys_that_change_under_pages_are_refused_until_they_are_changed_back(
    make: Any, change: dict[str, Any], batched: bool
) -> None:
    manager = make(16)
    context = running(manager, range(7), extra_keys=[(2, b"image")], cache_salt="a")
    requests = manager.batch([context]) if batched else [context]
    manager.fetch(requests)
    context.update(1)
    before = context.cache_salt, context.extra_keys
    manager.step([context])
    assert manager.maybe_reserve(context)
    context.update(2)  # Eight tokens are computed, so the second page is full.
    for name, value in change.items():
        setattr(context, name, value)
    books = manager._replicas.each[0].rows.cached.copy()
    with pytest.raises(InvalidRequestError, match=f"its {min(change)} changed while it holds pages"):
        manager.step(requests)
    assert (manager._replicas.each[0].rows.cached == books).all()
    context.cache_salt, context.extra_keys = before
    manager.step(requests)
    probe = TextContext([*range(7), 1, 2, 3], 64, extra_keys=[(2, b"image")], cache_salt="a")
    assert manager._replicas.each[0].find(probe).end == 2


def test_a_plain_prompt_does_not_find_the_last_page_of_a_chunked_prompt_with_a_key_on_it(make: Any) -> None:
    manager = make(16)
    context = TextContext(range(9), 64, "image", extra_keys=[(6, b"image")])
    manager.external_claim("image")
    assert manager.maybe_reserve(context)
    for end in (4, 9):
        context.set_token_indices(active_idx=end)
        manager.fetch([context])
        context.update(1)
        manager.step([context])
    assert running(manager, range(9), "plain").start_idx == 4
    assert running(manager, range(9), "same", extra_keys=[(6, b"image")]).start_idx == 8


def params(**changes: Any) -> KVCacheParams:
    return KVCacheParams(**{"dtype": torch.float32, "n_kv_heads": 1, "head_dim": 1, **changes})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"available_cache_memory": 1 << 40}, PoolTooSmallError),
        ({"available_cache_memory": 10**18}, (PoolTooSmallError, InvalidParamsError)),
        ({"available_cache_memory": float("nan")}, InvalidParamsError),
        ({"max_batch_size": 1 << 40}, InvalidParamsError),
        ({"max_seq_len": 1 << 40}, InvalidParamsError),
        ({"max_batch_size": 1 << 20, "max_seq_len": (1 << 31) - 1}, PoolTooSmallError),
        ({"num_layers": 10**18}, InvalidParamsError),
        ({"devices": ["meta"]}, InvalidParamsError),
        ({"devices": ["nowhere"]}, InvalidParamsError),
        ({"devices": ["cuda:63"]}, InvalidParamsError),
        ({"session": object()}, InvalidParamsError),
    ],
)
def test_impossible_managers_are_refused_before_memory_is_allocated(
    changes: dict[str, Any], error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*_args: Any) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr("kvcache.replica.devices.allocate_blocks", taken)
    monkeypatch.setattr("kvcache.replicas.Replica", taken)
    fine: dict[str, Any] = {
        "max_batch_size": 2,
        "max_seq_len": 8,
        "num_layers": 1,
        "devices": ["cpu"],
        "available_cache_memory": 1 << 16,
    }
    with pytest.raises(error) as caught:
        PagedKVCacheManager(params(), **{**fine, **changes})
    said = str(caught.value)
    assert "\n" not in said
    assert "the host cannot hold" in said or any(name.removesuffix("s") in said for name in changes)


def test_the_page_size_of_a_sizing_call_counts_and_unknown_keywords_do_not() -> None:
    asked = (params(), 4, 33, 1, 1 << 40, ["cpu"])
    estimate = PagedKVCacheManager.estimated_memory_size
    assert estimate(*asked, page_size=16) == 4 * 48 * 8
    assert estimate(*asked) == 4 * 128 * 8
    for call, args in ((estimate, asked), (PagedKVCacheManager.infer_optimal_batch_size, asked[:1] + asked[2:])):
        with pytest.raises(UnknownArgumentError, match="pages=16 is not a keyword of this call"):
            call(*args, pages=16)
    assert issubclass(UnknownArgumentError, TypeError)
    with pytest.raises(InvalidParamsError, match="page_size is 32 in the call and 16 in the params"):
        PagedKVCacheManager.max_supported_sequence_length(params(page_size=16), 1, 1 << 20, page_size=32)


def test_options_without_effect_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "host_kvcache_swap_space_gb": 1.0,
        "tenant_quota": 0.5,
        "file_tier_key": "m",
        "object_tier_tokens_per_s": 1e4,
    }
    with caplog.at_level(logging.WARNING, "pagewire"):
        PagedKVCacheManager(
            params(**given), 2, 8, 1, ["cpu"], available_cache_memory=1 << 20, zmq_endpoint_base="ipc:///no/such"
        )
    for name in (*given, "zmq_endpoint_base"):
        assert name in caplog.text


_LOOKUPS = ["maybe_reserve", "reserve_batch", "recommend", "prefetch", "import_block_table"]


@pytest.mark.parametrize(
    "call", [*_LOOKUPS, "contents.cached", "contents.lease", "contents.bring", "contents.import_pages"]
)
def test_a_reset_comes_before_the_next_lookup(make: Any, tmp_path: Path, call: str) -> None:
    manager, source = make(16, zmq_endpoint_base=f"ipc://{tmp_path}/pw"), make(16)
    tables = []
    for one in (manager, source):
        owner = running(one, range(9), "owner")
        owner.update(1)
        one.step([owner])
        tables.append(one.block_table("owner"))
    tables.append(source.block_table("owner", full_pages=True))
    manager.release("owner")
    probe = TextContext(range(10), 64, "probe")
    manager.external_claim("probe")
    resets: list[int] = []
    reset = manager._replicas.forget
    manager._replicas.forget = lambda: (resets.append(1), reset())[1]
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(f"ipc://{tmp_path}/pw-reset_prefix_cache")
        push.send(b"new weights")
        deadline = time.monotonic() + 20
        while not manager._reset_endpoint.is_asked and time.monotonic() < deadline:
            time.sleep(0.001)
        calls: dict[str, Callable[[], object]] = {
            "maybe_reserve": lambda: manager.maybe_reserve(probe),
            "reserve_batch": lambda: manager.reserve_batch([probe]),
            "recommend": lambda: manager.get_or_recommend_replica(TextContext(range(9), 64)),
            "prefetch": lambda: manager.prefetch(TextContext(range(9), 64)),
            "import_block_table": lambda: manager.import_block_table(probe, tables[1]),
            "contents.cached": lambda: manager.contents.cached(0, wanted),
            "contents.lease": lambda: manager.contents.lease("reader", 0, wanted, 9),
            "contents.bring": lambda: manager.contents.bring("reader", 0, wanted, 9),
            "contents.import_pages": lambda: manager.contents.import_pages(probe, 0, full),
        }
        wanted, full = source.contents.digests(probe), tables[2]
        pending = calls[call]()
    assert resets
    assert probe.start_idx == 0
    if call in ("contents.cached", "contents.lease"):
        assert not pending, "pages of before the reset were found"
    if call == "contents.import_pages":
        manager.cancel_import(pending)  # type: ignore[arg-type]
    if call == "import_block_table":
        assert pending.tokens == (0, 9)  # type: ignore[attr-defined]
        manager.cancel_import(pending)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [b"x", None, 1.5, object()])
def test_objects_that_are_no_block_tables_are_refused_also_with_states(wrong: Any) -> None:
    shape = StateShape(2, 2, 1, 1, 1, 2, torch.int64, torch.int64)
    params = KVCacheParams(torch.int64, 1, 2, page_size=4, enable_prefix_caching=True, states=shape)
    manager = PagedKVCacheManager(params, 4, 60, 1, ["cpu"], available_cache_memory=1 << 16)
    context = TextContext([1] * 9, 60, "r")
    manager.external_claim("r")
    with pytest.raises(BlockTableMismatchError, match=r"request 'r': .* a BlockTable is needed"):
        manager.import_block_table(context, wrong)
    manager.check()


def test_a_waiting_request_of_a_callers_own_context_may_have_another_salt(make: Any) -> None:
    """The request has not been reserved, so its salt may still change. Its pages must be published under the later
    salt. Requests with the earlier salt must not find them.
    """
    manager = make(8, rows=4)
    running(manager, range(20), "before")
    own = OwnContext(TextContext(range(100, 117), 64, "own", cache_salt="one"))
    manager.external_claim("own")
    assert not manager.maybe_reserve(own)
    own.cache_salt = "two"
    manager.release("before")
    assert manager.maybe_reserve(own)
    manager.fetch([own])
    own.update(1)
    manager.step([own])
    manager.release("own")
    assert running(manager, range(100, 117), "one", cache_salt="one").start_idx == 0


class Wide(OwnContext):
    """A caller's own context with tokens of another type."""

    def __init__(self, tokens: list[int], name: str, dtype: type[np.integer[Any]]) -> None:
        super().__init__(TextContext([1] * len(tokens), 64, name))
        self.__dict__["given"], self.__dict__["dtype"] = tokens, dtype

    @property
    def tokens(self) -> np.ndarray:
        return np.array(self.given[: self.inner.end_idx], self.dtype)

    def update(self, token: int) -> None:
        self.given.append(token)
        self.inner.update(1)


@pytest.mark.parametrize(
    ("dtype", "wide", "alike"),
    [(np.int64, (1 << 32) + 5, 5), (np.uint64, (1 << 32) + 5, 5), (np.int64, -(1 << 32), 0), (np.uint32, 1 << 31, -1)],
)
@pytest.mark.parametrize("params", [{}, {"hash_algorithm": "xxh3_128"}])
def test_tokens_that_differ_only_in_bits_above_the_lowest_32_never_share_a_page(
    make: Any, dtype: Any, wide: int, alike: int, params: dict[str, Any]
) -> None:
    """Pages are named by 32-bit tokens, so a caller's own context with other tokens is refused by each call."""
    manager: PagedKVCacheManager = make(16, params=params)
    own = Wide([*range(6), wide, *range(9)], "own", dtype)
    manager.external_claim("own")
    calls: list[Callable[[], object]] = [
        lambda: manager.maybe_reserve(own),  # type: ignore[arg-type]
        lambda: manager.reserve_batch([own]),  # type: ignore[list-item]
        lambda: manager.admission(own),  # type: ignore[arg-type]
        lambda: manager.prefetch(own),  # type: ignore[arg-type]
        lambda: manager.contents.digests(own),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError, match=f"'own': token {wide} is not within -2"):
            call()
    manager.release("own")
    later = Wide([*range(6), 7], "later", dtype)
    manager.external_claim("later")
    assert manager.maybe_reserve(later, 6)  # type: ignore[arg-type]
    manager.fetch([later])  # type: ignore[list-item]
    later.update(wide)
    later.update(3)
    with pytest.raises(InvalidRequestError, match=f"'later': token {wide} is not within -2"):
        manager.step([later])  # type: ignore[list-item]
    manager.release("later")
    manager.check()
    found = TextContext([*range(6), 7, max(alike, 0), 3, 3], 64)
    assert manager._replicas.each[0].find(found).end <= 1


class Fickle(OwnContext):
    """A caller's own context, one of whose attributes has another value the `at`-th time that it is read."""

    def __init__(self, name: str, value: Any, at: int) -> None:
        super().__init__(TextContext(range(11), 60, "r"))
        self.__dict__["fickle"] = (name, value, at)
        self.__dict__["reads"] = 0

    def __getattr__(self, name: str) -> Any:
        fickle, value, at = self.__dict__["fickle"]
        if name == fickle:
            self.__dict__["reads"] += 1
            if self.__dict__["reads"] == at:
                return value
        return super().__getattr__(name)


@pytest.mark.parametrize("call", ["maybe_reserve", "reserve_batch", "admission", "prefetch", "import_block_table"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("end_idx", -5), ("end_idx", 12), ("start_idx", -1), ("active_idx", 12), ("tokens", np.arange(3))],
)
@pytest.mark.parametrize("at", [1, 2])
def test_a_context_that_changes_its_mind_within_a_call_is_refused(
    make: Any, call: str, name: str, value: Any, at: int
) -> None:
    """The values that a call works with are checked, and not only the values of an earlier read."""
    manager: PagedKVCacheManager = make(16, checks=False)
    source: PagedKVCacheManager = make(16, checks=False)
    told = running(source, range(11))
    source.fetch([told])
    told.update(1)
    source.step([told])
    table = source.block_table("r", full_pages=True)
    manager.external_claim("r")
    # `reserve_batch` also reads the start and the end of the chunk to see whether all requests decode.
    reads_more = call == "reserve_batch" and at == 2 and name in {"start_idx", "active_idx"}
    context: Any = Fickle(name, value, at + reads_more)
    calls: dict[str, Callable[[], object]] = {
        "reserve_batch": lambda: manager.reserve_batch([context]),
        "import_block_table": lambda: manager.import_block_table(context, table),
    }
    with pytest.raises(InvalidRequestError):
        calls.get(call, lambda: getattr(manager, call)(context))()
    manager.check()
    assert manager.num_held_blocks == 0
    assert manager.maybe_reserve(context)
    manager.check()


@pytest.mark.parametrize("call", ["fetch", "fetch_ahead", "step"])
def test_a_context_that_would_run_before_its_first_token_is_refused(make: Any, call: str) -> None:
    manager: PagedKVCacheManager = make(16, checks=False)
    others = [running(manager, range(9), name) for name in ("a", "b")]
    manager.external_claim("r")
    context: Any = Fickle("start_idx", -1, 0)
    assert manager.maybe_reserve(context)
    context.__dict__["reads"], context.__dict__["fickle"] = 0, ("start_idx", -1, 1)
    with pytest.raises(InvalidRequestError, match="request 'r': its start_idx is -1"):
        getattr(manager, call)([others[0], context, others[1]])
    manager.check()
    manager.fetch([*others, context])


def test_a_seal_that_is_no_function_is_refused(make: Any) -> None:
    manager: PagedKVCacheManager = make(16, checks=False)
    running(manager, range(9))
    with pytest.raises(InvalidRequestError, match="request 'r': seal is 5: a function is needed"):
        manager.lease("r", seal=5)  # type: ignore[arg-type]
    manager.end_lease(manager.lease("r"))
    manager.release("r")
    manager.check()


WANTED = PageDigests(4, "sha256", bytes(64))


@pytest.mark.parametrize(
    "wanted",
    [
        *(None, 5, tuple(WANTED), WANTED._replace(digests=5), WANTED._replace(digests="a" * 64)),
        *(WANTED._replace(first_page=one) for one in (-1, 1.5, None, True)),
    ],
)
def test_objects_that_are_no_digests_of_pages_are_refused(make: Any, wanted: Any) -> None:
    manager: PagedKVCacheManager = make(16, checks=False)
    calls: list[Callable[[], object]] = [
        lambda: manager.contents.cached(0, wanted),
        lambda: manager.contents.lease("asker", 0, wanted, 9),
        lambda: manager.contents.bring("asker", 0, wanted, 9),
    ]
    for call in calls:
        with pytest.raises(BlockTableMismatchError, match=r"wanted is|digests is|first_page is"):
            call()
        manager.check()


@pytest.mark.parametrize("wrong", [1.5, None, "9", True, np.float64(9)])
@pytest.mark.parametrize("host_slots", [0, 8])
def test_a_wrong_number_of_pages_to_lend_changes_nothing(make: Any, wrong: Any, host_slots: int) -> None:
    manager: PagedKVCacheManager = make(16, checks=False, host_slots=host_slots)
    context = running(manager, range(9))
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    wanted = manager.contents.digests(context)
    for call in (manager.contents.lease, manager.contents.bring):
        with pytest.raises(InvalidRequestError, match="'asker': most is"):
            call("asker", 0, wanted, wrong)
        with pytest.raises(InvalidRequestError, match="request_id is 5"):
            call(5, 0, wanted, 9)  # type: ignore[arg-type]
        manager.check()
        assert not call("asker", 0, wanted, -1)
    for first in (-1, 1.5, None, "x"):
        with pytest.raises(InvalidRequestError, match="first_page is"):
            manager.contents.digests(context, first)  # type: ignore[arg-type]
    assert manager.contents.lease("asker", 0, wanted, np.int64(9)) is not None  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [{"page_size": 8}, {"hash_algorithm": "xxh3_128"}, {"digests": b"x"}])
def test_pages_of_another_size_or_hash_are_never_cached(make: Any, other: dict[str, Any]) -> None:
    manager: PagedKVCacheManager = make(16)
    context = running(manager, range(9))
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    wanted = manager.contents.digests(context)
    assert manager.contents.cached(0, wanted) == 8
    assert manager.contents.cached(0, wanted._replace(**other)) == 0


def test_only_a_manager_makes_a_lease() -> None:
    assert list(forged(PageLease)) == []
    with pytest.raises(InvalidRequestError, match="owner is None: a manager, whose lease makes one, is needed"):
        PageLease(None, "r", 0)  # type: ignore[arg-type]


def test_only_a_manager_makes_a_step() -> None:
    assert list(forged(StepInFlight)) == []
    with pytest.raises(
        InvalidRequestError, match="owner is None: a manager, whose fetch_ahead makes the step, is needed"
    ):
        StepInFlight(None, 0, 1, [])  # type: ignore[arg-type]
