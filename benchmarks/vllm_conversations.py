"""What do later turns of conversations find, and how soon do they answer, under real `vllm serve` processes?

Run it with `.venvs/vllm-serve/bin/python -m benchmarks.vllm_conversations`; `make test-engines` makes that environment.
24 conversations run at the same time. Each has 6 turns, and sends the next one as soon as the last was answered. The
prompt of a turn is the former prompt, the plain server's answer to it, and new tokens: 300 to 600 tokens in the first
turn, 1,050 to 3,000 in the last. Answers have 96 tokens. The model is a Llama of 8 layers with 512 channels and random
weights, in float32: a prompt of 3,000 tokens takes seconds to compute, and its 48 MB take some 50 ms to pull. Steps
have at most 512 tokens. Only the servers of one way run at a time. The settings:

- `1 + 1`: a prefill and a decode server. This program hands each turn over as the proxy of `tests.vllm_serve` does. It
  keeps nothing: it gives prefill the `kv_transfer_params` of the last answer.
- `2 equal`: two equal servers. Each turn goes to one of them, drawn by lot.

The ways:

- `ours`: our connector. Requests name their `kv_sources`, and a decode server lends a quarter of its blocks. Sources
  may take 2 s to answer, because the steps of a CPU are long.
- `theirs`: vLLM's NIXL connector as shipped, with `bidirectional_kv_xfer`. `theirs-ucx` is the same with the
  environment variables of `transfer.nixl.settings`. Equal servers get the former answer's params as a prefill server
  would. A server that gave them itself gets none, because it fails to load from itself.
- `plain`: no connector. In place of a pair, one server runs with two threads instead of one, and with a pool of twice
  the blocks, so it finds whatever it has computed. In `2 equal`, there are two servers as in the other ways.
- `plain-sticky`, only in `1 + 1`: two plain servers with one thread and one pool each. Every conversation stays at one,
  as with a router that knows them, so each turn finds all that can be found.

`found` is the number of prompt tokens that a turn did not compute, at the server that would compute them, and `pulled`
those of them that came from the other server. Times are milliseconds until the first token: the time of the whole
answer, without the time from its first to its last token, which the server reports. Engines and workers share a process
(`ONE_PROCESS` in `tests.vllm_serve.server`): otherwise, each engine spins on a core while its worker computes. An
answer is wrong if its tokens are not those of a plain server without a prefix cache. `held` is the number of blocks
that are still held 2 s after the last answer, and `held later` 40 s after it.

`--choices` asks whether pulling or computing was chosen rightly: see `benchmarks.prefix_peers`, which does the same for
our own service. Two equal servers run, and requests come one at a time. `--idle` measures the time until a server is
ready, alone on the machine, and then the processor time of idle servers that have served a request. The machine should
be otherwise idle.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.frame import Row, header, progress, table, write
from benchmarks.prefix_peers import CHOSEN, Heard, Round, rows_of
from benchmarks.prefix_worker import PULLED
from benchmarks.vllm_serve import percentiles, processor_seconds
from tests.vllm_serve.client import Answer, ask
from tests.vllm_serve.models import make_model
from tests.vllm_serve.proxy import for_a_reader
from tests.vllm_serve.server import OURS, THEIRS, Server, Settings
from transfer.nixl.settings import effective_settings

BLOCK, STEP = 32, 512  # tokens
PAIR, EQUAL = SETTINGS = ("1 + 1", "2 equal")
STICKY = "plain-sticky"
GOALS = {"theirs": 0.5, "plain": 0.7}
"""The largest share of another way's time until the first token that ours should take."""
ANSWER_S = 180.0
HELD_S, HELD_LATER_S = 2.0, 40.0
IDLE_S, STARTS = 20.0, 3
CHOICES = (64, 128, 256, 512, 1024, 2048, 3008)
"""Tokens of the heads for `--choices`."""
_END = 8  # tokens of a prompt after its head
_ASK_S = 2.0
_PULLED = "vllm:pagewire_peer_prefix_tokens_total"
_LOADED = "vllm:prompt_tokens_by_source_total external_kv_transfer"
_STATISTICS = (
    "ms percentiles of the n turns of a row; ratios of the percentiles of all turns after the first; medians of 3 "
    "starts; columns of the choices as in prefix_peers"
)
_BROKEN = (OSError, http.client.HTTPException, ValueError)
_ALPHABET = 256


class Scale(NamedTuple):
    """How much runs.

    Attributes:
        conversations: how many run at the same time.
        turns: turns of each.
        first: the least and the most tokens of a first prompt.
        growth: the least and the most tokens by which a prompt is longer than the former one.
        answer: tokens of an answer.
        model: a model of `tests.vllm_serve.models`.
        blocks: blocks of each server's pool. By default all conversations fit into it.
        rounds: rounds of each length for the choices.
        lengths: tokens of the heads for the choices.
    """

    conversations: int
    turns: int
    first: tuple[int, int]
    growth: tuple[int, int]
    answer: int
    model: str
    blocks: int
    rounds: int
    lengths: tuple[int, ...]


FULL = Scale(24, 6, (300, 600), (150, 480), 96, "deep-llama", 2560, 10, CHOICES)
QUICK = Scale(4, 2, (100, 200), (150, 300), 32, "llama", 512, 2, CHOICES[:4])


class Talk(NamedTuple):
    """A conversation: the tokens of its first prompt, and those that the user adds in each later turn."""

    first: list[int]
    added: list[list[int]]


class Turn(NamedTuple):
    """A prompt, and the right answer."""

    prompt: list[int]
    wanted: list[int]


class Told(NamedTuple):
    """The result of a turn.

    Attributes:
        turn: its number, from 1.
        prompt: tokens of its prompt.
        result: "right", "wrong" or "failed".
        first_ms: time until the first token, in milliseconds; 0 if it failed.
        found: prompt tokens that were not computed.
    """

    turn: int
    prompt: int
    result: str
    first_ms: float = 0.0
    found: int = 0


def talks_of(scale: Scale) -> list[Talk]:
    """Returns the conversations. They are the same in each run. Their lengths are spread evenly."""
    numbers, count = random.Random(44), scale.conversations  # noqa: S311 - the same for all
    firsts, growths = (_spread(low, high, count) for low, high in (scale.first, scale.growth))
    return [
        Talk(_drawn(numbers, first), [_drawn(numbers, growth - scale.answer) for _ in range(scale.turns - 1)])
        for first, growth in zip(firsts, growths, strict=True)
    ]


def _spread(low: int, high: int, count: int) -> list[int]:
    return [low + (high - low) * at // max(1, count - 1) for at in range(count)]


def server_of(conversation: int, turn: int, servers: int) -> int:
    """Returns which server gets a turn. The draw is the same for all ways, and knows nothing of the former turns."""
    return random.Random(f"{conversation} {turn}").randrange(servers)  # noqa: S311 - likewise


def _drawn(numbers: random.Random, count: int) -> list[int]:
    return [numbers.randrange(_ALPHABET) for _ in range(count)]


def base_of(folder: Path, scale: Scale) -> Settings:
    """Returns the settings of a plain server."""
    return Settings(
        make_model(folder, scale.model), block_size=BLOCK, blocks=scale.blocks, max_tokens=4096, chunk=STEP, extra="",
        connector="", more=("--enable-per-request-metrics", "--enable-prompt-tokens-details"),
    )  # fmt: skip


def answered(settings: Settings, folder: Path, talks: Sequence[Talk], tokens: int) -> list[list[Turn]]:
    """Returns the turns of each conversation, with the answers of plain servers that have no prefix cache."""
    plain = replace(settings, prefix_cache=False)

    def answer(at: int) -> list[Turn]:
        url, talk, found = servers[at % len(servers)].url, talks[at], list[Turn]()
        for number in range(len(talk.added) + 1):
            prompt = [*found[-1].prompt, *found[-1].wanted, *talk.added[number - 1]] if found else talk.first
            reply = ask(url, prompt, timeout=ANSWER_S, max_tokens=tokens)
            if len(reply.tokens) != tokens:
                raise RuntimeError(f"the plain server answered {reply.status} to turn {number} of {at}: {reply.body}")
            found.append(Turn(prompt, reply.tokens))
        return found

    servers = [Server(replace(plain, number=at), folder, f"reference-{at}") for at in range(2)]
    with running(servers), ThreadPoolExecutor(len(talks)) as pool:
        return list(pool.map(answer, range(len(talks))))


@contextmanager
def running(servers: Sequence[Server]) -> Generator[Sequence[Server]]:
    """Runs servers. They are ready when the body begins, and have ended after it."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            with suppress(AttributeError):  # it was not started
                server.stop()


def servers_of(way: str, setting: str, base: Settings, folder: Path, module: str = "") -> list[Server]:
    """Returns the servers of a way. `module` replaces the module of our connector."""
    if (way, setting) == ("plain", PAIR):
        server = Server(replace(base, blocks=2 * base.blocks), folder, "plain-1")
        server.env |= {"OMP_NUM_THREADS": "2"}
        return [server]
    if way.startswith("plain"):
        return [Server(replace(base, number=at), folder, f"{way}-2-{at}") for at in range(2)]
    connector: Mapping[str, Any] = OURS | ({"kv_connector_module_path": module} if module else {})
    extra: list[dict[str, Any]] = [{"ask_timeout": _ASK_S}, {"ask_timeout": _ASK_S, "lend": 0.25}]
    if way != "ours":
        connector, extra = THEIRS, [{"bidirectional_kv_xfer": True}] * 2
    roles = ("kv_producer", "kv_consumer") if setting == PAIR else ("kv_both", "kv_both")
    servers = [
        Server(
            replace(base, connector=json.dumps(connector), role=role, extra=json.dumps(more)),
            folder,
            f"{way}-{setting[0]}-{at}",
        )
        for at, (role, more) in enumerate(zip(roles, extra, strict=True))
    ]
    for server in servers:
        server.env |= effective_settings() if way == "theirs-ucx" else {}
    return servers


@dataclass(frozen=True)
class Fleet:
    """The servers of one way in one setting.

    Attributes:
        way: the way.
        setting: the setting.
        servers: the servers.
        answer: tokens of an answer.
    """

    way: str
    setting: str
    servers: Sequence[Server]
    answer: int

    @property
    def hands_over(self) -> bool:
        """Whether a prefill server computes what a decode server answers."""
        return self.setting == PAIR and not self.way.startswith("plain")

    @property
    def no_source(self) -> dict[str, Any] | None:
        """The params of a turn that has no former one."""
        if self.way == "ours":
            return {"kv_sources": []}
        return None if self.way.startswith("plain") else {}

    def ask(self, conversation: int, turn: int, prompt: Sequence[int], params: Any) -> tuple[Answer, int]:
        """Asks for a turn. Returns its answer, and the prompt tokens that were not computed."""
        if self.hands_over:
            prefill, decode = self.servers
            first = ask(prefill.url, prompt, timeout=ANSWER_S, max_tokens=1, kv_transfer_params=for_a_reader(params))
            if first.status != http.client.OK:
                return first, 0
            answer = ask(decode.url, prompt, timeout=ANSWER_S, max_tokens=self.answer, kv_transfer_params=first.params)
            return answer, cached_of(first)
        drawn = conversation if self.way == STICKY else server_of(conversation, turn, len(self.servers))
        server = self.servers[drawn % len(self.servers)]
        more = {} if params is None else {"kv_transfer_params": params}
        if self.way.startswith("theirs"):
            is_here = bool(params) and params["remote_port"] == server.side
            more["kv_transfer_params"] = for_a_reader(None if is_here else params)
        answer = ask(server.url, prompt, timeout=ANSWER_S, max_tokens=self.answer, **more)
        return answer, cached_of(answer)

    def talk(self, conversation: int, turns: Sequence[Turn]) -> list[Told]:
        """Holds a conversation. A turn that fails or has a wrong answer does not change the next one's prompt."""
        found, params = list[Told](), self.no_source
        for number, (prompt, wanted) in enumerate(turns, start=1):
            told = Told(number, len(prompt), "failed")
            start = time.perf_counter()
            with suppress(*_BROKEN):
                answer, cached = self.ask(conversation, number, prompt, params)
                took_ms = (time.perf_counter() - start) * 1e3
                if answer.status == http.client.OK:
                    result = "right" if answer.tokens == wanted else "wrong"
                    first_ms = took_ms - answer.body["metrics"]["generation_time_ms"]
                    told, params = Told(number, len(prompt), result, first_ms, cached), answer.params
                else:
                    progress(f"{self.way}, {self.setting}: turn {number} of {conversation}: {answer}")
            found.append(told)
        return found

    def pulled(self) -> int:
        """The prompt tokens that the servers have pulled so far, without those that prefill hands to decode."""
        pulls = self.servers[:1] if self.hands_over else self.servers
        name = _PULLED if self.way == "ours" else _LOADED
        count = 0
        for server in pulls:
            with suppress(*_BROKEN):  # a server that has ended tells nothing
                count += int(server.metrics().get(name, 0))
        return count

    def held(self) -> int:
        """The blocks that are held."""
        count = 0
        for server in self.servers:
            with suppress(*_BROKEN):  # a server that has ended holds none
                ask(server.url, [1], max_tokens=1, timeout=60)  # an idle engine does not update its figure
                count += round(server.usage * (server.settings.blocks - 1))
        return count


def cached_of(answer: Answer) -> int:
    """Returns how many tokens of its prompt a server has not computed."""
    details: dict[str, Any] = answer.body["usage"]["prompt_tokens_details"] or {}
    return int(details.get("cached_tokens") or 0)


def conversations(
    way: str, setting: str, base: Settings, folder: Path, every: Sequence[Sequence[Turn]]
) -> tuple[list[Row], list[Told]]:
    """Runs all conversations. Returns their rows and their turns."""
    with running(servers_of(way, setting, base, folder)) as servers:
        fleet = Fleet(way, setting, servers, len(every[0][0].wanted))
        for at in range(2 * len(servers)):  # makes first contacts
            fleet.talk(-1 - at, [Turn([at + 1] * 2 * BLOCK, [])] * 2)
        before, start = fleet.pulled(), time.perf_counter()
        with ThreadPoolExecutor(len(every)) as pool:
            found = [told for some in pool.map(fleet.talk, range(len(every)), every) for told in some]
        took_s, pulled = time.perf_counter() - start, fleet.pulled() - before
        time.sleep(HELD_S)
        held = later = fleet.held()
        until = start + took_s + HELD_LATER_S
        while later and time.perf_counter() < until:
            time.sleep(1)
            later = fleet.held()
    rows = turn_rows(way, setting, found)
    rows[-1] |= {"pulled": pulled, "held": held, "held later": later, "seconds": round(took_s, 1)}
    for row in rows:
        progress(str(row))
    return rows, found


def turn_rows(way: str, setting: str, found: Iterable[Told]) -> list[Row]:
    """Returns a row for each turn, and one for all."""
    by_turn: defaultdict[str, list[Told]] = defaultdict(list)
    for told in found:
        by_turn[str(told.turn)].append(told)
    by_turn["all"] = [told for some in list(by_turn.values()) for told in some]
    rows: list[Row] = []
    for turn, some in by_turn.items():
        times = [told.first_ms for told in some if told.result != "failed"]
        rows.append(
            {
                "setting": setting,
                "way": way,
                "turn": turn,
                "n": len(some),
                "prompt": sum(told.prompt for told in some),
                "found": sum(told.found for told in some),
                **(_p50_p90("first", times) if times else {}),
                **{result: sum(told.result == result for told in some) for result in ("wrong", "failed")},
            }
        )
    return rows


def _p50_p90(name: str, times: Sequence[float]) -> Row:
    return {label: ms for label, ms in percentiles(name, times).items() if "p99" not in label}


def ratios_of(every: Mapping[tuple[str, str], Sequence[Told]]) -> list[Row]:
    """Returns the times of our turns after the first, as shares of those of each other way in the same setting."""
    rows: list[Row] = []
    for (setting, way), theirs in every.items():
        ours = every.get((setting, "ours"))
        if way == "ours" or ours is None:
            continue
        mine, other = (
            _p50_p90("first", [told.first_ms for told in some if told.turn > 1 and told.result != "failed"] or [0.0])
            for some in (ours, theirs)
        )
        row: Row = {"setting": setting, "ratio": f"ours / {way}"}
        row |= {name: round(mine[name] / other[name], 3) for name in mine if other[name]}
        rows.append(row | {"goal": GOALS[way.partition("-")[0]]})
    return rows


def choices(base: Settings, folder: Path, scale: Scale) -> list[Row]:
    """Returns the rows of `prefix_peers` for two equal servers."""
    numbers = random.Random(0)  # noqa: S311 - likewise
    lengths = [length for length in scale.lengths for _ in range(scale.rounds)]
    numbers.shuffle(lengths)

    def one(server: Server, prompt: Sequence[int], params: dict[str, Any]) -> tuple[Heard, Any]:
        start = time.perf_counter()
        answer = ask(server.url, prompt, timeout=ANSWER_S, max_tokens=1, kv_transfer_params=params)
        if answer.status != http.client.OK:
            raise RuntimeError(f"{server.log.name}: {answer}")
        return Heard(time.perf_counter() - start, cached_of(answer)), answer.params

    def pair(length: int, more: dict[str, Any]) -> tuple[Heard, Heard]:
        """Sends two prompts with the same head, each to another server."""
        owner, other = numbers.sample(list(servers), 2)
        head = _drawn(numbers, length)
        first, params = one(owner, [*head, *_drawn(numbers, _END)], {"kv_sources": []})
        second, _ = one(other, [*head, *_drawn(numbers, _END)], {"kv_sources": params["kv_sources"], **more})
        return first, second

    found: list[Round] = []
    with running(servers_of("ours", EQUAL, base, folder, "benchmarks.vllm_directed")) as servers:
        for _ in range(4):  # makes first contacts
            pair(2 * BLOCK, {"way": PULLED})
        for length in lengths:
            times: defaultdict[str, list[float]] = defaultdict(list)
            chosen, outcome = Heard(0.0, 0), ""
            for way in numbers.sample([CHOSEN, PULLED], 2):
                first, second = pair(length, {"way": way})
                came = "pulled" if second.cached else "computed" if way == CHOSEN else "not lent"
                times["computed"].append(first.first_s)
                times[came].append(second.first_s)
                if way == CHOSEN:
                    chosen, outcome = second, came
            found.append(Round(length, chosen, outcome, dict(times)))
    return rows_of(EQUAL, found)


def idle(way: str, base: Settings, folder: Path) -> Row:
    """Returns the seconds until a server is ready, and what a way's idle servers use, as shares of a core."""
    ready_s: list[float] = []
    servers = servers_of(way, PAIR, base, folder)
    for number in range(STARTS):
        with running(servers[:1]):
            ready_s.append(time.monotonic() - servers[0].started)
        progress(f"{way}: start {number + 1}: {ready_s[-1]:.1f} s")
    with running(servers):
        Fleet(way, PAIR, servers, 2).talk(0, [Turn([7] * 300, [])] * 2)
        time.sleep(2)
        before = [processor_seconds(server) for server in servers]
        time.sleep(IDLE_S)
        shares = [(processor_seconds(one) - was) / IDLE_S for one, was in zip(servers, before, strict=True)]
    names = ("prefill", "decode") if len(servers) > 1 else ("plain",)
    used = {f"idle CPU {name}": round(share, 3) for name, share in zip(names, shares, strict=True)}
    return {"way": way, "starts": STARTS, "ready s": round(statistics.median(ready_s), 1), **used}


def parts(chosen: argparse.Namespace, scale: Scale, folder: Path) -> Iterator[tuple[str, list[Row]]]:
    """Runs what the options say. Yields a table's name and some of its rows, as soon as there are some."""
    base, ways = base_of(folder, scale), [way for way in chosen.ways.split(",") if way]
    settings = SETTINGS if chosen.only is None else (chosen.only,)
    if ways:
        turns = answered(base, folder, talks_of(scale), scale.answer)
        every: dict[tuple[str, str], list[Told]] = {}
        for setting, way in itertools.product(settings, ways):
            if (setting, way) == (EQUAL, STICKY):
                continue
            try:
                rows, every[setting, way] = conversations(way, setting, base, folder, turns)
                yield "conversations", rows
            except RuntimeError as error:  # a server did not start: the other ways run all the same
                progress(str(error))
        yield "ratios", ratios_of(every)
    if chosen.choices:
        yield "choices", choices(base, folder, scale)
    if chosen.idle:
        for way in ("ours", "theirs", "plain"):
            yield "idle", [idle(way, base, folder)]


def main() -> int:
    """Runs what the options say, prints the tables, and writes them. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_conversations", description=__doc__)
    parser.add_argument("--ways", default=f"ours,theirs,plain,{STICKY}", help="with commas between; '' for none")
    parser.add_argument("--only", choices=SETTINGS, help="one setting")
    parser.add_argument("--conversations", type=int, help="how many run at the same time (24)")
    parser.add_argument("--turns", type=int, help="turns of each conversation (6)")
    parser.add_argument("--blocks", type=int, help="blocks of each server's pool (2,560: all conversations fit)")
    parser.add_argument("--choices", action="store_true", help="also: is the quicker of pulling and computing chosen?")
    parser.add_argument("--idle", action="store_true", help="also: starts and idle servers")
    parser.add_argument("--quick", action="store_true", help="2 turns of 4 conversations, with a tiny model")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows, with the command and the code")
    chosen = parser.parse_args()
    if not Path(sys.executable).with_name("vllm").exists():
        progress(f"vllm_conversations: no vllm beside {sys.executable}: `make test-engines` makes .venvs/vllm-serve")
        return 2
    scale = QUICK if chosen.quick else FULL
    given = {name: getattr(chosen, name) for name in ("conversations", "turns", "blocks")}
    scale = scale._replace(**{name: value for name, value in given.items() if value})
    command = " ".join(["python -m benchmarks.vllm_conversations", *map(_quoted, sys.argv[1:])])
    tables: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in parts(chosen, scale, Path(folder)):
            tables[name] = [*tables.get(name, []), *rows]
            if chosen.json:  # the results so far
                every = [row for some in tables.values() for row in some]
                write(chosen.json, {**header(command, _STATISTICS), "rows": every})
    for name, rows in tables.items():
        print(f"\nvllm_conversations: {name}\n{table(rows)}", flush=True)
    return 0


def _quoted(argument: str) -> str:
    return argument if argument and " " not in argument else f"'{argument}'"


if __name__ == "__main__":
    sys.exit(main())
