"""`recover`: makes a manager's state right again after a call was interrupted in the middle of a change.

Nothing is repaired in place. Every request is released, and copies between tiers end. The state is then built anew from
what is complete whatever was interrupted: published pages and states, because pages are published only when their
content is complete; the pages of leases; the pages to which imports may still write; and the pages of steps in flight.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.claims import Claims
from kvcache.replica.block_table import PendingImport
from kvcache.replica.copier import ImportCopier
from kvcache.replica.leases import PageLease
from kvcache.replicas import Replicas
from kvcache.steps_in_flight import StepInFlight
from kvcache.types import RequestID
from kvcache.under_way import UnderWay


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of `PagedKVCacheManager.recover`, and the state after it.

    If the interrupt came while a call was returning, the manager cannot know that the result was lost. So the last
    fields list everything that is open. End every listed object that you do not recognise.
    """

    call: str | None
    """The call that was interrupted while it changed the state. None if there was none; then nothing was changed."""
    released: tuple[RequestID, ...]
    """Requests that are no longer claimed, as after `release`: all that were claimed, if a call was interrupted."""
    claimed: tuple[RequestID, ...]
    """All requests that are claimed. Empty if a call was interrupted."""
    leases: tuple[PageLease, ...]
    """All leases that are open."""
    imports: tuple[PendingImport, ...]
    """All imports to whose pages a copier may still write."""
    copiers: tuple[ImportCopier, ...]
    """The copiers of these imports, except those that were never handed out or have ended."""
    steps: tuple[StepInFlight, ...]
    """All steps in flight, oldest first."""


def recover(replicas: Replicas, claims: Claims, mark: UnderWay) -> Recovered:
    """Build the state anew if `mark` says that it may be half changed. See `PagedKVCacheManager.recover`.

    The requests are forgotten last. So if this call is interrupted, the next one reports all of them.
    """
    if not mark.is_interrupted or mark.call is None:
        return _report(replicas, None, claimed=claims.places)
    replicas.rebuild()
    mark.call.complete()
    replicas.check()
    report = _report(replicas, mark.call.name, released=claims.places)
    claims.clear()
    mark.context = None
    mark.end()
    return report


def _report(
    replicas: Replicas, call: str | None, *, released: Iterable[RequestID] = (), claimed: Iterable[RequestID] = ()
) -> Recovered:
    return Recovered(
        call,
        tuple(released),
        tuple(claimed),
        tuple(lease for replica in replicas.each for lease, _ in replica.leases.held()),
        tuple(pending for replica in replicas.each for pending in replica.imports.each),
        tuple(one for replica in replicas.each for one in replica.imports.copiers.values() if not one.is_over),
        tuple(replicas.steps.open),
    )
