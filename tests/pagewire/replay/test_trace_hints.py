from __future__ import annotations

import pytest

from pagewire.replay.trace_hints import continues, hints_for
from scheduler_adapters.errors import ReplayError

TRACE = [[1, 2, 3, 4], [1, 9], [1, 2, 5, 6], [1, 2, 3, 4, 7], [8], [8]]


def test_a_session_continues_if_a_later_prompt_has_half_of_its_blocks() -> None:
    # The second prompt shares half of its blocks with later prompts, as a system prompt does. The third prompt
    # continues from half of the first prompt.
    assert continues(TRACE) == [True, True, True, False, True, False]
    assert continues([[1, 2, 3], [1, 9, 9]]) == [False, False]


def test_kinds_of_hints() -> None:
    true = continues(TRACE)
    assert [hint and hint.session_continues for hint in hints_for(TRACE, "true")] == true
    assert [hint and hint.session_continues for hint in hints_for(TRACE, "inverted")] == [not one for one in true]
    assert hints_for(TRACE, "none") == [None] * 6
    assert hints_for(TRACE, "wrong=0") == hints_for(TRACE, "true")
    assert hints_for(TRACE, "wrong=1") == hints_for(TRACE, "inverted")


def test_a_share_of_the_hints_is_wrong_the_same_ones_each_time() -> None:
    trace = [[number] for number in range(4000)]
    wrong = [hint is not None and hint.session_continues for hint in hints_for(trace, "wrong=0.2")]
    assert 700 < sum(map(bool, wrong)) < 900
    assert hints_for(trace, "wrong=0.2") == hints_for(trace, "wrong=0.2")


@pytest.mark.parametrize("kind", ["", "maybe", "wrong", "wrong=", "wrong=x", "wrong=1.1", "wrong=-1", "true=1"])
def test_other_kinds_are_refused(kind: str) -> None:
    with pytest.raises(ReplayError, match="none, true, inverted or wrong=SHARE"):
        hints_for(TRACE, kind)
