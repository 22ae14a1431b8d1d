"""Does a fleet answer a real trace correctly while processes are killed and requests are cancelled?

`make fleet` runs two prefill and two decode processes with a small Llama and pages over NIXL. They serve 1,000 requests
of the scaled-down conversation trace (`fleet_trace`), at most 32 at a time. Every tenth request is cancelled at a
random time: in the queue (nothing has run), in prefill, in the pull or in decode. After a third of the requests one
busy prefill process is killed, and after two thirds one busy decode process. Each is restarted at once. A request must
end with the tokens of the model's own greedy `generate`. If it is cancelled or fails, it must have a stated reason, and
the tokens that it has got must be right. At the end no process may hold a page. The exit status is 0 only if all of
this holds, and 2 if there is no trace.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.fleet_client import Asked, Client
from benchmarks.fleet_trace import PAGE, TraceError, TraceRequest, ideal_hit_rate, read_requests
from benchmarks.fleet_worker import PHASES, Phase, Planned, Stamp, read_stamps, write_plan
from benchmarks.frame import Row, header, progress, table, write
from benchmarks.trace_replay import FOLDER, TRACES
from kvcache.errors import KVCacheError
from scheduler_adapters.hf.runner import is_rounding_tie, load_model, reference_tokens
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.fleet import Fleet
from scheduler_adapters.service.server import ServerConfig

PROGRAM = (sys.executable, "-m", "benchmarks.fleet_worker")
REQUESTS = 1000
CONCURRENCY = 32
CANCELLED = 0.1
WINDOW_S = 10.0  # in seconds, before and after a kill: the time in which gaps between tokens are measured
_WHOLE = ("eos", "length")
_ROUNDS = 8  # a cancellation is delayed by at most this many rounds of the decode process
_BUSY = 2  # a process is killed only if it has this many open requests
_CACHE_BYTES = 64 << 20  # 2,048 pages, a tenth of the trace's pages


class Killed(NamedTuple):
    """A killed process, the time of the kill by `time.monotonic`, and its open requests."""

    name: str
    at: float
    requests: int


class Run(NamedTuple):
    """The result of a run: its requests and kills, the counters of all processes, and the time stamps."""

    asked: list[Asked]
    planned: int
    kills: list[Killed]
    started: dict[str, float]
    stats: dict[str, msg.Stats]
    lost_stats: list[msg.Stats]
    stamps: dict[str, list[Stamp]]
    seconds: float
    settled_s: float


def configs(requests: list[TraceRequest]) -> list[ServerConfig]:
    """The settings of two processes of each kind, with room for the longest of these requests."""
    roles: tuple[msg.Role, ...] = ("prefill", "prefill", "decode", "decode")
    return [
        ServerConfig(
            model=None,
            seed=0,
            page_size=PAGE,
            cache_bytes=_CACHE_BYTES,
            max_seq_len=max(len(one.prompt) + one.new for one in requests),
            max_requests=CONCURRENCY // 2,
            token_budget=256,
            tp=1,
            device="cpu",
            name=f"{role}-{number % 2 + 1}",
            role=role,
        )
        for number, role in enumerate(roles)
    ]


def plan_of(requests: list[TraceRequest], rng: random.Random) -> dict[str, Planned]:
    """Chooses which requests to cancel, and in which phase. A request for a single token ends in prefill."""
    chosen = rng.sample(range(len(requests)), round(CANCELLED * len(requests)))
    plan: dict[str, Planned] = {}
    for number in chosen:
        phases = PHASES[: 4 if requests[number].new > 2 else 3 if requests[number].new == 2 else 2]
        phase: Phase = rng.choice(phases)
        # A pull takes one or two rounds, and decoding takes as many rounds as there are tokens.
        most = {"queue": _ROUNDS, "prefill": 2, "pull": 1, "decode": min(_ROUNDS, requests[number].new - 2)}[phase]
        plan[f"r{number}"] = Planned(phase, rng.randrange(max(1, most)))
    return plan


def run(requests: list[TraceRequest], seed: int) -> Run:
    """Serves the requests, with kills and cancellations chosen by the seed.

    Raises:
        ServiceError: a process died without being killed here, or the run makes no more progress.
    """
    rng = random.Random(seed)  # noqa: S311  (guards nothing)
    plan = plan_of(requests, rng)
    count = len(requests)
    due = [(count // 3, f"prefill-{rng.randrange(1, 3)}"), (2 * count // 3, f"decode-{rng.randrange(1, 3)}")]
    kills: list[Killed] = []
    with tempfile.TemporaryDirectory(prefix="pagewire-fleet-") as folder:
        write_plan(Path(folder), plan)
        with Fleet(configs(requests), (*PROGRAM, folder)) as fleet:
            client, start = Client(fleet), time.monotonic()
            while len(client.asked) < count or client.open:
                while len(client.asked) < count and len(client.open) < CONCURRENCY and client.decodes:
                    number = len(client.asked)
                    client.submit(f"r{number}", requests[number])
                client.hear(0.1)
                kills += kill_due(client, due, len(requests))
            seconds = time.monotonic() - start
            client.wait_until_whole()
            settled_s = client.settle()
            stamps = read_stamps(Path(folder))
    asked = list(client.asked.values())
    return Run(asked, len(plan), kills, client.started, client.stats, client.lost_stats, stamps, seconds, settled_s)


def kill_due(client: Client, due: list[tuple[int, str]], count: int) -> list[Killed]:
    """Kills the next process if enough requests have ended. Returns the killed process in a list.

    Each entry of `due` is a number of ended requests and the name of the process that is then killed. An idle process
    is killed later: when it is busy, or when a further eighth of all `count` requests has ended.
    """
    done = len(client.asked) - len(client.open)
    if not due or done < due[0][0]:
        return []
    after, name = due[0]
    client.count([name])
    held = client.stats[name].open_requests
    if held < _BUSY and done < after + count // 8:
        return []
    del due[0]
    progress(f"fleet: {name} is killed after {done} requests, with {held} of them open there")
    return [Killed(name, client.kill(name), held)]


# ---- the verdicts and figures of a run


def judge(model: Any, asked: list[Asked]) -> dict[str, str]:
    """Returns the verdict on each request.

    A verdict is "equal" for right tokens, "tie" for tokens that differ by rounding, or the fault.
    """
    known: dict[TraceRequest, list[int]] = {}
    verdicts: dict[str, str] = {}
    for one in asked:
        if one.request not in known:
            known[one.request] = reference_tokens(model, one.request.prompt, one.request.new)
        theirs = known[one.request]
        is_whole = one.finished in _WHOLE
        if not is_whole and one.finished != "cancelled" and not one.error:
            verdict = f"ended {one.finished!r}, and says not why"
        elif one.tokens == (theirs if is_whole else theirs[: len(one.tokens)]):
            verdict = "equal"
        elif is_rounding_tie(model, one.request.prompt, one.tokens, theirs):
            verdict = "tie"
        else:
            verdict = f"has {one.tokens}, the model's own are {theirs}"
        verdicts[one.request_id] = verdict
    return verdicts


def cancelled_in(stamps: list[Stamp]) -> str:
    """The phase in which a request was cancelled.

    Decode may count a request as queued that is already in prefill, so the stamps of the prefill process decide.
    """
    cancel = next(stamp for stamp in stamps if stamp.what.startswith("cancel "))
    phase = cancel.what.removeprefix("cancel ")
    begun = any(
        (stamp.role, stamp.what, stamp.attempt) == ("prefill", "leasing", cancel.attempt) and stamp.at < cancel.at
        for stamp in stamps
    )
    return "prefill" if phase == "queue" and begun else phase


def longest_gap(times: list[float], start: float, end: float) -> float:
    """Returns the length in seconds of the longest interval between `start` and `end` without any of the times."""
    marks = [start, *(at for at in sorted(times) if start < at < end), max(start, end)]
    return max(after - before for before, after in itertools.pairwise(marks))


def longest_wait(asked: list[Asked], start: float, end: float) -> float:
    """The longest time in seconds that an open request waited for a token between `start` and `end`."""
    return max(
        (
            after - before
            for one in asked
            for before, after in zip([one.submitted, *one.times], [*one.times, one.ended], strict=True)
            if before < end and after > start
        ),
        default=0.0,
    )


def silence_of(run: Run, kill: Killed) -> Row:
    """The longest gaps between tokens after a kill and, for comparison, before it."""
    times = [at for one in run.asked for at in one.times]
    lost = [one for one in run.asked if one.error.startswith("decode process") and one.ended == kill.at]
    others = [one for one in run.asked if one not in lost]
    first, last = min(times), max(one.ended for one in run.asked)
    before, after = (max(kill.at - WINDOW_S, first), kill.at), (kill.at, min(kill.at + WINDOW_S, last))
    return {
        "killed": kill.name,
        "silence_s": round(longest_gap(times, *after), 3),
        "silence_s_before": round(longest_gap(times, *before), 3),
        "longest_wait_s": round(longest_wait(others, *after), 3),
        "longest_wait_s_before": round(longest_wait(others, *before), 3),
        "serves_again_s": round(run.started[kill.name] - kill.at, 2),
        "requests_there": kill.requests,
        "requests_failed": len(lost),
    }


def attempts(stamps: list[Stamp]) -> int:
    """The number of attempts at a request."""
    return 1 + sum((stamp.role, stamp.what) == ("decode", "waiting") for stamp in stamps)


def figures(requests: list[TraceRequest], seed: int, run: Run, verdicts: dict[str, str]) -> Row:
    """The content of the JSON file."""
    wrong = [f"{name} {verdict}" for name, verdict in verdicts.items() if verdict not in ("equal", "tie")]
    every = [*run.lost_stats, *run.stats.values()]
    prompt_tokens = sum(one.prompt_tokens for one in every)
    pulled, reused = sum(one.pages_pulled for one in every), sum(one.pages_reused for one in every)
    reasons = Counter(one.error.replace(repr(one.request_id), "...") for one in run.asked if one.finished == "error")
    phases = Counter(cancelled_in(run.stamps[one.request_id]) for one in run.asked if one.finished == "cancelled")
    return {
        "seed": seed,
        "requests": len(requests),
        "prompt_tokens": sum(len(one.prompt) for one in requests),
        "new_tokens": sum(len(one.tokens) for one in run.asked),
        "equal": sum(one.finished in _WHOLE and verdicts[one.request_id] == "equal" for one in run.asked),
        "rounding_ties": sum(verdict == "tie" for verdict in verdicts.values()),
        "wrong": wrong,
        "cancellations_planned": run.planned,
        "cancelled": {phase: phases[phase] for phase in PHASES},
        "failed": dict(reasons),
        "retried": sum(attempts(stamps) > 1 for stamps in run.stamps.values()),
        "prefill_hit_rate": round(sum(one.cached_tokens for one in every) / max(1, prompt_tokens), 4),
        "decode_hit_rate": round(reused / max(1, reused + pulled), 4),
        "infinite_cache_hit_rate": round(ideal_hit_rate(requests), 4),
        "pages_pulled": pulled,
        "preemptions": sum(one.preemptions for one in every),
        "malformed": sum(one.malformed for one in every),
        "kills": [silence_of(run, kill) for kill in run.kills],
        "pages_held": sum(one.pages_held for one in run.stats.values()),
        "open_requests": sum(one.open_requests for one in run.stats.values()),
        "settled_s": round(run.settled_s, 2),
        "seconds": round(run.seconds, 1),
        "requests_per_s": round(len(requests) / run.seconds, 2),
    }


def is_good(found: Row) -> bool:
    """Whether all conditions of the module's docstring hold."""
    return not (found["wrong"] or found["pages_held"] or found["open_requests"])


def main() -> int:
    """Run, print, and write. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS, help=f"of the trace ({REQUESTS})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kills and cancellations (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and the machine")
    chosen = parser.parse_args()
    if chosen.requests < 3:
        parser.error(f"--requests is {chosen.requests}: at least 3 are needed, as two processes are killed")
    try:
        requests = read_requests(FOLDER / TRACES[0], chosen.requests)
    except TraceError as error:
        progress(f"fleet: {error}. The trace is no part of the project; PAGEWIRE_TRACES names a folder that has it")
        return 2
    torch.set_num_threads(1)
    try:
        ran = run(requests, chosen.seed)
    except KVCacheError as error:
        progress(f"fleet: {error}")
        return 1
    progress(f"fleet: {len(requests)} requests in {ran.seconds:.0f} s; comparing with the model's own tokens")
    found = figures(requests, chosen.seed, ran, judge(load_model(None), ran.asked))
    print(table([{"figure": key, "value": str(value)} for key, value in found.items()]))
    if chosen.json:
        command = f"python -m benchmarks.fleet --requests {chosen.requests} --seed {chosen.seed}"
        write(chosen.json, {**header(command, "one run; counts, and seconds as they were"), **found})
    return 0 if is_good(found) else 1


if __name__ == "__main__":
    sys.exit(main())
