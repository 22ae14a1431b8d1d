"""A step of requests some of which ran drafted tokens: where some were taken away, they are set back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcache.replica.batch import Gathered
from kvcache.replica.context import Context
from kvcache.states.replica_states import ReplicaStates
from kvcache.states.state_pages import StatePages


def step_with_states(
    each: Sequence[ReplicaStates], gather: Callable[[], Gathered], step: Callable[[Gathered], None]
) -> None:
    """`step` of what is gathered, and the states after it. `gather` looks at the contexts anew each time.

    A request that ran drafted tokens, and had some taken away, is set back to where its state is (`start_idx`). Raises
    `StatePageError` where that is before all that ran, or after; and as `step`. Nothing has changed then.
    """
    gathered = gather()
    if any(states.pages.drafts.page_of for states in each):
        gathered = _step_drafted(each, gathered, gather, step)
    else:
        step(gathered)
    for share in gathered.split(len(each)):
        each[share.replica].stepped(share.rows, gathered.starts[share.at])


def _step_drafted(
    each: Sequence[ReplicaStates],
    gathered: Gathered,
    gather: Callable[[], Gathered],
    step: Callable[[Gathered], None],
) -> Gathered:
    """`step` where requests may be set back; the batch as it is then."""
    drafted: list[tuple[Context, StatePages]] = []
    owners: list[int] = gathered.replicas.tolist()
    for context, replica_idx in zip(gathered.contexts, owners, strict=True):
        pages = each[replica_idx].pages
        if context.request_id in pages.drafts.page_of:
            drafted.append((context, pages))
    starts = [context.start_idx for context, _ in drafted]
    goes_on = [
        pages.drafts.goes_on_from(context.request_id, pages.tokens_of(context.request_id), start)
        for (context, pages), start in zip(drafted, starts, strict=True)
    ]
    try:
        for (context, _), at in zip(drafted, goes_on, strict=True):
            context.set_token_indices(start_idx=at)
        gathered = gather()
        step(gathered)
    except BaseException:
        for (context, _), start in zip(drafted, starts, strict=True):
            context.set_token_indices(start_idx=start)
        raise
    for (context, pages), at in zip(drafted, goes_on, strict=True):
        pages.settle(context.request_id, at)
    return gathered
