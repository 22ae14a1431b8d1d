import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest

from scheduler_adapters.errors import ServiceError
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Fleet
from tests import forked
from tests.scheduler_adapters.leftovers import KILLED_IN_SHARED_MEMORY
from tests.scheduler_adapters.server_config import server_config
from tests.scheduler_adapters.serving import own_tokens

pytestmark = pytest.mark.slow

CONFIG = server_config()
CONFIGS = [msgspec.structs.replace(CONFIG, role=role) for role in ("prefill", "decode")]
PROMPT = tuple(range(60, 140))


def gone(pid: int) -> bool:
    """Returns whether there is no process with this id, or only a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def assert_gone_soon(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in pids if not gone(pid)]}"
        time.sleep(0.02)


def test_two_processes_serve_a_prompt_and_end_in_order(tiny_model: object) -> None:
    """The two processes are forks. `test_demo.py` starts new interpreters, as a user does."""
    tokens: list[int] = []
    with forked.fleets(), Fleet(CONFIGS) as fleet:
        pids = list(fleet.pids.values())
        assert len({os.getpid(), *pids}) == 3
        fleet.send("decode", msg.Submit(request_id="r", prompt=PROMPT, max_new_tokens=8))
        finished = None
        deadline = time.monotonic() + 30
        while not finished:
            assert time.monotonic() < deadline
            for message in fleet.receive(0.1):
                assert isinstance(message, msg.Tokens)
                tokens += message.tokens
                finished = message.finished
        stats = fleet.stats()
        processes = list(fleet._processes.values())
    assert tokens == own_tokens(tiny_model, PROMPT, 8)
    assert stats["decode"].pages_pulled == 5
    assert stats["prefill"].prompt_tokens == len(PROMPT)
    assert [process.returncode for process in processes] == [0, 0]
    assert_gone_soon(pids)


def test_idle_processes_sleep() -> None:
    """A loop that checks for work every millisecond would use a tenth of a core."""
    with forked.fleets(), Fleet(CONFIGS) as fleet:
        for name in ("first", "second"):  # Both processes are asleep when the second request arrives.
            fleet.send("decode", msg.Submit(request_id=name, prompt=PROMPT, max_new_tokens=8))
            finished, deadline = False, time.monotonic() + 30
            while not finished:
                assert time.monotonic() < deadline
                finished = any(isinstance(one, msg.Tokens) and one.finished for one in fleet.receive(0.1))
            while max(busy_shares(list(fleet.pids.values()), 1.0)) > 0.03:
                assert time.monotonic() < deadline, "an idle process goes on looking for work"
        stats = fleet.stats()
    assert [one.open_requests for one in stats.values()] == [0, 0]


def busy_shares(pids: list[int], seconds: float) -> list[float]:
    """Returns the fraction of these seconds during which each process, with its threads, has used a processor."""
    before = list(map(processor_ticks, pids))
    time.sleep(seconds)
    computed = [now - then for now, then in zip(map(processor_ticks, pids), before, strict=True)]
    return [ticks / os.sysconf("SC_CLK_TCK") / seconds for ticks in computed]


def processor_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize(
    ("number", "how"), [(signal.SIGKILL, r"died \(signal 9\)"), (signal.SIGTERM, r"ended \(status 0\)")]
)
def test_a_process_that_is_ended_is_named_and_takes_the_other_along(number: int, how: str) -> None:
    fleet = Fleet(CONFIGS)
    with forked.fleets(), pytest.raises(ServiceError, match=f"the prefill process {how}"):
        kill_and_listen(fleet, number)
    assert len(fleet.pids) == 2
    assert_gone_soon(list(fleet.pids.values()))


def kill_and_listen(fleet: Fleet, number: int) -> None:
    with fleet:
        os.kill(fleet.pids["prefill"], number)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            fleet.receive(0.05)


def test_a_process_that_cannot_start_says_why() -> None:
    fleet = Fleet([msgspec.structs.replace(config, cache_bytes=100) for config in CONFIGS])
    with forked.fleets(), pytest.raises(ServiceError, match="process failed: .*100"), fleet:
        pass
    assert_gone_soon(list(fleet.pids.values()))


def fill(fleet: Fleet) -> int:
    """Sends decode requests without reading the answers, until it accepts no more messages. Returns the number of
    requests.
    """
    for number in range(1_000_000):
        asked = msg.Submit(request_id=f"r{number}", prompt=(1, 2, 3), max_new_tokens=200, ignore_eos=True)
        try:
            fleet.send("decode", asked)
        except ServiceError as error:
            assert "the decode process has accepted no message for 0.5 s" in str(error)  # noqa: PT017  (it ends the loop)
            return number
    raise AssertionError("the decode process has accepted a million requests")


def test_unread_answers_do_not_keep_the_processes_from_ending() -> None:
    with forked.fleets(), Fleet(CONFIGS, send_timeout_s=0.5) as fleet:
        assert fill(fleet) > 1000
        fleet._send_timeout_s = 10.0  # On a busy machine it takes some time until the messages are read.
        processes = list(fleet._processes.values())
    assert [process.returncode for process in processes] == [0, 0]


def test_at_the_end_only_the_process_that_does_not_read_is_named() -> None:
    fleet = Fleet(CONFIGS, send_timeout_s=0.5)
    with forked.fleets(), pytest.raises(ServiceError, match="the decode process has accepted no message"):
        stop_and_end(fleet)
    assert_gone_soon(list(fleet.pids.values()))


def stop_and_end(fleet: Fleet) -> None:
    with fleet:
        os.kill(fleet.pids["decode"], signal.SIGSTOP)
        fill(fleet)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["prefill", "decode"])
@pytest.mark.parametrize("is_full", [False, True])
def test_a_process_that_has_died_unnoticed_is_named_at_the_end(name: str, is_full: bool) -> None:
    fleet = Fleet(CONFIGS, send_timeout_s=0.5)
    with forked.fleets(), pytest.raises(ServiceError, match=rf"the {name} process died \(signal 9\)"):
        kill_and_end(fleet, name, is_full=is_full)
    assert_gone_soon(list(fleet.pids.values()))


def kill_and_end(fleet: Fleet, name: str, *, is_full: bool) -> None:
    with fleet:
        if is_full:
            fill(fleet)
        os.kill(fleet.pids[name], signal.SIGKILL)
        deadline = time.monotonic() + 10
        while not fleet.has_ended(name):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_an_error_inside_the_with_block_ends_both_processes() -> None:
    fleet = Fleet(CONFIGS)
    with forked.fleets(), contextlib.suppress(ZeroDivisionError), fleet:
        raise ZeroDivisionError
    assert len(fleet.pids) == 2
    assert_gone_soon(list(fleet.pids.values()))


def test_a_server_that_is_killed_while_it_makes_shared_memory_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_POSIX_DIR", str(tmp_path))
    program = f"{KILLED_IN_SHARED_MEMORY}\nfrom scheduler_adapters.service.program import main\nmain()"
    fleet, left = Fleet(CONFIGS, (sys.executable, "-c", program)), list[Path]()
    monkeypatch.setattr(fleet, "_stop", lambda: (left.extend(tmp_path.rglob("ucx_shm_posix_*")), Fleet._stop(fleet)))
    with forked.fleets(), pytest.raises(ServiceError, match=rf"process died \(signal {int(signal.SIGXFSZ)}\)"), fleet:
        pass
    assert left, "the kernel killed no server while the file existed"
    assert not list(tmp_path.iterdir())
