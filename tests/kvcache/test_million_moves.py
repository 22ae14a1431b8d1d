"""The tool that makes as many random moves as one likes: it counts what happened, and names the seed that fails."""

from __future__ import annotations

import pytest

from tests.kvcache import million_moves
from tests.kvcache.million_moves import KINDS, main
from tests.kvcache.states.group_state_moves import GroupBelowMoves

FLAGS = [
    [*(["--states", place] if place else []), *["--groups"] * groups, *["--hints"] * hints]
    for place, groups, hints in KINDS
]


@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
def test_each_kind_counts_what_happened(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["--seed", "7", "--moves", "800", *flags])
    said = capsys.readouterr().out
    wanted = ["seeds 7 to 10, no discrepancy", "'moves': 800", "'run': ", "'evicted': "]
    wanted += ["'state evicted': ", "'set back': "] if "--states" in flags else []
    wanted += ["'slid': "] if "--groups" in flags else []
    wanted += ["'hint': "] if "--hints" in flags else []
    assert [one for one in wanted if one not in said] == []


def test_a_seed_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Wrong(GroupBelowMoves):
        def same_states(self) -> None:
            super().same_states()
            assert self.manager.metrics.state_hits < 2

    monkeypatch.setitem(million_moves.KINDS, ("below", True, False), Wrong)
    with pytest.raises(AssertionError):
        main(["--seed", "40", "--moves", "4000", "--groups", "--states", "below"])
    assert "fails" in capsys.readouterr().out


def test_hints_are_refused_where_no_model_of_them_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--groups", "--states", "shared", "--hints"])
    assert "--hints: with --states shared alone" in capsys.readouterr().err
