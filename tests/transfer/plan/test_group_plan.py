"""A pull is divided at the ends of pages of both sides, and every token is pulled."""

from __future__ import annotations

import pytest

from transfer.plan.group_plan import cut


@pytest.mark.parametrize("tokens", [(0, 8), (0, 6), (3, 8), (5, 7), (4, 5), (1, 23)])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4), (4, 6), (1, 4)])
def test_every_token_is_in_one_piece_at_its_place_in_both_pages(
    tokens: tuple[int, int], sizes: tuple[int, int]
) -> None:
    (start, stop), (ours, theirs) = tokens, sizes
    found: list[int] = []
    for kind in cut(tokens, ours, theirs):
        for local, remote in zip(kind.local.tolist(), kind.remote.tolist(), strict=True):
            first = (start // ours + local) * ours + kind.local_token
            assert first == (start // theirs + remote) * theirs + kind.remote_token
            assert kind.local_token + kind.num_tokens <= ours
            assert kind.remote_token + kind.num_tokens <= theirs
            found += range(first, first + kind.num_tokens)
    assert sorted(found) == list(range(start, stop))
