"""Makes a pull fail in each way that occurs in practice, and checks that the failure is counted under its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcache.replica.block_table import BlockTable, PageCopy
from tests.transfer.clock import Clock
from tests.transfer.pull.test_replica import ASKED, answering, wanted
from tests.transfer.replicas import REMOTE, WHOLE, Engine, pull, run, settled
from transfer.failures import Failure, FailureKind
from transfer.pull.lease import LeaseRef
from transfer.pull.source import Source

NOBODY = Source("tcp://127.0.0.1:9", "dead", LeaseRef(1, 0, 5.0))


def end(p: Engine, d: Engine) -> None:
    run(p, d, until=settled(d))


def opened(p: Engine, d: Engine, **options: Any) -> LeaseRef:
    """Returns a pull that waits for its pages."""
    lease = p.offer()
    pull(d, p.source(lease), groups=None, **options)
    run(p, d, until=lambda: len(d.ranks[0].puller))
    return lease


def later(d: Engine, seconds: float) -> None:
    d.replica._clock.now += seconds  # pyright: ignore[reportFunctionMemberAccess]


def slow(p: Engine, d: Engine) -> None:
    opened(p, d)
    later(d, 20.0)


def slow_source(_: Engine, d: Engine) -> None:
    pull(d, NOBODY, timeout_s=4.0)
    later(d, 4.0)


def nobody(_: Engine, d: Engine) -> None:
    pull(d, NOBODY)
    later(d, 5.0)


def asks_nobody(p: Engine, d: Engine) -> None:
    pull(d, wanted(p, p.offer())._replace(address=NOBODY.address), groups=ASKED)
    later(d, 5.0)


def ended_lease(p: Engine, d: Engine) -> None:
    lease = opened(p, d)
    p.replica.revoke(lease.lease_id, "given up")
    d.replica.add_pages("r", WHOLE, last=True)


def lease_is_over(p: Engine, d: Engine) -> None:
    answering(p, {"error": "it ended", "is_over": True})
    pull(d, wanted(p, p.offer()), groups=ASKED)


def refused(p: Engine, d: Engine) -> None:
    answering(p, {"error": "no"})
    pull(d, wanted(p, p.offer()), groups=ASKED)


def other_prompt(p: Engine, d: Engine) -> None:
    lease = p.offer()
    answering(p, {"lease": lease, "prompt_digest": b"another"})
    pull(d, wanted(p, lease), groups=ASKED)


def unsealed_table(p: Engine, d: Engine) -> None:
    table = BlockTable("r", 0, 48, 16, (tuple(REMOTE),), "")
    d.replica.pull("r", p.source(p.offer()), 20.0, WHOLE, tables=[table])


def broken_reading(p: Engine, d: Engine) -> None:
    d.hindrances[0].refuse = {0}
    pull(d, p.source(p.offer()))


def restarted_before(p: Engine, d: Engine) -> None:
    pull(d, p.source(p.offer())._replace(incarnation="earlier"))


def silent(p: Engine, d: Engine) -> None:
    lease = opened(p, d)
    peer = d.replica.directory.use(p.source(lease).contact)
    assert peer is not None
    d.replica.directory._forget(peer, Failure(FailureKind.SOURCE_GONE, "said in any words"))


def lost_by_a_rank(p: Engine, d: Engine) -> None:
    opened(p, d)
    remote = d.ranks[0].remote("p")
    assert remote is not None
    remote.failure = Failure(FailureKind.SOURCE_GONE, "said in any words")


def shut_down(p: Engine, d: Engine) -> None:
    opened(p, d)
    d.replica.close()
    d.take()


def impossible_pages(p: Engine, d: Engine) -> None:
    pull(d, p.source(p.offer()), groups=[PageCopy([1, 2, 1], REMOTE, (0, 48))])


@pytest.mark.parametrize(
    ("happens", "kind"),
    [
        (slow, FailureKind.TIMEOUT),
        (slow_source, FailureKind.TIMEOUT),
        (nobody, FailureKind.HANDSHAKE),
        (asks_nobody, FailureKind.HANDSHAKE),
        (ended_lease, FailureKind.LEASE_OVER),
        (lease_is_over, FailureKind.LEASE_OVER),
        (restarted_before, FailureKind.LEASE_OVER),
        (refused, FailureKind.REFUSED),
        (other_prompt, FailureKind.REFUSED),
        (unsealed_table, FailureKind.REFUSED),
        (broken_reading, FailureKind.TRANSPORT),
        (silent, FailureKind.SOURCE_GONE),
        (lost_by_a_rank, FailureKind.SOURCE_GONE),
        (shut_down, FailureKind.SHUTDOWN),
        (impossible_pages, FailureKind.OTHER),
    ],
)
def test_a_failure_is_counted_by_its_kind(
    engine: Any, happens: Callable[[Engine, Engine], None], kind: FailureKind
) -> None:
    p, d = engine("p"), engine("d", clock=Clock())
    happens(p, d)
    if happens is not shut_down:
        end(p, d)
    assert d.pulls[-1].error
    assert dict(d.replica.stats.failures) == {kind: 1}


def test_a_pull_that_its_owner_gives_up_is_not_counted_as_failed(engine: Any) -> None:
    p, d = engine("p"), engine("d")
    opened(p, d)
    d.replica.cancel("r", "timed out, was lost, no longer held the pages")
    end(p, d)
    assert not d.replica.stats.failures
