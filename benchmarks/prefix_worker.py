"""A server that gets the head of a prompt in the way that the request's id prescribes (see `WAYS`).

`python -m benchmarks.prefix_worker`, started by `Fleet` in place of `scheduler_adapters.service.program`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from scheduler_adapters.pull_or_compute import PullOrCompute
from scheduler_adapters.service import prefill, server
from scheduler_adapters.service.peer_prefixes import PeerPrefixes
from scheduler_adapters.service.program import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvcache.replica.context import TextContext
    from scheduler_adapters.loop import Request
    from scheduler_adapters.service import messages as msg

PULLED, COMPUTED, SPLIT = WAYS = ("pulled ", "computed ", "split ")
"""If a request's id begins with one of these names, the request gets its head in that way."""


class OneWay(PullOrCompute):
    """A replacement for `PullOrCompute` that always chooses the same way. It takes its times from another estimate."""

    def __init__(self, estimate: PullOrCompute, way: str) -> None:
        super().__init__()
        self.pull, self.compute, self._way = estimate.pull, estimate.compute, way

    def pays(self, cached: int, tokens: int, rest: int) -> bool:  # noqa: ARG002
        """Whether to pull the whole head."""
        return self._way == PULLED

    def splits(self, cached: int, tokens: int, rest: int, page_size: int) -> bool:  # noqa: ARG002
        """Whether to pull pages from the end of the head while its front is computed."""
        return self._way == SPLIT


class DirectedPrefixes(PeerPrefixes):
    """Serves a request in the way that its id prescribes, or else in the way that the estimate chooses."""

    estimate: PullOrCompute

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._own: PullOrCompute = self.estimate
        self._ways: dict[str, PullOrCompute] = {way: OneWay(self._own, way) for way in WAYS}

    def begin(self, request: Request, context: TextContext, sources: Sequence[msg.KVSource]) -> bool:
        """Chooses the way that the request's id prescribes. Requests come one at a time."""
        name = request.request_id.partition("/")[2]
        self.estimate = next((self._ways[way] for way in WAYS if name.startswith(way)), self._own)
        return super().begin(request, context, sources)


def main() -> int:
    """Runs the server. Returns the exit status."""
    die_with_parent()
    prefill.PeerPrefixes = DirectedPrefixes  # type: ignore[misc]
    return server.main()


if __name__ == "__main__":
    sys.exit(main())
