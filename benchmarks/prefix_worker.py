"""A server that always pulls the head of a prompt if the request's name begins with `PULLED`.

`python -m benchmarks.prefix_worker`, started by `Fleet` in place of `scheduler_adapters.service.program`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from scheduler_adapters.service import prefill, server
from scheduler_adapters.service.peer_prefixes import PeerPrefixes
from scheduler_adapters.service.program import die_with_parent
from scheduler_adapters.service.pull_or_compute import PullOrCompute

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache.replica.context import TextContext
    from scheduler_adapters.loop import Request
    from scheduler_adapters.service import messages as msg

PULLED = "pulled "
"""The beginning of the names of requests whose heads are pulled in any case."""


class AlwaysPull(PullOrCompute):
    """Shares the times of another estimate, but always chooses to pull."""

    def __init__(self, estimate: PullOrCompute) -> None:
        super().__init__()
        self.pull, self.compute = estimate.pull, estimate.compute

    def pays(self, cached: int, tokens: int, rest: int) -> bool:  # noqa: ARG002
        """True."""
        return True


class DirectedPrefixes(PeerPrefixes):
    """Always pulls for requests with such names."""

    estimate: PullOrCompute

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._own: PullOrCompute = self.estimate
        self._always: PullOrCompute = AlwaysPull(self._own)

    def begin(self, request: Request, context: TextContext, sources: Sequence[msg.KVSource]) -> bool:
        """Begins with the estimate that the request's name selects. Requests come one at a time."""
        is_named = request.request_id.partition("/")[2].startswith(PULLED)
        self.estimate = self._always if is_named else self._own
        return super().begin(request, context, sources)


def main() -> int:
    """Runs the server. Returns the exit status."""
    die_with_parent()
    prefill.PeerPrefixes = DirectedPrefixes  # type: ignore[misc]
    return server.main()


if __name__ == "__main__":
    sys.exit(main())
