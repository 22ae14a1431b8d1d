"""Metadata that no key vouches for: what it does to a process it does to one that nobody misses."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.transfer import fuzz_replies
from tests.transfer.replicas import TOKENS, Engine, run
from transfer.errors import HandshakeError
from transfer.memory import MemoryType
from transfer.nixl.trials import Trials
from transfer.pull.pull_state import PagesOfGroup, PullEvent
from transfer.pull.thread import TransferThread
from transfer.wire.handshake import EngineCard, HandshakeServer
from transfer.wire.messages import open_rank, sealed_rank

LOCAL, REMOTE = [1, 2], [4, 5]
WHOLE = [PagesOfGroup(LOCAL, REMOTE, (0, 2 * TOKENS))]


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(*args: Any, **options: Any) -> Engine:
        engines.append(Engine(*args, **{"key": b""} | options))
        return engines[-1]

    yield make
    for one in engines:
        one.close()


@pytest.fixture(scope="module")
def asking() -> Iterator[Trials]:
    """Trials that trust no voucher, as between hosts; their helper has started."""
    one = Trials(vouchers=False)
    one.start()
    yield one
    one.close()


@pytest.fixture
def trials(asking: Trials, monkeypatch: pytest.MonkeyPatch) -> Trials:
    """Those of this process."""
    monkeypatch.setattr(Trials, "shared", lambda: asking)
    return asking


def changed(data: bytes, change: Callable[[bytearray], None]) -> bytes:
    """A rank's metadata with NIXL's part of it changed, and sealed again as anybody can who has no key to use."""
    rank = open_rank(data)
    metadata = bytearray(rank.agent_metadata)
    change(metadata)
    return sealed_rank(msgspec.structs.replace(rank, agent_metadata=bytes(metadata)))


def any_bytes(rng: random.Random) -> Callable[[bytearray], None]:
    def change(metadata: bytearray) -> None:
        for _ in range(rng.randint(1, 4)):
            metadata[rng.randrange(len(metadata))] = rng.randrange(256)

    return change


def pull(reader: Engine, source: Any, key: str = "r") -> None:
    reader.replica.pull(key, source, 60.0)
    reader.replica.add_pages(key, WHOLE, last=True)


def settled(reader: Engine, *keys: str) -> Callable[[], bool]:
    return lambda: {*keys} <= {event.key for event in reader.pulls if event.safe}


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)])
def test_what_is_tried_and_found_good_is_read_from(engine: Any, trials: Trials, tp: tuple[int, int]) -> None:
    p, d = engine("p", tp[0]), engine("d", tp[1])
    passed = trials.counts["passed"]
    for key, slot in (("r", 0), ("s", 1)):
        pull(d, p.source(p.offer(key, slot)), key)
        run(p, d, until=settled(d, key), seconds=60)
        assert d.pulls[-1] == PullEvent(key, "", safe=True)
    assert np.array_equal(d.heads(LOCAL), p.heads(REMOTE))
    assert trials.counts["passed"] == passed + 1


@pytest.mark.long
def test_metadata_that_ends_a_process_ends_none_of_ours() -> None:
    """Bytes are changed until some end the process that tries them; other engines are read from meanwhile."""
    said: list[str] = []
    for seed in range(8):
        assert fuzz_replies.run(100, seed, said.append, vouchers=False) == []
        if "ended the process that tried it" in said[-1]:
            break
    assert "ended the process that tried it" in said[-1]
    assert "read from" in said[-1]


@pytest.mark.parametrize("change", [lambda data: data.append(0), any_bytes(random.Random(1))])
def test_what_nobody_on_this_host_vouches_for_contacts_nobody(
    engine: Any, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is in this very process, which would die of a contact with some of such bytes."""
    careful = Trials()
    monkeypatch.setattr(Trials, "shared", lambda: careful)
    p, d = engine("p"), engine("d")
    data = changed(p.card.ranks[0], change)
    with HandshakeServer([EngineCard("p", p.incarnation, (data,), p.card.compatibility)]) as liar:
        pull(d, p.source(p.offer())._replace(address=liar.endpoint))
        run(p, d, until=settled(d, "r"), seconds=60)
    assert d.pulls[-1].error.endswith(
        f"handshake with engine 'p' at {liar.endpoint}: its metadata is sealed with no key, and no process of this "
        "user on this host says that it is its own"
    )
    assert careful.counts == {"unvouched": 1}
    with pytest.raises(HandshakeError, match="no process of this user on this host"):
        d.replica.directory.add(liar.endpoint, [data])
    careful.close()


def test_what_its_own_agent_vouches_for_needs_no_trial(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Trials()
    monkeypatch.setattr(Trials, "shared", lambda: ours)
    p, d = engine("p", 2), engine("d")
    pull(d, p.source(p.offer()))
    run(p, d, until=settled(d, "r"), seconds=60)
    assert d.pulls[-1] == PullEvent("r", "", safe=True)
    assert ours.counts == {"vouched": 1}
    assert ours.pid is None


def test_where_agents_reach_other_hosts_nobody_can_be_asked_and_all_is_tried(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = changed(engine("p").card.ranks[0], lambda data: data.append(0))
    monkeypatch.setenv("UCX_TLS", "tcp")
    ours = Trials()
    attempt = ours.begin([open_rank(data)], MemoryType.DRAM)
    ours.close()
    assert attempt.verdict is None


@pytest.mark.usefixtures("trials")
def test_others_are_read_from_while_a_trial_hangs(engine: Any) -> None:
    p, d, stopped = engine("p"), engine("d"), engine("q", seed=9)
    pull(d, stopped.source(stopped.offer()), "hangs")
    pull(d, p.source(p.offer()))
    run(p, d, until=settled(d, "r"), seconds=60)
    assert [event.key for event in d.pulls] == ["r"]
    stopped.poll()
    run(stopped, d, until=settled(d, "hangs"), seconds=60)
    assert d.pulls[-1].error == ""


def test_a_caller_that_adds_an_engine_waits_for_its_trial_and_no_pull_does(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = Trials(trial_s=60, vouchers=False)
    monkeypatch.setattr(Trials, "shared", lambda: patient)
    p, d, stopped = engine("p"), engine("d"), engine("q", seed=9)
    thread = TransferThread(d.replica)
    with ThreadPoolExecutor(1) as caller:
        added = caller.submit(thread.add_engine, "tcp://127.0.0.1:9", [stopped.card.ranks[0]])
        while patient.pid is None:
            time.sleep(1e-3)
        thread.pull("r", p.source(p.offer()), WHOLE, 60.0)
        run(p, until=lambda: thread.events, seconds=60)
        assert thread.events.popleft() == PullEvent("r", "", safe=True)
        assert not added.done()
        run(stopped, until=added.done, seconds=60)
        assert added.result() == "q"
    thread.close()
    patient.close()


def test_a_trial_that_does_not_end_is_given_up(engine: Any) -> None:
    stopped = engine("q")
    short = Trials(trial_s=1, vouchers=False)
    rank = open_rank(stopped.card.ranks[0])
    assert short.run([rank], MemoryType.DRAM) == "it did not end in time"
    assert short.counts == {"late": 1}
    short.close()


def test_with_a_key_nothing_is_tried(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trials, "shared", lambda: pytest.fail("a trial with keys"))
    p, d = engine("p", key=b"k"), engine("d", key=b"k")
    pull(d, p.source(p.offer()))
    run(p, d, until=settled(d, "r"))
    assert d.pulls[-1].error == ""


def test_a_helper_that_was_ended_is_started_anew(engine: Any) -> None:
    p = engine("p")
    rank = open_rank(p.card.ranks[0])
    ours = Trials(vouchers=False)
    ours.start()
    attempt = ours.begin([rank], MemoryType.DRAM)
    first = ours.pid
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while attempt.verdict is None and time.monotonic() < deadline:
        ours.poll()
        p.poll()
        time.sleep(1e-3)
    assert attempt.verdict == ""
    assert ours.pid != first
    ours.close()


def test_a_helper_that_cannot_be_started_refuses(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    ours = Trials(vouchers=False)
    assert "cannot be started" in ours.run([open_rank(engine("p").card.ranks[0])], MemoryType.DRAM)


def test_the_helper_ends_with_its_parent() -> None:
    code = "import os, time; from transfer.nixl.trials import Trials; t = Trials.shared(); t.start()"
    code += "; print(t.pid, flush=True)"
    parent = subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(60)"], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    with parent:
        helper = int(parent.stdout.readline())
        assert Path(f"/proc/{helper}").exists()
        parent.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{helper}").exists() and "Z" not in Path(f"/proc/{helper}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


STARTER = """
import signal, time
from transfer.nixl.trials import Trials
trials = Trials()
trials.start()
print(trials.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("wait_s", [0.0, 0.1, 1.0])
def test_the_helper_ends_with_its_parent_from_its_first_moment_on(wait_s: float) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(wait_s)
        parent.kill()
        killed = time.monotonic()
    while is_there(pid):
        assert time.monotonic() - killed < 1.5, "what it imports takes longer"
        time.sleep(0.01)


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
