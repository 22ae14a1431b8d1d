"""`DelayedWork`: what a turn of SGLang's loop has planned for the transfer thread, until it may begin."""

from __future__ import annotations

from collections import deque

from transfer.connector.metadata import ConnectorMetadata


class DelayedWork:
    """Work in the order in which it was planned.

    Examples:
        >>> work = DelayedWork()
        >>> first, second = ConnectorMetadata(reqs_computed=["a"]), ConnectorMetadata(reqs_computed=["b"])
        >>> work.turn(first, 1), work.turn(second, 0) == [first, second]
        ([], True)
    """

    def __init__(self) -> None:
        self._turn = 0
        self._planned: deque[tuple[int, ConnectorMetadata]] = deque()

    def turn(self, planned: ConnectorMetadata, turns: int) -> list[ConnectorMetadata]:
        """Begins a turn, and returns the work that may begin in it.

        Args:
            planned: the work that this turn has planned.
            turns: how many turns it must wait.
        """
        self._turn += 1
        if planned != ConnectorMetadata():
            self._planned.append((self._turn + turns, planned))
        due: list[ConnectorMetadata] = []
        while self._planned and self._planned[0][0] <= self._turn:
            due.append(self._planned.popleft()[1])
        return due
