"""`StepInFlight`: a step whose tables stay unchanged while the device runs it and the next step is planned.

Two sets of tables are used in turn, so two steps may be in flight: one runs, and one is planned after it. A page that
is released meanwhile is parked until the step has ended, because the step may still read and write it.
"""

from collections.abc import Sequence

from kvcache.arguments import of_kind
from kvcache.errors import InvalidRequestError, InvariantError
from kvcache.pool.index import INDEX
from kvcache.replica.devices import PlacedReplica
from kvcache.types import RaggedKVCacheInputs
from kvcache.uncopied import Uncopied

MOST_STEPS = 2


class StepInFlight(Uncopied):
    """A step that was fetched ahead. Made by `PagedKVCacheManager.fetch_ahead`, ended by `end_step`.

    Attributes:
        inputs: as `fetch` returns them. The tensors stay unchanged until the step has ended. `cache_lengths` and
            `lookup_table` have the same addresses as in the step before the previous one, because two sets of tables
            are used in turn.
    """

    __slots__ = ("inputs", "num_requests", "number", "owner")

    def __init__(
        self, owner: "StepsInFlight", number: int, num_requests: int, inputs: list[RaggedKVCacheInputs]
    ) -> None:
        self.owner = of_kind(
            "owner", owner, StepsInFlight, "a manager, whose fetch_ahead makes the step,", InvalidRequestError
        )
        self.number = number  # the number of the set of tables that the step uses
        self.num_requests = num_requests
        self.inputs = inputs

    @property
    def is_over(self) -> bool:
        """Whether `end_step` was called for the step."""
        return self not in self.owner.open

    def padded(self, batch_size: int) -> list[RaggedKVCacheInputs]:
        """Returns `inputs` with `batch_size` rows and all columns, for a captured graph.

        Added rows have no tokens or pages.

        Raises `InvalidRequestError` if some replica has more than `batch_size` requests in the step, if a replica has
        fewer than `batch_size` rows, or if the step is over.
        """
        return self.owner.padded(self, batch_size)

    def __repr__(self) -> str:
        return f"StepInFlight(num_requests={self.num_requests}, is_over={self.is_over})"


class StepsInFlight:
    """The steps in flight of all replicas, oldest first."""

    def __init__(self, placed: Sequence[PlacedReplica]) -> None:
        self.open: list[StepInFlight] = []
        self._placed = placed

    def free_tables(self, num_requests: int) -> int:
        """Returns the number of a set of tables that no step in flight uses. The tables exist when this call returns.

        Raises `InvalidRequestError`, and changes nothing, if two steps are in flight.
        """
        used = {step.number for step in self.open}
        if len(used) == MOST_STEPS:
            raise InvalidRequestError(
                f"fetch_ahead of {num_requests} requests: {MOST_STEPS} steps are in flight already: call end_step for "
                f"the older one, of {self.open[0].num_requests} requests, first"
            )
        number = ({*range(MOST_STEPS)} - used).pop()
        for placed in self._placed:
            placed.step_tables(number)
        return number

    def begin(self, step: StepInFlight) -> None:
        """Record that the step is in flight. Pages that are released from now on are parked for this step."""
        self.open.append(step)
        for placed in self._placed:
            placed.replica.pool.begin_step()

    def end(self, step: StepInFlight) -> None:
        """Mark the step as ended on the device. Safe to call twice."""
        if step not in self.open:
            return
        at = self.open.index(step)
        for placed in self._placed:
            placed.replica.pool.end_step(at)
        del self.open[at]

    def padded(self, step: StepInFlight, batch_size: int) -> list[RaggedKVCacheInputs]:
        """See `StepInFlight.padded`."""
        most = len(self._placed[0].replica.rows.request_ids)
        least = max(len(inputs.cache_lengths) for inputs in step.inputs)
        if step.is_over or not least <= batch_size <= most:
            state = "is over" if step.is_over else f"needs a batch of {least} (its requests) to {most} (the rows)"
            raise InvalidRequestError(
                f"padded to a batch of {batch_size}: the step of {step.num_requests} requests {state}"
            )
        tables = [table for placed in self._placed for table in placed.step_tables(step.number)]
        return [table.padded(inputs, batch_size) for table, inputs in zip(tables, step.inputs, strict=True)]

    def park(self) -> None:
        """Park the pages of each step in flight anew after an interrupt, as the tables of the step name them."""
        for placed in self._placed:
            pages = [placed.step_tables(step.number)[0].pages() for step in self.open]
            placed.replica.pool.parked[:] = [[of_step.astype(INDEX)] for of_step in pages]

    def check(self) -> None:
        """Raise `InvariantError` if a page that a step in flight may read or write is free."""
        for placed in self._placed:
            pool = placed.replica.pool
            if len(pool.parked) != len(self.open):
                raise InvariantError(
                    f"{len(self.open)} steps are in flight, but pages are parked for {len(pool.parked)} steps"
                )
            for step in self.open:
                pages = placed.step_tables(step.number)[0].pages()
                free = pages[(pool.holders[pages] == 0) & (pool.writers[pages] == 0)]
                if free.size:
                    raise InvariantError(f"page {free[0]} is free, but {step} may still read or write it")


def check_step(step: object, owner: StepsInFlight) -> StepInFlight:
    """Returns the step. Raises `InvalidRequestError` unless it belongs to this manager."""
    found = of_kind("end_step: step", step, StepInFlight, "a step that fetch_ahead returned", InvalidRequestError)
    if found.owner is not owner:
        raise InvalidRequestError(f"end_step: another manager fetched this step of {found.num_requests} requests")
    return found
