"""`Router`: chooses the replica for a request."""

from collections.abc import Sequence

from kvcache.params import Routing


class Router:
    """Chooses the replica for a request.

    The cost of a replica is the number of pages that the request would have to compute there, plus the weighted number
    of pages that the replica has recently computed.
    """

    def __init__(self, replicas: int, routing: Routing) -> None:
        self.routing = routing
        self._loads = [0.0] * replicas
        self._last = replicas - 1

    def recommend(self, missing: Sequence[int], claimed: Sequence[int], fits: Sequence[bool]) -> int:
        """Returns the replica of least cost on which the request fits. If it fits on none, all replicas are compared.

        Each argument has one entry per replica: how many pages of the request are `missing` there, how many requests
        are `claimed`, and whether the request `fits` now. Among equals, the replica with the fewest claimed requests is
        chosen, and then the one with the lowest index.
        """
        weight = self.routing.load_weight
        costs = [miss + weight * load for miss, load in zip(missing, self._loads, strict=True)]
        return min(range(len(costs)), key=lambda replica: (not fits[replica], costs[replica], claimed[replica]))

    def without_looking(self, claimed: Sequence[int]) -> int:
        """Returns the replica by a rule that needs no prefix lookup: `least-loaded` or `round-robin`."""
        if self.routing.rule == "round-robin":
            return (self._last + 1) % len(claimed)
        return min(range(len(claimed)), key=claimed.__getitem__)

    def admitted(self, replica: int, computed: int) -> None:
        """Record that a request was admitted on this replica, where it computes `computed` pages."""
        decay = self.routing.load_decay
        self._loads = [load * decay for load in self._loads]
        self._loads[replica] += computed
        self._last = replica
