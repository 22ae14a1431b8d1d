"""Kills, stops and restarts prefill and decode processes in each phase, and shows that the others go on.

`python -m tests.scheduler_adapters.kills [--runs 200] [--seed 0] [--json FILE]`

Two prefill and two decode processes serve requests. In each run one of them gets a fuse: in a given phase of a request,
at once or up to 5 ms later, it kills itself, or stops itself for longer than its leases last. A killed process is
restarted at once, or after the others have ended their requests; it listens where it listened before. A run passes if

- every request of the other processes ends within RECOVERY_S of the fault, and none waits for the victim for ever;
- every output equals the model's own, or its failure has a reason and its tokens so far are right;
- SETTLED_S after the last output no process holds anything, and `check()` finds nothing.

If the phase belongs to pages that one prefill process gets from the other (`kill_worker`), half of a run's requests
come after the other half, with the same prompts, at the other prefill process. Each run has its own salt, so that
nothing is cached from an earlier run.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.frame import header, write
from scheduler_adapters.hf.runner import load_model, reference_tokens
from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.requests import DECODE_MOVES, PREFILL_MOVES
from scheduler_adapters.service.server import ServerConfig
from tests.scheduler_adapters.client import Client
from transfer.engine.ports import available_port

LEASE_S = 1.0
STOPPED_S = 4.0
RECOVERY_S = 20.0
SETTLED_S = 20.0
REQUESTS = 12
CANCELLED = 0.15
NEW = 12
PROGRAM = (sys.executable, "-m", "tests.scheduler_adapters.kill_worker")
FETCHING, LENDING = ("fetching", "pulling"), ("asked", "lent")
"""The phases of a prefill process that reads pages of another prefill process, and the phases of the process that lends
them.
"""
PHASES = {
    "prefill": [phase for phase in (*PREFILL_MOVES, "pulling", *LENDING) if phase not in ("queued", "over")],
    "decode": [phase for phase in DECODE_MOVES if phase not in ("waiting", "over")],
}


class Fault(NamedTuple):
    """A fault: its kind, its victim, and its phase."""

    role: str
    phase: str
    # "kill" restarts the process after the other requests are done. "restart" restarts the process at once. "stop"
    # stops the process for a while.
    kind: str


FAULTS = [Fault(role, phase, kind) for role in PHASES for phase in PHASES[role] for kind in ("kill", "restart", "stop")]
FETCHED = [("prefill", phase) for phase in (*FETCHING, *LENDING)]


class Outcome(NamedTuple):
    """The result of one run, in seconds from the fault."""

    fault: Fault
    others_s: float
    settled_s: float
    failed: list[str]
    struck: bool


def configs() -> list[ServerConfig]:
    """Returns the configurations of two processes of each kind, at fixed TCP ports."""
    made: list[ServerConfig] = []
    for number, role in enumerate(("prefill", "prefill", "decode", "decode")):
        firsts = [20000 + 1000 * number + 500 * way for way in range(2)]
        at = [f"tcp://127.0.0.1:{available_port(first, first + 499)}" for first in firsts]
        made.append(
            ServerConfig(
                model=None,
                seed=0,
                page_size=16 if role == "prefill" else 32,
                cache_bytes=4 << 20,
                max_seq_len=512,
                max_requests=6,
                token_budget=64,
                tp=1 if role == "prefill" else 2,
                device="cpu",
                lease_s=LEASE_S,
                name=f"{role}-{number % 2}",
                role=role,  # type: ignore[arg-type]
                listen=at[0] if role == "prefill" else "",
                handshake=at[1],
                secret="no first contact takes longer than a lease",  # noqa: S106  (of this fleet alone)
            )
        )
    return made


class Range:
    """The fleet in which faults are caused, and its requests."""

    def __init__(self, client: Client, folder: Path, seed: int) -> None:
        self.client, self.fleet, self.folder = client, client.fleet, folder
        self.random = random.Random(seed)
        model = load_model(None)
        lengths = [self.random.randrange(20, 330) for _ in range(24)]
        self.prompts = [[self.random.randrange(256) for _ in range(length)] for length in lengths]
        self.expected = [reference_tokens(model, prompt, NEW) for prompt in self.prompts]
        self.served = 0
        self.long = [at for at, length in enumerate(lengths) if length > 128]

    def submit_twice(self, first: str, second: str) -> None:
        """Submits two rounds of the same requests. The first round goes to one prefill process. After it is served, the
        second round goes to the other prefill process.
        """
        prompts, salt = self.random.sample(self.long, REQUESTS // 2), f"salt {self.served}"
        for prefill in (first, second):
            for number, at in enumerate(prompts):
                prompt, expected, decode = self.prompts[at], self.expected[at], f"decode-{number % 2}"
                self.served += 1
                options = {"prefill": prefill, "cache_salt": salt}
                self.client.submit(f"r{self.served}", prompt, NEW, decode, expected, **options)
            if prefill == first:
                self.wait_for_all(time.monotonic() + RECOVERY_S)

    def introduce(self) -> None:
        """Serves requests until each decode process has used each prefill process. A restarted process is then known
        again.
        """
        for decode in ("decode-0", "decode-1"):
            for prefill in ("prefill-0", "prefill-1"):
                self.client.settle(SETTLED_S)
                before, deadline = self.client.stats[prefill].prompt_tokens, time.monotonic() + RECOVERY_S
                while self.client.stats[prefill].prompt_tokens == before:
                    assert time.monotonic() < deadline, f"{decode} has not asked {prefill}"
                    self.served += 1
                    self.client.submit(f"r{self.served}", [1, 2, 3], 1, decode, [], prefill=prefill)
                    self.wait_for_all(deadline)
                    self.client.settle(SETTLED_S)
        self.client.asked.clear()

    def submit(self) -> None:
        """Submits one round of requests, spread over the decode processes."""
        for number in range(REQUESTS):
            at, self.served = self.random.randrange(len(self.prompts)), self.served + 1
            decode = f"decode-{number % 2}"
            one = self.client.submit(f"r{self.served}", self.prompts[at], NEW, decode, self.expected[at])
            if self.random.random() < CANCELLED:
                self.client.aborts.append((one.submitted + self.random.uniform(0.0, 0.5), one.request_id))

    def run(self, fault: Fault) -> Outcome:
        """Makes one run, and asserts the conditions in the module's docstring."""
        fetched = (fault.role, fault.phase) in FETCHED
        if fetched:
            self.introduce()
        victim = f"{fault.role}-{self.random.randrange(2)}"
        delay = self.random.choice([0.0, 0.0, self.random.uniform(0.0, 0.005)])
        number = signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL
        fuse = self.folder / str(self.fleet.pids[victim])
        fuse.write_text(f"{fault.phase} {int(number)} {delay}")
        if number == signal.SIGKILL:
            self.fleet.expect_end(victim)
        if fetched:
            # One process has the pages, and the other process reads them.
            both = f"prefill-{1 - int(victim[-1])}", victim
            self.submit_twice(*(both if fault.phase in FETCHING else both[::-1]))
        else:
            self.submit()
        struck = self.wait_for_end_or_stop(victim, fuse)
        at = time.monotonic()
        if struck and fault.kind == "restart":
            self.restart(victim)
        if struck:
            self.wait_for_others(victim, at)
        others_s = max((one.ended - at for one in self.client.asked.values() if one.decode != victim), default=0.0)
        if struck and fault.kind == "kill":
            self.restart(victim)
        elif struck and fault.kind == "stop":
            self.let_go_on(victim, at)
        elif not struck:
            fuse.unlink(missing_ok=True)
            # No request has reached the phase of the fault, so the victim still runs and is ended here.
            if number == signal.SIGKILL:
                self.fleet.kill(victim)
                self.restart(victim)
        self.wait_for_all(time.monotonic() + RECOVERY_S)
        settled_s = self.client.settle(SETTLED_S)
        return self.judged(fault, others_s, settled_s, struck=struck)

    def wait_for_end_or_stop(self, victim: str, fuse: Path) -> bool:
        """Waits until the fault has hit the victim, or until all requests are served without a fault."""
        while self.client.open:
            self.client.hear(0.002)
            if not fuse.exists() and (self.fleet.has_ended(victim) or is_stopped(self.fleet.pids[victim])):
                return True
        return not fuse.exists()

    def restart(self, victim: str) -> None:
        """Restarts the victim at its old address. The victim's requests are lost."""
        while not self.fleet.has_ended(victim):
            time.sleep(0.001)
        self.client.give_up(victim, f"the process {victim} was killed")
        self.fleet.restart(victim)
        self.client.wait_ready(victim)

    def let_go_on(self, victim: str, since: float) -> None:
        """Continues a stopped victim after its leases have expired."""
        while time.monotonic() < since + STOPPED_S:
            self.client.hear(0.05)
        os.kill(self.fleet.pids[victim], signal.SIGCONT)

    def wait_for_others(self, victim: str, at: float) -> None:
        """Waits until every request that the victim does not decode has ended. Checks that this takes no longer than
        allowed.
        """
        others = [one for one in self.client.asked.values() if one.decode != victim]
        while not all(one.ended for one in others):
            self.client.hear(0.01)
            assert time.monotonic() < at + 2 * RECOVERY_S, f"{2 * RECOVERY_S} s after the fault: {self.client.open}"
        late = [one for one in others if one.ended > at + RECOVERY_S]
        assert not late, f"more than {RECOVERY_S} s after the fault: {late}"

    def wait_for_all(self, deadline: float) -> None:
        """Waits until every request has ended."""
        while self.client.open:
            self.client.hear(0.01)
            assert time.monotonic() < deadline, f"{RECOVERY_S} s after all was well again: {self.client.open}"

    def judged(self, fault: Fault, others_s: float, settled_s: float, *, struck: bool) -> Outcome:
        """Checks that every output is right, and returns the outcome."""
        every = list(self.client.asked.values())
        wrong = [one for one in every if not one.is_right]
        assert not wrong, f"wrong: {wrong}"
        self.client.asked.clear()
        failed = [one.error for one in every if one.finished == "error"]
        return Outcome(fault, max(0.0, others_s), settled_s, failed, struck)


def is_stopped(pid: int) -> bool:
    """Returns whether a signal has stopped a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def shoot(
    runs: int, seed: int, say: Callable[[str], None] = lambda _line: None, faults: Sequence[Fault] = tuple(FAULTS)
) -> list[Outcome]:
    """Makes `runs` runs. The faults take turns, in an order that follows from the seed."""
    torch.set_num_threads(1)
    order = random.Random(seed)
    queue: list[Fault] = []
    outcomes: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory(prefix="pagewire-fuses-") as folder,
        Fleet(configs(), (*PROGRAM, folder)) as fleet,
    ):
        shooting = Range(Client(fleet), Path(folder), seed)
        while len(outcomes) < runs:
            queue = queue or order.sample(faults, len(faults))
            outcomes.append(shooting.run(queue.pop()))
            say(line_of(len(outcomes), outcomes[-1]))
    return outcomes


def line_of(number: int, outcome: Outcome) -> str:
    """Returns one line about one run."""
    fault = outcome.fault
    what = f"run {number}: {fault.role} in {fault.phase!r}, {fault.kind}"
    if not outcome.struck:
        return f"{what}: no request came into that phase there"
    reasons = "; ".join(sorted({reason[:100] for reason in outcome.failed}))
    return (
        f"{what}: the others done after {outcome.others_s:.2f} s, nothing held {outcome.settled_s:.2f} s after the "
        f"last request; {len(outcome.failed)} failed {reasons}"
    )


def summary(outcomes: list[Outcome]) -> list[dict[str, object]]:
    """Returns a table with a row for each kind of fault."""
    rows: list[dict[str, object]] = []
    for role in PHASES:
        for kind in ("kill", "restart", "stop"):
            some = [one for one in outcomes if (one.fault.role, one.fault.kind) == (role, kind) and one.struck]
            rows.append(
                {
                    "victim": role,
                    "fault": kind,
                    "runs": len(some),
                    "phases": len({one.fault.phase for one in some}),
                    "others_s_max": round(max((one.others_s for one in some), default=0.0), 2),
                    "settled_s_max": round(max((one.settled_s for one in some), default=0.0), 2),
                    "failed": sum(len(one.failed) for one in some),
                    "requests": len(some) * REQUESTS,
                }
            )
    return rows


def main() -> int:
    """Makes the runs, and prints the results. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.scheduler_adapters.kills", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--fetching", action="store_true", help="only pages that a prefill process has from the other")
    chosen = parser.parse_args()
    faults = [one for one in FAULTS if not chosen.fetching or (one.role, one.phase) in FETCHED]
    start = time.monotonic()
    outcomes = shoot(chosen.runs, chosen.seed, lambda line: print(line, flush=True), faults)  # noqa: T201
    rows = summary(outcomes)
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))  # noqa: T201
    struck = sum(one.struck for one in outcomes)
    print(f"{len(outcomes)} runs, {struck} struck, seed {chosen.seed}, {time.monotonic() - start:.0f} s")  # noqa: T201
    if chosen.json:
        command = f"python -m tests.scheduler_adapters.kills --runs {chosen.runs} --seed {chosen.seed}"
        head = header(command, "counts; columns *_max: the most of the runs of a row")
        write(chosen.json, {**head, "struck": struck, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
