"""A step of requests some of which ran drafted tokens: where some were taken away, they are set back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcache.replica.batch import Gathered
from kvcache.replica.context import Context
from kvcache.states.replica_states import ReplicaStates
from kvcache.states.state_pages import StatePages

Step = Callable[[Gathered, Callable[[], None] | None], None]
"""`Replicas.step`, and what it is to do besides."""


def step_with_states(each: Sequence[ReplicaStates], gather: Callable[[], Gathered], step: Step) -> None:
    """`step` of what is gathered. `gather` looks at the contexts anew each time.

    A request that ran drafted tokens, and had some taken away, is set back to where its state is (`start_idx`). Raises
    `StatePageError` where that is before all that ran, or after; and as `step`. Nothing has changed then.
    """
    gathered = gather()
    if any(states.pages.drafts.page_of for states in each):
        _step_drafted(each, gathered, gather, step)
    else:
        step(gathered, None)


def _step_drafted(
    each: Sequence[ReplicaStates],
    gathered: Gathered,
    gather: Callable[[], Gathered],
    step: Step,
) -> None:
    """`step` where requests may be set back."""
    drafted: list[tuple[Context, StatePages]] = []
    owners: list[int] = gathered.replicas.tolist()
    for context, replica_idx in zip(gathered.contexts, owners, strict=True):
        pages = each[replica_idx].pages
        if context.request_id in pages.drafts.page_of:
            drafted.append((context, pages))
    starts = [context.start_idx for context, _ in drafted]
    names = [context.request_id for context, _ in drafted]
    goes_on = [
        pages.drafts.goes_on_from(name, pages.tokens_of(name), start)
        for name, (_, pages), start in zip(names, drafted, starts, strict=True)
    ]

    def settle() -> None:
        for name, (_, pages), at in zip(names, drafted, goes_on, strict=True):
            pages.settle(name, at)

    try:
        for (context, _), at in zip(drafted, goes_on, strict=True):
            context.set_token_indices(start_idx=at)
        step(gather(), settle)
    except BaseException:
        for (context, _), start in zip(drafted, starts, strict=True):
            context.set_token_indices(start_idx=start)
        raise
