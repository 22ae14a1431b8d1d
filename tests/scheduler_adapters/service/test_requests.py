import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from kvcache.replica.context import hasher_of
from kvcache.replica.hashing import PrefixHasher
from scheduler_adapters.errors import IllegalMoveError
from scheduler_adapters.loop import Request
from scheduler_adapters.service.requests import (
    DECODE_MOVES,
    PREFILL_MOVES,
    DecodeRequest,
    PrefillRequest,
    Recent,
    TrackedRequest,
    prompt_of,
)

TABLES = {"prefill": PREFILL_MOVES, "decode": DECODE_MOVES}


def request_in(side: str, phase: str) -> TrackedRequest:
    if side == "prefill":
        return PrefillRequest("r", 1, phase, 5.0, prompt=prompt_of([1], None))
    return DecodeRequest("r", 1, phase, 5.0, spec=Request("r", [1], 1))


@pytest.mark.parametrize("side", TABLES)
def test_a_request_makes_the_moves_of_its_table_and_no_other(side: str) -> None:
    table = TABLES[side]
    for before, after in itertools.product(table, table):
        request = request_in(side, before)
        if after in table[before]:
            request.move(after, 7.0)
            assert (request.phase, request.deadline) == (after, 7.0)
        else:
            with pytest.raises(IllegalMoveError, match=f"'r', attempt 1: the phase {after} cannot follow {before}"):
                request.move(after)
            assert (request.phase, request.deadline) == (before, 5.0)


@pytest.mark.parametrize("side", TABLES)
def test_every_phase_leads_to_the_end_and_nothing_leads_from_it(side: str) -> None:
    table = TABLES[side]
    assert set().union(*table.values()) <= set(table)
    for phase in set(table) - {"over"}:
        assert table[phase]
        assert "over" in table[phase] or "ending" in table[phase]
    assert not table["over"]


def test_only_a_request_that_is_over_or_held_has_no_deadline() -> None:
    request = request_in("prefill", "computing")
    request.move("held")
    assert request.deadline == math.inf  # The lease has a deadline of its own, so the request has none.


def test_the_first_reason_is_kept() -> None:
    request = request_in("decode", "asked")
    assert request.blame("first") == "first"
    assert request.blame("second") == "first"


def test_a_decode_request_knows_all_that_the_client_has_had() -> None:
    request = DecodeRequest("r", 3, "waiting", 1.0, spec=Request("r", [1, 2], 9))
    request.emitted += [7, 8]
    assert request.tokens == [1, 2, 7, 8]
    assert request.key == "r#3"


def test_prefill_never_moves_back_and_decode_only_to_wait_before_its_first_token() -> None:
    for phase, moves in PREFILL_MOVES.items():
        later = list(PREFILL_MOVES)[list(PREFILL_MOVES).index(phase) + 1 :]
        assert moves <= set(later), phase
    order = list(DECODE_MOVES)
    for phase, moves in DECODE_MOVES.items():
        assert moves - {"waiting", "over"} <= {order[min(order.index(phase) + 1, len(order) - 1)]}, phase
    assert {phase for phase, moves in DECODE_MOVES.items() if "waiting" in moves} == {"asked", "offered", "pulling"}


def test_a_request_that_asks_again_hashes_no_page_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(70))
    request = DecodeRequest("r", 1, "waiting", 1.0, spec=Request("r", prompt, 20, cache_salt="s"))
    hashed = list[int]()
    take = PrefixHasher._take
    monkeypatch.setattr(
        PrefixHasher, "_take", lambda self, *what: (hashed.append(len(what[1]) // 16), take(self, *what))[1]
    )
    for token in range(70, 82):
        for _ in range(2):
            context = request.new_context()
            assert context.tokens.tolist() == request.tokens
            assert (context.start_idx, context.active_idx) == (0, len(request.tokens))
            pages = len(request.tokens) // 16
            found = hasher_of(context, "sha256", 16).digests(context.tokens, 0, pages)
            anew = PrefixHasher("sha256", 16, "s").digests(np.array(request.tokens), 0, pages)
            assert found.tolist() == anew.tolist()
            del hashed[-1]  # The last entry comes from the comparison above.
        request.emitted.append(token)
    # First the pages of the prompt are hashed, and then only the page that the tenth token fills.
    assert hashed == [4, 1]


def test_a_context_of_an_earlier_attempt_keeps_its_own_hashes() -> None:
    """A loop may drop tokens of the running context. This does not change the hashes of later contexts."""
    request = DecodeRequest("r", 1, "waiting", 1.0, spec=Request("r", list(range(40)), 60))
    first = request.new_context()
    hasher_of(first, "sha256", 16).digests(first.tokens, 0, 2)
    second = request.new_context()
    for token in range(10):
        first.update(token)
    hasher_of(first, "sha256", 16).digests(first.tokens, 0, 3)
    request.emitted += [1] * 12
    third = request.new_context()
    assert second.tokens.tolist() == list(range(40))
    found = hasher_of(third, "sha256", 16).digests(third.tokens, 0, 3)
    assert found.tolist() == PrefixHasher("sha256", 16, None).digests(third.tokens, 0, 3).tolist()


@pytest.mark.parametrize("asked", [False, True])
def test_an_offer_is_of_the_prompt_and_of_what_the_client_has_had_since_the_last_context(asked: bool) -> None:
    request = DecodeRequest("r", 1, "waiting", 5.0, spec=Request("r", [*range(1, 40)], 8, cache_salt="s"))
    if asked:
        request.new_context()
    request.emitted += [7, 8]  # A failed attempt has emitted these tokens.
    every = [*range(1, 40), 7, 8]
    for count in (16, 39, 41):
        table, digest = SimpleNamespace(num_tokens=count), prompt_of(every, "s").digest(count)
        offer = SimpleNamespace(table=table, prompt_digest=digest, token=None if count < 41 else 5)
        assert not request.foreign(offer)  # pyright: ignore[reportArgumentType]
        for other in (prompt_of(every, None), prompt_of([*every[:15], 99, *every[16:]], "s")):
            offer.prompt_digest = other.digest(count)
            assert f"the digest of their {count} tokens is" in request.foreign(offer)  # pyright: ignore[reportArgumentType]


def test_the_digest_of_a_whole_prompt_is_made_ahead() -> None:
    every = [*range(1, 40)]
    request = PrefillRequest("r", 1, "computing", 5.0, prompt=prompt_of(every, "s"))
    expected = {count: prompt_of(every, "s").digest(count) for count in (16, 39)}
    for _ in range(2):
        assert {count: request.digest_of(count) for count in expected} == expected
        request.digest_ahead()
    request.digest = b"known"
    assert request.digest_of(39) == b"known"
    assert request.digest_of(16) == expected[16]
    decode = DecodeRequest("r", 1, "asked", 5.0, spec=Request("r", every, 8, cache_salt="s"))
    for count, token in ((16, None), (39, 5)):
        offer = SimpleNamespace(table=SimpleNamespace(num_tokens=count), prompt_digest=expected[count], token=token)
        assert not decode.foreign(offer)  # pyright: ignore[reportArgumentType]
        assert decode.digest == (39, expected[39])


def test_only_the_youngest_names_are_remembered() -> None:
    recent: Recent[int] = Recent(3)
    assert [recent.add(name) for name in (1, 2, 3, 1)] == [True, True, True, False]
    assert recent.add(4), "4 is new, and the oldest name is forgotten for it"
    assert [recent.add(name) for name in (2, 3, 4)] == [False, False, False]
    assert recent.add(1)
    assert [recent.add(name) for name in (3, 4, 1)] == [False, False, False]
