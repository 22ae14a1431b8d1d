"""Ranks for tests, each with one worker, in this process or in child processes that serve one pair after another."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.forked import start
from tests.transfer.pair_model import JUNK, GroupSpec, Pair, RankCaches, Side, group_config, reach, worker_config
from transfer.connector.metadata import ConnectorMetadata, Progress, WorkerOutput
from transfer.connector.scheduler import NixlConnectorScheduler
from transfer.connector.worker import NixlConnectorWorker
from transfer.pull.rank import new_incarnation
from transfer.wire.prompt import Prompt


class RankHost:
    """One rank with its caches and its worker. Child processes run it."""

    def __init__(self) -> None:
        self.worker: NixlConnectorWorker | None = None
        self.caches: RankCaches | None = None

    def make(
        self, groups: tuple[GroupSpec, ...], side: Side, rank: int, engine_id: str, incarnation: str, options: dict
    ) -> bytes:
        self.close()
        self.place = (groups, side, rank)
        self.caches = RankCaches(groups, side, rank)
        self.worker = NixlConnectorWorker(worker_config(groups, side, rank, engine_id, incarnation, **options))
        if self.caches.names:
            (tensor,) = self.caches.tensors.values()
            self.worker.register_cross_layers_kv_caches(tensor, self.caches.names)
        else:
            self.worker.register_kv_caches(self.caches.tensors)
        return self.worker.get_handshake_metadata()

    def fill_source(self, pair: Pair) -> None:
        """Fills the source with junk, and the request's blocks with its tokens, up to the end of the last block."""
        self.caches.fill_all(JUNK)
        for number, spec in enumerate(pair.groups):
            config = group_config(spec, self.caches.side)
            size = config.block_size
            first = max(0, config.needed(pair.num_tokens) // size - 1)
            end = -(-pair.num_tokens // size) * size
            self.caches.write(number, pair.source_blocks[number][first:], first, (first * size, end))

    def compare(self, pair: Pair) -> list[str]:
        """Returns the differences of the whole cache from its expected content."""
        expected, allowed = RankCaches(*self.place), RankCaches(*self.place)
        for number, spec in enumerate(pair.groups):
            begin, needed, end = reach(pair, number)
            if pair.computed >= pair.num_tokens:
                continue
            config = group_config(spec, self.caches.side)
            blocks, first = pair.reader_blocks[number], begin // config.block_size
            expected.write(number, blocks, first, (needed, end))
            allowed.write(number, blocks, first, (begin, end))
            # A host buffer is copied back page by page, so all other elements of its pages become zeros.
            if self.caches.side.host_buffer and spec.kind != "mamba":
                whole = -(-pair.num_tokens // config.page_size) * config.page_size
                allowed.write(number, blocks, first, (end, whole), 0)
        return self.caches.differences(expected, allowed)

    def step(self, metadata: ConnectorMetadata) -> WorkerOutput:
        self.worker.save_kv_to_host(metadata)
        self.worker.start_load_kv(metadata)
        return self.worker.take_output()

    def stats(self) -> Any:
        return self.worker._thread.snapshot()

    def close(self) -> None:
        if self.worker is not None:
            self.worker.shutdown()
        self.worker = self.caches = None


class LocalRank:
    """A rank in this process."""

    def __init__(self) -> None:
        self.host = RankHost()

    def send(self, name: str, *args: object) -> None:
        self.result = getattr(self.host, name)(*args)

    def wait(self) -> Any:
        return self.result

    def stop(self) -> None:
        self.host.close()


class ChildRank:
    """A rank in its own process, which carries out one command after another."""

    def __init__(self) -> None:
        self.process, self.conn = start(_serve)

    def send(self, name: str, *args: object) -> None:
        self.conn.send((name, args))

    def wait(self, timeout: float = 60.0) -> Any:
        assert self.conn.poll(timeout), f"rank in process {self.process.pid} did not answer within {timeout} s"
        error, value = self.conn.recv()
        if error:
            raise RuntimeError(value)
        return value

    def stop(self) -> None:
        try:
            self.send("close")
            self.wait()
            self.conn.send(None)
            self.process.join(10)
        except (OSError, EOFError, AssertionError, RuntimeError):
            pass
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)
        self.conn.close()


def _serve(conn: Connection) -> None:
    host = RankHost()
    while True:
        try:
            command = conn.recv()
        except EOFError:
            os._exit(0)
        if command is None:
            return
        name, args = command
        try:
            conn.send((False, getattr(host, name)(*args)))
        except Exception:  # noqa: BLE001 -- whatever it is, the test gets to see it
            conn.send((True, traceback.format_exc()))


def children(count: int) -> list[ChildRank]:
    """Processes for ranks."""
    return [ChildRank() for _ in range(count)]


Rank = LocalRank | ChildRank


class EngineUnderTest:
    """The ranks of one engine, which step together, and the engine's scheduler in this process."""

    def __init__(
        self, ranks: Sequence[Rank], groups: tuple[GroupSpec, ...], side: Side, engine_id: str, **options: Any
    ) -> None:
        self.ranks = ranks
        incarnation = new_incarnation()
        for number, rank in enumerate(ranks):
            rank.send("make", groups, side, number, engine_id, incarnation, options)
        metadata = {number: rank.wait() for number, rank in enumerate(ranks)}
        self.scheduler = NixlConnectorScheduler(worker_config(groups, side, 0, engine_id, incarnation, **options))
        self.scheduler.set_handshake_metadata(metadata)
        self.sent: dict[str, str] = {}
        self.received: set[str] = set()
        self.failed: dict[str, str] = {}
        self.bad_blocks: set[int] = set()

    def call(self, name: str, *args: object) -> list[Any]:
        for rank in self.ranks:
            rank.send(name, *args)
        return [rank.wait() for rank in self.ranks]

    def step(self) -> list[Progress]:
        outputs = self.call("step", self.scheduler.build_metadata())
        found = [self.scheduler.update(rank, output) for rank, output in enumerate(outputs)]
        for progress in found:
            assert not set(progress.sent) & set(self.sent)
            assert not progress.received & self.received
            self.sent |= progress.sent
            self.received |= progress.received
            self.failed |= progress.failed
            self.bad_blocks |= progress.block_ids_with_errors
        return found

    def close(self) -> None:
        self.scheduler.close()
        self.call("close")


def run_until(done: Callable[[], object], *engines: EngineUnderTest, seconds: float = 30.0) -> None:
    """Steps engines in turn until a condition holds."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"nothing within {seconds} s: {[vars(one) for one in engines]}"
        for engine in engines:
            engine.step()
        time.sleep(5e-4)


def prompt_of(pair: Pair) -> Prompt:
    """Returns the tokens of a pair's request. The source has computed all of them."""
    return Prompt(range(pair.num_tokens))


def transfer(pair: Pair, source: EngineUnderTest, reader: EngineUnderTest, request_id: str = "r") -> None:
    """Transfers a pair's request from one engine to the other, until the reader has it and the source may free its
    blocks.
    """
    source.call("fill_source", pair)
    groups = [group_config(spec, pair.reader) for spec in pair.groups]
    if pair.source.host_buffer:
        source.scheduler.save(request_id, pair.source_blocks)
    source.scheduler.offer(request_id)
    run_until(lambda: source.scheduler.is_offered(request_id), source)
    params = source.scheduler.params(request_id, prompt_of(pair), pair.source_blocks, pair.num_tokens)
    wanted = reader.scheduler.read(request_id, params, prompt_of(pair))
    firsts = [reach(pair, number)[0] // group.block_size for number, group in enumerate(groups)]
    reader.scheduler.load(request_id, wanted, pair.reader_blocks, pair.num_tokens, pair.computed, first_blocks=firsts)
    silent = pair.computed >= pair.num_tokens
    run_until(lambda: request_id in source.sent and (silent or request_id in reader.received), source, reader)
