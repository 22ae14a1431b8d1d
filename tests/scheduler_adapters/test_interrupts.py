"""Signals end a command in every stage. No process and no file outlives the command, and its exit status names the
signal.
"""

import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scheduler_adapters import interrupts
from scheduler_adapters.service.fleet import PREFIX
from scheduler_adapters.service.program import PARENT_GONE
from tests.pagewire.demo.test_demo import Demo, assert_gone_soon
from tests.scheduler_adapters.leftovers import STAGES, Run, memory_beside, wait_for_work

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EVERY = (*HANDLED, signal.SIGKILL)
KINDS = {
    "plain": (),
    "curve": ("--curve",),
    "chaos": ("--chaos", "3"),
    "many": ("--curve", "--prefills", "2", "--decodes", "2", "--prefill-tp", "2"),
}
SERVED = {"start": "2000", "serving": "2000", "checking": "40"}


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Returns a folder for a run. Its path is short, because the path of a socket may have only 107 bytes."""
    folder = tmp_path_factory.mktemp("t")
    yield folder
    shutil.rmtree(memory_beside(folder), ignore_errors=True)  # A failed test may have left this folder.


def run_demo(folder: Path, stage: str, *arguments: str) -> Run:
    """Starts a demo and waits until the demo is in a stage."""
    run = Run(folder, "demo", "--requests", SERVED[stage], "--max-new-tokens", "8", *arguments)
    run.wait_for(STAGES[stage])
    return run


def assert_ended(run: Run, number: int) -> None:
    status, said = run.end(number)
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL
        run.assert_nothing_left(files=False)
        # The run has left only its two folders. The next start removes them.
        assert all(path.name.startswith(PREFIX) for root in (run.folder, run.memory) for path in root.iterdir())
        following = Run(run.folder, "demo", "--requests", "2000")
        following.wait_for(STAGES["serving"])
        assert [len(list(root.iterdir())) for root in (run.folder, run.memory)] == [1, 1]
        assert following.end(signal.SIGTERM)[0] == 128 + signal.SIGTERM
        following.assert_nothing_left()
    else:
        assert status == 128 + number
        assert said == f"pagewire demo: interrupted by {signal.Signals(number).name}\n"
        run.assert_nothing_left()


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("number", EVERY, ids=lambda number: number.name)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outlives_the_demo(place: Path, kind: str, number: signal.Signals, stage: str) -> None:
    run = run_demo(place, stage, *KINDS[kind])
    # The signal comes at a random time of the stage, while the processes start, import, connect or serve.
    time.sleep(random.Random(f"{kind} {number} {stage}").uniform(0, 3 if stage == "start" else 0.5))
    assert_ended(run, number)


@pytest.mark.timeout(240)
def test_the_demo_that_starts_with_keys_leaves_nothing_at_a_hangup(place: Path) -> None:
    assert_ended(run_demo(place, "start", "--curve"), signal.SIGHUP)


@pytest.mark.long
@pytest.mark.parametrize("role", ["prefill", "decode"])
# SIGTERM is left out, because a process finishes its requests after SIGTERM.
@pytest.mark.parametrize("number", [one for one in EVERY if one != signal.SIGTERM], ids=lambda number: number.name)
def test_the_end_of_one_child_ends_the_whole_demo(place: Path, role: str, number: signal.Signals) -> None:
    run = Run(place, "demo", "--requests", "2000", "--curve")
    run.wait_for(STAGES["serving"])
    (pid,) = re.findall(rf"{role}: pid (\d+)", "".join(run.lines))
    if number == signal.SIGINT:  # A child ignores SIGINT. Its parent gets SIGINT, too, and ends its children.
        os.kill(int(pid), number)
        assert run.process.poll() is None
        number = signal.SIGKILL
    os.kill(int(pid), number)
    status, said = run.end()
    assert (status, said) == (2, f"pagewire demo: error: the {role} process died (signal {number.value})\n")
    run.assert_nothing_left()


@pytest.mark.long
@pytest.mark.parametrize("numbers", list(itertools.permutations(HANDLED)), ids=str)
def test_further_signals_do_not_stop_the_end(place: Path, numbers: tuple[signal.Signals, ...]) -> None:
    run = run_demo(place, "serving", "--curve")
    status, said = run.end(*numbers, every_s=0.003)
    assert (status, said.count("\n")) == (128 + numbers[0], 1)
    run.assert_nothing_left()


@pytest.mark.slow
def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--requests", "2000", ignores=signal.SIGHUP)
    demo.signal(signal.SIGHUP)
    demo.signal(signal.SIGTERM)
    assert demo.end() == (143, "pagewire demo: interrupted by SIGTERM\n")
    assert_gone_soon(demo.pids)


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(number, marks=pytest.mark.ci) for number in (signal.SIGTERM, signal.SIGHUP))],
    ids=lambda number: number.name,
)
def test_a_replay_ends_with_one_line(tmp_path: Path, place: Path, number: signal.Signals) -> None:
    trace = tmp_path / "trace"
    trace.write_text("".join(f'{{"hash_ids": [{block}, {block + 1}]}}\n' for block in range(0, 200_000, 2)))
    run = Run(place, "replay", str(trace), "--host-blocks", "100")
    wait_for_work(run.process.pid, 1.5)
    status, said = run.end(number)
    assert (status, said) == (128 + number, f"pagewire replay: interrupted by {number.name}\n")
    run.assert_nothing_left()


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-m", "scheduler_adapters.service.program"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
time.sleep({wait})
{then}
"""


@pytest.mark.parametrize("wait", [0, 0.03, 0.3])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_ends_with_its_parent_from_its_first_moment_on(wait: float, stopped: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PARENT.format(wait=wait, then="time.sleep(60)" if stopped else "")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if stopped:
            time.sleep(wait)
            parent.kill()
    status, used = end_of(pid)
    assert status in (-signal.SIGKILL, PARENT_GONE), "the process was not told to end with its parent"
    assert used < wait + 0.8, "importing takes longer than this, so the process must end before it imports"


def end_of(pid: int) -> tuple[int, float]:
    """Waits for the end of a process whose parent has ended. Returns its exit status, and its processor time in
    seconds.
    """
    deadline = time.monotonic() + 60
    while True:
        # The process is now a child of this process, because `tests.conftest` adopts orphans.
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        assert time.monotonic() < deadline, f"process {pid} outlives its parent"
        time.sleep(0.005)


@pytest.mark.parametrize("number", HANDLED, ids=lambda number: number.name)
def test_a_signal_is_an_exception_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(interrupts.Interrupted) as raised, interrupts.raised():  # noqa: PT012  (the block is tested)
        try:
            signal.raise_signal(number)
        finally:
            for other in HANDLED:
                signal.raise_signal(other)  # The first signal is still being handled.
    assert (raised.value.signal, raised.value.status) == (number, 128 + number)
    assert signal.getsignal(number) is before


def test_a_signal_that_is_lost_can_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_ENDING_S", 0.0)
    with interrupts.raised():
        for _ in range(2):
            with pytest.raises(interrupts.Interrupted):
                signal.raise_signal(signal.SIGTERM)


class Named:
    """A descriptor. A signal interrupts it while its class is created, as may happen during the import of an
    enumeration.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_python_turns_into_another_error_still_ends_the_command() -> None:
    with pytest.raises(interrupts.Interrupted) as raised, interrupts.raised():
        type("Holder", (), {"named": Named()})
    assert raised.value.status == 130


def test_an_error_that_no_signal_has_caused_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="its own"), interrupts.raised():
        raise RuntimeError("its own") from ValueError("its cause")


class Finalized:
    """An object. A signal interrupts its finalizer, where Python discards exceptions."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def a_finalizer() -> None:
    Finalized()


def a_callback() -> None:
    watched = threading.Event()
    callback = weakref.ref(watched, lambda _: signal.raise_signal(signal.SIGTERM))
    del watched
    assert callback() is None


@pytest.mark.parametrize("runs", [a_finalizer, a_callback])
def test_a_signal_that_python_discards_still_ends_the_command(runs: Callable[[], None]) -> None:
    with pytest.raises(interrupts.Interrupted) as raised, interrupts.raised():  # noqa: PT012  (the block is tested)
        runs()
        time.sleep(20)
        pytest.fail("the signal was lost")
    assert raised.value.status == 143


@pytest.mark.parametrize("fails", [False, True])
def test_a_signal_that_is_held_acts_at_the_end_of_the_block(fails: bool) -> None:
    reached = []
    with interrupts.raised(), pytest.raises(interrupts.Interrupted):  # noqa: PT012  (the block is what is tested)
        with interrupts.held():
            signal.raise_signal(signal.SIGHUP)
            reached.append(1)
            if fails:
                raise ZeroDivisionError
        reached.append(2)
    assert reached == [1]


def test_other_threads_hold_nothing() -> None:
    reached = []

    def work() -> None:
        with interrupts.held():
            reached.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert reached == [1]
