"""Retention hints for a trace, derived from its future. They show the best that hints from clients could achieve."""

import contextlib
import random
from collections.abc import Sequence

from kvcache import Retention
from scheduler_adapters.errors import ReplayError

Blocks = Sequence[int]


def continues(trace: Sequence[Blocks]) -> list[bool]:
    """Returns, for each request, whether a later request begins with at least half of its blocks.

    The limit is a half because the end of a prompt often changes: its last block fills up, or another question follows
    the document. Two requests that share only a system prompt do not count as one session.
    """
    seen = set[int]()
    found: list[bool] = []
    for blocks in reversed(trace):
        found.append(blocks[(len(blocks) - 1) // 2] in seen)
        seen.update(blocks)
    return found[::-1]


def hints_for(trace: Sequence[Blocks], kind: str) -> list[Retention | None]:
    """Returns a hint for each request.

    `kind` is `none`, `true`, `inverted`, or `wrong=SHARE`, which inverts that share of the hints.
    """
    if kind == "none":
        return [None] * len(trace)
    wrong = _share_wrong(kind)
    rng = random.Random(0)  # noqa: S311 - not used for security
    return [Retention(session_continues=true != (rng.random() < wrong)) for true in continues(trace)]


def _share_wrong(kind: str) -> float:
    """Returns the share of requests whose hint is inverted."""
    text = {"true": "wrong=0", "inverted": "wrong=1"}.get(kind, kind)
    with contextlib.suppress(ValueError):
        share = float(text.removeprefix("wrong=")) if text.startswith("wrong=") else -1.0
        if 0.0 <= share <= 1.0:
            return share
    raise ReplayError(f"--hints {kind!a}: none, true, inverted or wrong=SHARE is needed, a share from 0 to 1")
