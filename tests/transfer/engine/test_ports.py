from __future__ import annotations

import socket

import pytest

from transfer import InvalidTransferError, NoFreePortError, available_port


def test_a_port_in_the_range_that_can_be_bound():
    port = available_port(20000, 29999)
    assert 20000 <= port <= 29999
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))


def test_taken_ports_are_an_error():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        with pytest.raises(NoFreePortError, match=f"none of the 1 ports tried from {port} to {port}") as caught:
            available_port(port, port)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(("start", "end", "attempts"), [(9000, 8000, 1), (0, 80, 1), (1, 70000, 1), (8000, 9000, 0)])
def test_impossible_ranges(start: int, end: int, attempts: int):
    with pytest.raises(InvalidTransferError, match="are not a range within 1 to 65535|at least 1 is needed"):
        available_port(start, end, attempts)
