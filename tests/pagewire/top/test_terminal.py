"""`pagewire top` with real terminals, pipes and signals. In each case it ends correctly, and restores the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from kvcache.endpoints.watch import ManagerWatch
from kvcache.watch.names import tenant_name
from pagewire.top.sources import PlayedSource
from tests import forked
from tests.pagewire.top.test_app import busy_manager

pytestmark = pytest.mark.slow

DEAD = "ipc:///nowhere/pagewire"
WITHIN_S = 30.0  # It takes a second, but a busy machine may take many.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    watch = ManagerWatch(busy_manager(), name="decode", clear_names=True)
    yield watch.address
    watch.close()


class Terminal:
    """Both ends of a pseudoterminal. `text` has the output that was read from it so far."""

    def __init__(self, *, is_read: bool = True) -> None:
        self.master, self.slave = pty.openpty()
        self.text = b""
        if is_read:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError):  # closed
            while data := os.read(self.master, 1 << 16):
                self.text += data

    def close(self) -> None:
        for one in (self.master, self.slave):
            with suppress(OSError):
                os.close(one)


class Top:
    """A `pagewire top` process with these standard descriptors."""

    def __init__(self, *arguments: str, stdin: int, stdout: int, stderr: int, controls: bool = False) -> None:
        given = [Connection(os.dup(one)) for one in (stdin, stdout, stderr)]
        process, self._conn = forked.start(_top, given, controls, arguments)
        self.process: BaseProcess = process
        for one in given:
            one.close()
        self._conn.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid
        os.kill(self.process.pid, number)

    def status(self, within_s: float = WITHIN_S) -> int:
        """Waits until the process ends, and returns its exit status. Fails if the process does not end within this
        time.
        """
        self.process.join(within_s)
        assert self.process.exitcode is not None, f"the process has not ended within {within_s:g} s"
        return self.process.exitcode

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _top(conn: Connection, given: list[Connection], controls: bool, arguments: tuple[str, ...]) -> None:
    from pagewire import cli

    os.setsid()
    for number, one in enumerate(given):
        os.dup2(one.fileno(), number)
        one.close()
    if controls:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.__stdin__ = sys.stdin = open(0, closefd=False)  # noqa: SIM115  (multiprocessing has put /dev/null there)
    conn.send("begins")
    sys.exit(cli.main(["top", *arguments]))


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Top]]:
    started: list[Top] = []

    def run(*arguments: str, on: Terminal | None = None, **more: Any) -> Top:
        where = {} if on is None else dict.fromkeys(("stdin", "stdout", "stderr"), on.slave)
        started.append(Top(*arguments, **where, **more))
        return started[-1]

    yield run
    for one in started:
        one.process.kill()
        one.process.join()


def wait_for(ready: Callable[[], object], what: str, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_it_and_the_terminal_is_as_before(
    number: int, address: str, terminal: Terminal, start: Callable[..., Top]
) -> None:
    before = termios.tcgetattr(terminal.slave)
    top = start(address, on=terminal)
    wait_for(lambda: b"64" in terminal.text and b"pages," in terminal.text, "no look is drawn")
    assert termios.tcgetattr(terminal.slave) != before
    top.signal(number)
    assert top.status() == 128 + number
    wait_for(lambda: b"interrupted by" in terminal.text, "it does not say why it ended")
    assert termios.tcgetattr(terminal.slave) == before
    # These are the modes for the screen, the mouse, the focus and pasted text.
    for mode in (b"1049", b"1000", b"1003", b"1004", b"2004"):
        assert terminal.text.rfind(b"\x1b[?%sl" % mode) > terminal.text.rfind(b"\x1b[?%sh" % mode), mode


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_it_while_the_terminal_takes_no_output(
    number: int, address: str, start: Callable[..., Top]
) -> None:
    terminal = Terminal(is_read=False)
    before = termios.tcgetattr(terminal.slave)
    top = start(address, on=terminal)
    # Snapshots fill the terminal's buffer, so that output waits in the middle of an update.
    wait_for(lambda: not select.select([], [terminal.slave], [], 0)[1], "it never waits for the terminal")
    assert termios.tcgetattr(terminal.slave) != before
    top.signal(number)
    assert top.status() == 128 + number
    assert termios.tcgetattr(terminal.slave) == before
    terminal.close()


@pytest.mark.parametrize("controls", [False, True], ids=["any", "controlling"])
def test_the_app_ends_with_its_terminal(controls: bool, address: str, start: Callable[..., Top]) -> None:
    terminal = Terminal(is_read=False)
    top = start(address, on=terminal, controls=controls)
    os.read(terminal.master, 1)
    os.close(terminal.slave)
    os.close(terminal.master)
    assert top.status() == 128 + signal.SIGHUP


def test_the_screen_says_that_no_process_answers(terminal: Terminal, start: Callable[..., Top]) -> None:
    top = start(DEAD, on=terminal)
    # The terminal has 40 lines and 200 columns.
    fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, b"\x28\x00\xc8\x00\x00\x00\x00\x00")
    wait_for(lambda: b"no process answers at" in terminal.text, "nothing is said")
    assert DEAD.encode() in terminal.text
    os.write(terminal.master, b"q")
    assert top.status() == 0


def test_without_a_terminal_one_look_is_printed(address: str) -> None:
    command = f"{sys.executable} -m pagewire top {address}"
    done = subprocess.run(
        ["bash", "-c", f"{command} </dev/null | head -c 9; echo :${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert re.fullmatch("processes:(0|141)\n", done.stdout)
    assert done.stderr == ""
    whole = subprocess.run(
        command.split(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True
    )
    assert "free 36 idle 8 held 15 leased 5" in whole.stdout
    assert re.search(f"chat-1 +{tenant_name('acme')}", whole.stdout)


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside one that answers"])
def test_without_a_terminal_an_address_without_an_answer_is_an_error(
    others: bool, address: str, start: Callable[..., Top]
) -> None:
    read, write = os.pipe()
    with Path(os.devnull).open() as null:
        top = start(DEAD, *([address] if others else []), stdin=null.fileno(), stdout=write, stderr=write)
    os.close(write)
    status = top.status(20.0)
    with os.fdopen(read) as file:
        printed = file.read()
    assert status == 2
    assert ("chat-1" in printed) == others
    assert f"pagewire top: error: no process answers at {DEAD}. Check that" in printed


@pytest.mark.parametrize("how", ["reader", *SIGNALS], ids=lambda how: getattr(how, "name", how))
def test_without_a_terminal_it_records_until_a_signal_or_until_its_reader_has_gone(
    how: Any, address: str, start: Callable[..., Top], tmp_path: Path
) -> None:
    read, write = os.pipe()
    path = tmp_path / "looks"
    with Path(os.devnull).open("r+") as null:
        top = start(address, f"--record={path}", stdin=null.fileno(), stdout=write, stderr=null.fileno())
    os.close(write)
    wait_for(lambda: path.exists() and path.stat().st_size, "no look is recorded")
    size = path.stat().st_size
    wait_for(lambda: path.stat().st_size > size, "it does not go on")
    before = top.cpu_s()
    time.sleep(1.0)
    assert top.cpu_s() - before < 0.5
    if how == "reader":
        os.close(read)
        assert top.status() == 128 + signal.SIGPIPE
    else:
        top.signal(how)
        assert top.status() == 128 + how
        os.close(read)
    assert PlayedSource(path).length > 0


def test_in_a_terminal_the_app_sleeps_between_snapshots(
    address: str, terminal: Terminal, start: Callable[..., Top]
) -> None:
    top = start(address, on=terminal)
    wait_for(lambda: b"pages," in terminal.text, "no look is drawn")
    before = top.cpu_s()
    time.sleep(1.0)
    assert top.cpu_s() - before < 0.5
    os.write(terminal.master, b"q")
    assert top.status() == 0
