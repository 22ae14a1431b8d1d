import itertools
import math

import pytest

from scheduler_adapters.errors import IllegalMoveError
from scheduler_adapters.loop import Request
from scheduler_adapters.service.requests import (
    DECODE_MOVES,
    PREFILL_MOVES,
    DecodeRequest,
    PrefillRequest,
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
            with pytest.raises(IllegalMoveError, match=f"'r', attempt 1: {before} to {after}"):
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


def test_only_a_request_that_is_over_or_has_a_deadline_elsewhere_has_none() -> None:
    request = request_in("prefill", "computing")
    request.move("held")
    assert request.deadline == math.inf  # the lease has one


def test_the_first_reason_is_kept() -> None:
    request = request_in("decode", "asked")
    assert request.blame("first") == "first"
    assert request.blame("second") == "first"


def test_a_decode_request_knows_all_that_the_client_has_had() -> None:
    request = DecodeRequest("r", 3, "waiting", 1.0, spec=Request("r", [1, 2], 9))
    request.emitted += [7, 8]
    assert request.tokens == [1, 2, 7, 8]
    assert request.key == "r#3"


def test_prefill_goes_forward_alone_and_decode_back_only_to_wait_before_it_has_generated() -> None:
    for phase, moves in PREFILL_MOVES.items():
        later = list(PREFILL_MOVES)[list(PREFILL_MOVES).index(phase) + 1 :]
        assert moves <= set(later), phase
    order = list(DECODE_MOVES)
    for phase, moves in DECODE_MOVES.items():
        assert moves - {"waiting", "over"} <= {order[min(order.index(phase) + 1, len(order) - 1)]}, phase
    assert {phase for phase, moves in DECODE_MOVES.items() if "waiting" in moves} == {"asked", "offered", "pulling"}
