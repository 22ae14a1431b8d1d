from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcache import FUTURE_TOKEN, InvalidRequestError, Retention, SequenceTooLongError, TextContext
from kvcache.replica.context import ReadContext, hasher_of, read_context
from kvcache.replica.hashing import PrefixHasher


def indices(context: Any) -> tuple[int, int, int]:
    return context.start_idx, context.active_idx, context.end_idx


def test_a_prompt_of_a_thousand_and_ten_updates() -> None:
    context = TextContext(range(1000), 2000)
    assert indices(context) == (0, 1000, 1000)
    for token in range(10):
        context.update(token)
    assert indices(context) == (1009, 1010, 1010)
    assert (context.active_length, context.current_length) == (1, 1010)
    assert context.tokens.tolist() == [*range(1000), *range(10)]


def test_a_chunk_that_is_not_the_last_appends_nothing() -> None:
    context = TextContext(range(10), 20)
    context.set_token_indices(active_idx=4)
    context.update(99)
    assert indices(context) == (4, 10, 10)
    context.update(99)
    assert indices(context) == (10, 11, 11)
    assert context.tokens.tolist() == [*range(10), 99]


class Pair:
    """A context of at most 90 tokens, and what it must be: a list of tokens and two indices."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tokens, self.start, self.active = [*range(5)], 0, 5
        self.context = TextContext(self.tokens, 90)

    @property
    def is_last_chunk(self) -> bool:
        return self.active == len(self.tokens)

    def update(self) -> None:
        token: Any = self.rng.choice((7, np.int64(8), 1 << 31))
        if not self.is_last_chunk:
            self.context.update(token)
            self.start, self.active = self.active, len(self.tokens)
        elif token == 1 << 31:
            with pytest.raises(InvalidRequestError, match="token 2147483648 is not within"):
                self.context.update(token)
        else:
            self.context.update(token)
            self.appended(int(token))

    def chunk(self) -> None:
        self.start, self.active = 0, self.rng.randint(1, len(self.tokens))
        self.context.set_token_indices(start_idx=0, active_idx=self.active)

    def drop(self) -> None:
        if len(self.tokens) > 6:
            del self.tokens[-1]
            self.start, self.active = len(self.tokens) - 1, len(self.tokens)
            self.context.set_token_indices(start_idx=self.start, active_idx=self.active, end_idx=self.active)

    def reset(self) -> None:
        self.context.reset()
        self.start, self.active = 0, len(self.tokens)

    def future(self) -> None:
        if self.is_last_chunk:
            self.context.update_with_future_token()
            with pytest.raises(InvalidRequestError, match="while its last token is still a future token"):
                self.context.update(5)
            self.context.realize_future_token(3)
            self.appended(3)

    def copy(self) -> None:
        before, self.context = self.context, copy.copy(self.context)
        before.reset()
        before.update(99)

    def appended(self, token: int) -> None:
        self.tokens.append(token)
        self.start, self.active = self.active, self.active + 1


@pytest.mark.parametrize("seed", range(30))
def test_updates_between_other_changes_are_those_of_a_list(seed: int) -> None:
    """An update checks little while nothing but updates came before it. Every other change must end that."""
    pair = Pair(seed)
    changes = (pair.chunk, pair.drop, pair.reset, pair.future, pair.copy)
    while len(pair.tokens) < 90:
        (pair.update if pair.rng.random() < 0.8 else pair.rng.choice(changes))()
        wanted = (pair.start, pair.active, len(pair.tokens)), pair.tokens
        assert (indices(pair.context), pair.context.tokens.tolist()) == wanted
    pair.reset()
    with pytest.raises(SequenceTooLongError, match="token 91 is past its max_length 90"):
        pair.context.update(5)


def test_reset_runs_every_known_token_again() -> None:
    context = TextContext(range(5), 20)
    context.update(7)
    context.reset()
    assert indices(context) == (0, 6, 6)


@pytest.mark.parametrize(
    "tokens", [[], [[1, 2]], [1.5], ["a"], [-1], [1 << 31], None, [1, [2]], np.zeros(0, np.int64), [1 << 70]]
)
def test_values_that_are_no_tokens_are_refused(tokens: Any) -> None:
    with pytest.raises(InvalidRequestError, match="request 'bad'"):
        TextContext(tokens, 8, "bad")


def test_limits_are_named() -> None:
    assert TextContext([5], 1).max_length == 1
    with pytest.raises(InvalidRequestError, match="'a': max_length is 0"):
        TextContext([5], 0, "a")
    with pytest.raises(SequenceTooLongError, match="'a': has 9 tokens, but its max_length is 8"):
        TextContext(range(9), 8, "a")
    context = TextContext(range(7), 8, "a")
    context.update(1)
    with pytest.raises(SequenceTooLongError, match="'a': token 9 is past its max_length 8"):
        context.update(1)
    assert indices(context) == (7, 8, 8)
    with pytest.raises(InvalidRequestError, match=f"'a': token {FUTURE_TOKEN} is not within"):
        TextContext([1, FUTURE_TOKEN], 8, "a")
    for token, message in (
        (-1, "token -1"),
        (1 << 31, "token 2147483648"),
        ("x", "token is 'x': an integer is needed"),
    ):
        with pytest.raises(InvalidRequestError, match=f"'a': {message}"):
            TextContext([1], 8, "a").update(token)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad", [{"start_idx": -1}, {"start_idx": 5}, {"active_idx": 6}, {"active_idx": 0}, {"end_idx": 6}, {"end_idx": 4}]
)
def test_indices_out_of_order_are_refused_and_move_nothing(bad: dict[str, int]) -> None:
    context = TextContext(range(5), 8)
    with pytest.raises(InvalidRequestError, match="not ordered within its 5 tokens"):
        context.set_token_indices(**bad)
    assert indices(context) == (0, 5, 5)


def test_dropped_tokens_are_not_remembered_by_their_hashes() -> None:
    """The context keeps the digests of a page only if all tokens of the page stay."""
    context = TextContext(range(20), 64)
    context.prefix_hasher = hasher = PrefixHasher("sha256", 8, None)
    first = hasher.digests(context.tokens, 0, 2).copy()
    context.set_token_indices(active_idx=16, end_idx=16)
    assert context.prefix_hasher is hasher
    for token in range(8):
        context.update(token)
    other = PrefixHasher("sha256", 8, None).digests(context.tokens, 0, 3)
    assert np.array_equal(hasher.digests(context.tokens, 0, 3), other)
    assert np.array_equal(other[:2], first)
    context.set_token_indices(start_idx=0, active_idx=23, end_idx=23)
    assert context.prefix_hasher is None
    assert context.tokens.tolist() == [*range(16), *range(7)]
    context.set_token_indices(active_idx=1, end_idx=1)
    assert context.prefix_hasher is None


def test_the_prompt_is_copied_and_ids_are_made() -> None:
    prompt = np.arange(3)
    one, two = TextContext(prompt, 8), TextContext(prompt, 8, retention=Retention(session_continues=True))
    prompt[:] = 9
    assert one.tokens.tolist() == [0, 1, 2]
    assert one.request_id != two.request_id
    assert two.retention == Retention(session_continues=True)
    assert one.request_id in repr(one)


def test_a_context_carries_its_hasher_as_long_as_it_fits() -> None:
    context = TextContext(range(8), 16, cache_salt="a")
    kept = hasher_of(context, "sha256", 4)
    assert hasher_of(context, "sha256", 4) is kept
    assert hasher_of(context, "sha256", 8) is not kept
    assert hasher_of(context, "xxh3_128", 8).algorithm == "xxh3_128"
    context.cache_salt = "b"
    assert hasher_of(context, "xxh3_128", 8).salt == "b"


def test_a_hasher_kept_for_other_keys_is_not_used() -> None:
    context: Any = SimpleNamespace(
        request_id="one",
        tokens=np.arange(8),
        start_idx=0,
        active_idx=8,
        end_idx=8,
        prefix_hasher=None,
        cache_salt=None,
        extra_keys=((1, b"one"),),
    )
    kept = hasher_of(read_context(context), "sha256", 4)
    assert context.prefix_hasher is kept
    for keys in (((1, b"two"),), ((2, b"one"),), ((1, b"one"), (5, b"late")), (), None):
        context.extra_keys = keys
        other = hasher_of(read_context(context), "sha256", 4)
        assert other is not kept
        assert other.extra_keys == (keys or ())
        fresh = PrefixHasher("sha256", 4, None, keys).digests(np.arange(8), 0, 2)
        assert (other.digests(np.arange(8), 0, 2) == fresh).all()


class Own:
    """A caller's own context of ten tokens with the given attributes. The caller sets its indices."""

    def __init__(self, moves: Callable[[Own, int, int], None] | None = None, **others: Any) -> None:
        self.__dict__ |= {"request_id": "own", "tokens": np.arange(10), "start_idx": 2, "active_idx": 6, "end_idx": 10}
        self.__dict__ |= others
        self._moves = moves

    def set_token_indices(self, start_idx: int, active_idx: int) -> None:
        if self._moves is not None:
            self._moves(self, start_idx, active_idx)
        self.start_idx, self.active_idx = start_idx, active_idx


def read_of(own: Own) -> ReadContext:
    return ReadContext(own)  # type: ignore[arg-type]


@pytest.mark.parametrize("hint", [None, "soon", Retention(True)])
def test_a_snapshot_has_no_hint_if_the_context_s_hint_is_invalid(hint: object) -> None:
    assert read_of(Own(retention=hint)).hint == (hint if isinstance(hint, Retention) else None)
    assert read_of(Own()).hint is None


def test_a_snapshot_carries_a_hasher_as_its_context_does() -> None:
    kept, other = PrefixHasher("sha256", 4, None, ()), PrefixHasher("sha256", 4, "a", ())
    own = Own(prefix_hasher=kept)
    read = read_of(own)
    assert read.prefix_hasher is kept
    read.prefix_hasher = other
    assert read.prefix_hasher is own.prefix_hasher is other
    assert read_of(Own(prefix_hasher="none")).prefix_hasher is None
    without = read_of(Own())
    without.prefix_hasher = kept
    assert without.prefix_hasher is None
    assert not hasattr(without.own, "prefix_hasher")

    class Fixed(Own):
        @property
        def prefix_hasher(self) -> PrefixHasher:
            return kept

    fixed = read_of(Fixed())
    assert fixed.prefix_hasher is kept
    for _ in range(2):
        fixed.prefix_hasher = other
        assert fixed.prefix_hasher is None, "the manager has to keep it"


def test_a_snapshot_moves_its_context() -> None:
    own = Own()
    read = read_of(own)
    read.run_from(4, 8)
    assert indices(read) == indices(own) == read.indices == (4, 8, 10)
    assert not read.refused


def refuses_at_once(_own: Own, _start: int, _active: int) -> None:
    raise RuntimeError("not now")


def refuses_half_moved(own: Own, start: int, _active: int) -> None:
    if start != 2:
        own.start_idx, own.active_idx = start, 9
        raise RuntimeError("not now")


def refuses_for_good(own: Own, start: int, _active: int) -> None:
    if own.start_idx == 2:
        own.start_idx = start
        raise RuntimeError("not now")
    raise ValueError("nor back")


def test_a_context_that_refuses_to_move_is_set_back() -> None:
    for refuses in (refuses_at_once, refuses_half_moved):
        own = Own(refuses)
        read = read_of(own)
        with pytest.raises(RuntimeError, match="not now"):
            read.run_from(4, 8)
        assert indices(own) == (2, 6, 10)
        assert read.refused
    stuck = read_of(Own(refuses_for_good))
    with pytest.raises(ValueError, match="nor back"):
        stuck.run_from(4, 8)
    assert not stuck.refused


def test_a_context_that_moves_elsewhere_is_refused() -> None:
    class Elsewhere(Own):
        def set_token_indices(self, start_idx: int, active_idx: int) -> None:
            self.start_idx, self.active_idx = start_idx + 1, active_idx

    with pytest.raises(InvalidRequestError, match=r"'own': set_token_indices\(4\) left start_idx at 5"):
        read_of(Elsewhere()).run_from(4, 8)


def test_a_context_that_is_moved_leaves_its_batch() -> None:
    tokens = [1, 2, 3]
    leading, context = Leading({0: tokens}), TextContext(tokens, 64, "r")
    leading.contexts[0] = context
    context.follow(leading, 0)
    tokens.append(4)
    context.run_from(1, 3)
    assert leading.lost == [(0, 3)]
    tokens.append(5)
    assert indices(context) == (1, 3, 4)


def test_a_callers_tokens_beyond_its_last_known_one_are_not_looked_up(make: Any) -> None:
    manager = make(40, page_size=4)
    first = TextContext(range(20), 64, "first")
    manager.external_claim("first")
    assert manager.maybe_reserve(first)
    first.update(20)
    manager.step([first])

    class Buffered:
        """A context whose `tokens` is its whole buffer, including the unused end of the buffer."""

        request_id, start_idx, active_idx, end_idx, active_length, current_length = "own", 0, 10, 10, 10, 10
        tokens = np.arange(20)

        def update(self, token: int) -> None:
            raise NotImplementedError

        def set_token_indices(self, **indices: int) -> None:
            self.start_idx = indices["start_idx"]

    own = Buffered()
    manager.external_claim("own")
    assert manager.admission(own).cached_pages == 2
    assert manager.maybe_reserve(own)
    assert own.start_idx == 8


class Named(TextContext):
    """A subclass with an attribute of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.client = ["somebody"]


class Slotted(TextContext):
    __slots__ = ("client",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.client = ["somebody"]


COPIES: dict[str, Callable[[TextContext], TextContext]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda context: pickle.loads(pickle.dumps(context)),  # noqa: S301 - our own bytes
    "pickle 2": lambda context: pickle.loads(pickle.dumps(context, 2)),  # noqa: S301
    "deepcopy in a list": lambda context: copy.deepcopy([context])[0],
    "copy of a copy": lambda context: copy.copy(copy.deepcopy(context)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", [TextContext, Named, Slotted])
@pytest.mark.parametrize("together", [False, True])
def test_a_copy_shares_nothing_that_moves(make: Any, how: str, kind: type[TextContext], together: bool) -> None:
    """A copy of a context shares neither the token buffer, nor the page hashes, nor the batch that updates the original
    context.
    """
    manager, hint = make(40, page_size=4), Retention(True)
    extra = {"cache_salt": "salt", "retention": hint, "extra_keys": [(3, b"image")]}
    context = kind(range(10), 100, "r", **extra)  # type: ignore[arg-type]
    manager.external_claim("r")
    assert manager.maybe_reserve(context)
    context.update(50)
    manager.step([context])
    batch = manager.batch([context])
    if together:
        batch.update([51])
    twin = COPIES[how](context)
    known = context.tokens.tolist()
    assert type(twin) is kind
    assert (twin.request_id, twin.max_length) == ("r", 100)
    assert twin.tokens.tolist() == known
    assert (twin.start_idx, twin.active_idx, twin.end_idx) == (context.start_idx, context.active_idx, context.end_idx)
    assert (twin.cache_salt, twin.extra_keys, twin.retention) == ("salt", ((3, b"image"),), hint)
    assert getattr(twin, "client", ["somebody"]) == ["somebody"]
    for token in range(60, 70):  # Both contexts advance in turns.
        twin.update(token)
        batch.update([token + 10])
    assert twin.tokens.tolist() == [*known, *range(60, 70)]
    assert context.tokens.tolist() == [*known, *range(70, 80)]
    alone = TextContext(twin.tokens, 100, "alone", cache_salt="salt", extra_keys=[(3, b"image")])
    replica = manager._replicas.each[0]
    hashed = [replica.hasher(None, one).digests(one.tokens, 0, 5).tolist() for one in (twin, alone)]
    assert hashed[0] == hashed[1] != replica.hasher(None, context).digests(context.tokens, 0, 5).tolist()


def test_a_copy_is_another_object_of_its_request(make: Any) -> None:
    manager = make(40, page_size=4)
    context = TextContext(range(10), 100, "r")
    manager.external_claim("r")
    assert manager.maybe_reserve(context)
    twin = copy.copy(context)
    with pytest.raises(InvalidRequestError, match="'r': maybe_reserve got another context object"):
        manager.maybe_reserve(twin)
    manager.release("r")
    manager.external_claim("r")
    # The process that receives a context may reserve pages for it, as this test does.
    assert manager.maybe_reserve(twin)


def test_dataclasses_have_no_way_to_replace_a_part() -> None:
    with pytest.raises(TypeError, match="should be called on dataclass instances"):
        dataclasses.replace(TextContext(range(3), 9), max_length=4)  # type: ignore[type-var]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_batch_is_not_copied(make: Any, how: Callable[[object], object]) -> None:
    manager = make(40, page_size=4)
    context = TextContext(range(10), 100, "r")
    manager.external_claim("r")
    with pytest.raises(InvalidRequestError, match="a Batch cannot be copied, pickled or sent"):
        how(manager.batch([context]))


class Leading:
    """Updates contexts as a batch does. A context asks this object for its missing tokens when it is read."""

    def __init__(self, tokens: dict[int, list[int]]) -> None:
        self.tokens, self.lost = tokens, list[tuple[int, int]]()
        self.contexts: dict[int, TextContext] = {}

    def catch_up(self, place: int, end: int) -> None:
        context, come = self.contexts[place], self.tokens[place][end:]
        if len(come) == 1:
            context.append_one(come[0], end, end + 1)
        elif come:
            context.append(np.array(come, np.int32), end + len(come) - 1, end + len(come))

    def lose(self, place: int, end: int) -> None:
        self.catch_up(place, end)
        self.lost.append((place, end))


@pytest.mark.parametrize("come", [0, 1, 2, 40])
def test_a_context_catches_up_with_its_leader_and_leaves_with_these_updates(come: int) -> None:
    tokens = [*range(10, 12 + come)]
    leading, other = Leading({3: tokens}), Leading({0: tokens})
    context = TextContext(tokens[:2], 64, "r")
    context.follow(leading, 3)
    leading.contexts[3] = context
    context.catch_up(other, 0)  # the context does not belong to that batch
    assert context._end == 2
    context.catch_up(leading, 3)
    assert context._end == 2 + come
    assert context.tokens.tolist() == tokens
    assert (context.start_idx, context.active_idx) == ((1 + come, 2 + come) if come else (0, 2))
    tokens.append(99)
    context.leave()
    assert leading.lost == [(3, 2 + come)]
    assert context.tokens.tolist() == tokens
    tokens.append(100)
    context.leave()
    context.catch_up(leading, 3)
    assert leading.lost == [(3, 2 + come)], "the context has left the batch once"
    assert context.tokens.tolist() == tokens[:-1]


READS: dict[str, tuple[Callable[[TextContext], object], object]] = {
    "tokens": (lambda context: context.tokens.tolist(), [1, 2, FUTURE_TOKEN]),
    "start_idx": (lambda context: context.start_idx, 2),
    "computed_idx": (lambda context: context.computed_idx, 1),
    "has_future_token": (lambda context: context.has_future_token, True),
    "active_idx": (lambda context: context.active_idx, 3),
    "end_idx": (lambda context: context.end_idx, 3),
    "active_length": (lambda context: context.active_length, 1),
    "indices": (lambda context: context.indices, (2, 3, 3)),
}


@pytest.mark.parametrize("first", READS)
def test_whatever_is_read_first_is_as_new_as_the_leader(first: str) -> None:
    class Ahead(Leading):
        def catch_up(self, place: int, end: int) -> None:
            if end == 2:
                self.contexts[place].append_future(1, 3)

    leading, context = Ahead({}), TextContext([1, 2], 64, "r")
    leading.contexts[5] = context
    context.follow(leading, 5)
    read, wanted = READS[first]
    assert read(context) == wanted


CHANGES: dict[str, Callable[[TextContext], None]] = {
    "update": lambda context: context.update(9),
    "update_with_future_token": lambda context: context.update_with_future_token(),
    "set_token_indices": lambda context: context.set_token_indices(start_idx=1),
    "reset": lambda context: context.reset(),
    "run_from": lambda context: context.run_from(1, 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_context_that_is_changed_has_caught_up_and_left_its_leader(change: str) -> None:
    leading, context = Leading({5: [1, 2, 3]}), TextContext([1, 2], 64, "r")
    leading.contexts[5] = context
    context.follow(leading, 5)
    CHANGES[change](context)
    assert leading.lost == [(5, 2)]
    assert context.tokens.tolist()[:3] == [1, 2, 3]


def test_a_batch_reads_the_salt_and_the_keys_of_a_request_again_after_a_change(make: Any) -> None:
    manager = make(40, page_size=4)
    context = TextContext(range(10), 100, "r")
    manager.external_claim("r")
    assert manager.maybe_reserve(context)
    batch = manager.batch([context])

    def fill_a_page() -> None:
        for token in range(4):
            batch.update([token])
            assert manager.reserve_batch(batch).all()
            manager.step(batch)

    fill_a_page()  # The batch knows the hasher after its first full page.
    for name, other in (("cache_salt", "other"), ("extra_keys", [(0, b"other")])):
        before = getattr(context, name)
        setattr(context, name, other)
        with pytest.raises(InvalidRequestError, match="'r'"):
            fill_a_page()
        setattr(context, name, before)
        manager.step(batch)


def test_a_context_has_one_leader_at_a_time() -> None:
    tokens = [1, 2, 3]
    first, second = Leading({0: tokens}), Leading({5: [1, 2, 3, 4]})
    context = TextContext(tokens[:2], 64, "r")
    context.follow(first, 0)
    first.contexts[0] = second.contexts[5] = context
    context.follow(second, 5)
    assert first.lost == [(0, 2)]
    assert context.tokens.tolist() == [1, 2, 3, 4]
    assert second.lost == []
    context.reset()
    assert second.lost == [(5, 4)]
    assert (context.start_idx, context.active_idx) == (0, 4)


def test_a_future_token_stands_for_one_until_it_is_realized() -> None:
    context = TextContext(range(5), 8)
    context.update_with_future_token()
    assert indices(context) == (5, 6, 6)
    assert context.tokens.tolist() == [*range(5), FUTURE_TOKEN]
    assert (context.computed_idx, context.has_future_token) == (0, True)
    context.realize_future_token(7)
    assert context.tokens.tolist() == [*range(5), 7]
    assert (context.computed_idx, context.has_future_token) == (5, False)
    context.update(8)
    assert indices(context) == (6, 7, 7)


def test_an_earlier_chunk_has_no_token_to_come_and_is_computed_once_its_step_has_ended() -> None:
    context = TextContext(range(9), 20)
    context.set_token_indices(active_idx=4)
    context.update_with_future_token()
    assert indices(context) == (4, 9, 9)
    assert (context.computed_idx, context.has_future_token) == (0, True)
    context.realize_future_token(99)
    assert context.tokens.tolist() == [*range(9)]
    assert context.computed_idx == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda it: it.update(1),
        lambda it: it.update_with_future_token(),
        lambda it: it.set_token_indices(4, 5, 5),
        copy.copy,
        pickle.dumps,
    ],
)
def test_no_other_update_is_accepted_before_a_future_token_is_realized(call: Callable[[TextContext], object]) -> None:
    context = TextContext(range(5), 20, "r")
    context.update_with_future_token()
    with pytest.raises(InvalidRequestError, match="request 'r': .*realize_future_token first"):
        call(context)
    assert indices(context) == (5, 6, 6)
    context.realize_future_token(3)
    assert context.tokens.tolist() == [*range(5), 3]


def test_realizing_an_invalid_or_unexpected_token_is_refused() -> None:
    context = TextContext(range(5), 6, "r")
    with pytest.raises(
        InvalidRequestError, match="'r': realize_future_token was called, but the request has no future token"
    ):
        context.realize_future_token(3)
    context.update_with_future_token()
    with pytest.raises(InvalidRequestError, match="token -1 is not within"):
        context.realize_future_token(-1)
    context.realize_future_token(4)
    with pytest.raises(SequenceTooLongError, match="token 7 is past its max_length 6"):
        context.update_with_future_token()
    assert not context.has_future_token


def test_a_fork_has_the_known_tokens_and_runs_from_the_computed_ones() -> None:
    context = TextContext(range(5), 20)
    context.update(5)
    context.update_with_future_token()
    twin = context.fork()
    assert indices(twin) == (5, 6, 6)
    assert not twin.has_future_token
    context.realize_future_token(1)
    assert indices(context.fork()) == (6, 7, 7)


def test_moving_the_start_back_reduces_the_computed_tokens() -> None:
    context = TextContext(range(8), 20)
    context.update(5)
    context.update_with_future_token()
    context.set_token_indices(start_idx=4)
    assert context.computed_idx == 4
    context.reset()
    assert context.computed_idx == 0
