"""Checks after each test and each test file that the state of the process is the same as before, so that no test can
affect another test.
"""

import os
import signal
import sys
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq

QUIET = {"UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL", "DYN_LOG": "error"}
"""Environment variables that silence libraries. Tests cause faults on purpose, and each fault would print lines. Dynamo
prints a line for each request.
"""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # SIGALRM is pytest-timeout's


# pytest sets the first variable for each test; libraries set the others on import.
_OTHERS = {
    *("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *("KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK"),
}
# Other programs may build these in the repository while tests run.
_BUILT = {"build", "dist", "pagewire.egg-info"}


class Surroundings(NamedTuple):
    """The state of a process that all of its tests share."""

    environment: dict[str, str]
    folder: str
    entries: frozenset[str]  # the names in this folder, which is the repository
    handlers: tuple[Any, ...]
    threads: int | None  # None if torch has not been imported
    dtype: Any


def _surroundings() -> Surroundings:
    torch: Any = sys.modules.get("torch")
    # Settings of NIXL are left out, because a thread may be making an agent now. `test_agent.py` checks them.
    environment = {name: value for name, value in os.environ.items() if name not in _OTHERS and name[:4] != "UCX_"}
    return Surroundings(
        environment,
        os.getcwd(),  # noqa: PTH109  (a string is compared)
        frozenset(name for name in os.listdir() if name not in _BUILT and name[0] != "."),  # noqa: PTH208  (as above)
        tuple(map(signal.getsignal, _SIGNALS)),
        None if torch is None else torch.get_num_threads(),
        None if torch is None else torch.get_default_dtype(),
    )


def _changed(before: Surroundings, after: Surroundings) -> dict[str, object]:
    """Returns the differences between the two states. The settings of torch count only if torch had been imported
    before.
    """
    found: dict[str, object] = {}
    for name, was, now in zip(Surroundings._fields, before, after, strict=True):
        if name == "environment":
            found |= {key: (was.get(key), now.get(key)) for key in {**was, **now} if was.get(key) != now.get(key)}
        elif was != now and (before.dtype is not None or name not in ("threads", "dtype")):
            found[name] = was, now
    return found


def _restore(before: Surroundings) -> None:
    """Restores the process's state, so that a mistake in one test fails only that test."""
    kept = {name: value for name, value in os.environ.items() if name in _OTHERS or name[:4] == "UCX_"}
    os.environ.clear()
    os.environ.update(before.environment | kept)
    os.chdir(before.folder)
    for number, handler in zip(_SIGNALS, before.handlers, strict=True):
        signal.signal(number, handler)
    torch: Any = sys.modules.get("torch")
    if before.threads is not None:
        torch.set_num_threads(before.threads)
        torch.set_default_dtype(before.dtype)


@contextmanager
def surroundings_stay() -> Generator[None]:
    """Fails if the block changes the environment, the working directory or its entries, signal handlers, or torch's
    settings.
    """
    before = _surroundings()
    yield
    if changed := _changed(before, _surroundings()):
        _restore(before)
        pytest.fail(f"a test changed what others see, from and to: {changed}")


def seed_torch(item: pytest.Item) -> None:
    """Seeds torch's global generator by seed and test, as pytest-randomly seeds the generators of Python and numpy."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        seed = item.config.getoption("randomly_seed", 0)
        torch.manual_seed((int(seed) + zlib.crc32(item.nodeid.encode())) % 2**63)  # pyright: ignore[reportArgumentType]


_ROOT = Path(__file__).parents[1]
_PRODUCT = tuple(f"{_ROOT / package}/" for package in ("kvcache", "transfer", "scheduler_adapters", "pagewire"))


def sockets_are_checked() -> None:
    """Checks, from now on in this process, that no socket of the product can keep it from ending.

    A socket must have a linger before it is bound or connected. When a peer dies, libzmq ends the session with the
    linger that the socket has at that moment. A linger that is set only when the socket closes comes too late:
    `Context.term` may then wait for ever for messages that the peer has not read. This happened in one of 200 fleets
    whose full server was killed. If the socket belongs to a test, it gets a linger here.

    A TCP socket must also have the options of `kvcache.endpoints.sockets.keep_alive`. Without them, a follower does not
    notice that the host of its peer is gone.
    """
    for name in ("bind", "connect"):
        setattr(zmq.Socket, name, _checked(getattr(zmq.Socket, name)))


def _checked(call: Any) -> Any:
    def checked(socket: Any, address: str) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        ours, endless = caller.startswith(_PRODUCT), socket.getsockopt(zmq.LINGER) < 0
        if ours and not address.startswith("inproc:"):
            assert not endless, f"{caller}: a socket at {address} lingers without end"
        elif endless:
            socket.setsockopt(zmq.LINGER, 0)
        if ours and address.startswith("tcp:"):
            alive = socket.getsockopt(zmq.TCP_KEEPALIVE) == 1 and socket.getsockopt(zmq.TCP_MAXRT) > 0
            assert alive, f"{caller}: a socket at {address} does not notice that its peer's host is gone"
        return call(socket, address)

    return checked
