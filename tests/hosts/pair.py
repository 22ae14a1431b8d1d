"""Two hosts, each with a manager and its exchange, and control over the link between them."""

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.hosts.network import IPV4, Family, Host, network

_numbers = itertools.count()
SECRET = {"PAGEWIRE_TEST_SECRET": "a secret of the tests, of enough bytes"}


class Side:
    """The program of one side. Several programs can be started at once. `wait` then waits for each of them."""

    def __init__(
        self,
        host: Host,
        name: str,
        folder: Path,
        program: str = "tests.hosts.exchanged",
        *arguments: str,
        python: Path | str = sys.executable,
        wait: bool = True,
    ) -> None:
        command = [str(python), "-m", program, name, *(arguments or (host.address,))]
        with (folder / f"{name}.log").open("ab") as log:
            self._process = host.start(command, SECRET, log, answers=True)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Waits until the program is ready. Later calls return at once."""
        assert self.answer() == ["ready"]

    def say(self, *command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program has ended"
        return json.loads(line)

    def __call__(self, *command: object) -> Any:
        self.say(*command)
        return self.answer()


class Pair(NamedTuple):
    """The source and its reader."""

    source: Side
    reader: Side
    source_host: Host
    reader_host: Host

    def offer(self, name: str, pages: int, duration_s: float = 30.0) -> str:
        return self.source("offer", name, pages, duration_s)[0]

    def shape(self, rate: str) -> None:
        for host in (self.source_host, self.reader_host):
            host.shape(rate)

    def until_received(self, count: int, say: Callable[[], None]) -> None:
        """Calls `say`, which sends a command, and waits until the reader has received `count` bytes more than
        before.
        """
        before = self.reader_host.received()
        say()
        while self.reader_host.received() - before < count:
            time.sleep(0.005)

    def assert_nothing_is_held(self, within_s: float = 60.0) -> None:
        deadline = time.monotonic() + within_s
        while (held := [side("held")[:3] for side in (self.source, self.reader)]) != [[0, 0, 0]] * 2:
            assert time.monotonic() < deadline, held
            time.sleep(0.05)

    def assert_goes_on(self) -> None:
        """Asserts that the source and the reader can still exchange pages."""
        _, error, right = self.reader("pull", "after", self.offer(f"after {next(_numbers)}", 4), 20.0)
        assert (error, right) == ("", True)


@contextmanager
def two_hosts(folder: Path, *, relayed: bool = False, family: Family = IPV4) -> Iterator[Pair]:
    with network("source", "reader", relayed=relayed, families=(family,)) as (source, reader):
        yield Pair(Side(source, "p", folder), Side(reader, "d", folder), source, reader)


Act = Callable[[Pair], None]
DIRECTIONS: dict[str, tuple[Act, Act]] = {
    "both": (lambda pair: pair.reader_host.cut(), lambda pair: pair.reader_host.restore()),
    "to the reader": (
        lambda pair: pair.reader_host.deafen(pair.source_host),
        lambda pair: pair.reader_host.hear(pair.source_host),
    ),
    "from the reader": (
        lambda pair: pair.source_host.deafen(pair.reader_host),
        lambda pair: pair.source_host.hear(pair.reader_host),
    ),
}
"""For each direction: a function that cuts the link, and a function that repairs it."""
