"""Prefill and decode schedulers in one process, which are polled in turns. The engines, the sockets and the model are
real.
"""

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import zmq

from kvcache.sizing import page_bytes
from scheduler_adapters.hf.runner import HFRunner, kv_params_of, manager_for, num_layers_of, state_bytes_of
from scheduler_adapters.loop import ModelRunner, ServingLoop
from scheduler_adapters.overlapped import LaunchingRunner, OverlappedLoop
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.decode import MAX_OPEN, DecodeScheduler
from scheduler_adapters.service.prefill import PrefillScheduler
from scheduler_adapters.service.requests import DecodeRequest, DecodeTimes, PrefillTimes
from scheduler_adapters.service.sockets import bind_router, received
from transfer.pull.exchange import PageExchange

NEW = 10
QUICK = {"heartbeat_s": 0.2, "dead_after_s": 1.0, "handshake_timeout_s": 5.0}

_numbers = itertools.count()


class Side(NamedTuple):
    """The configuration of the processes of one kind."""

    pages: int = 100
    page_size: int = 16
    tp: int = 1
    dp: int = 1
    count: int = 1
    rows: int = 4
    budget: int = 128
    groups: bool = False  # If true, each group of layers has its own block table.
    # Makes the runner of an overlapped loop. A plain loop has None.
    overlap: Callable[[ModelRunner], LaunchingRunner] | None = None
    params: Mapping[str, Any] = MappingProxyType({})  # Additional params of the KV cache.
    replaced: Mapping[str, Any] = MappingProxyType({})  # in these
    options: Mapping[str, Any] = MappingProxyType({})


DEFAULT = Side()


class Service:
    """Several prefill and decode schedulers, and a client connection to each decode scheduler."""

    def __init__(
        self,
        model: Any,
        directory: Path,
        prefill: Side = DEFAULT,
        decode: Side = DEFAULT,
        *,
        chunkwise: bool = True,
        lease_s: float = 10.0,
        times: DecodeTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_open: int = MAX_OPEN,
        trace: bool = False,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.model, self.directory = model, directory
        self.context: zmq.Context[Any] = zmq.Context()
        self.sides = {"prefill": prefill, "decode": decode}
        self.chunkwise, self.lease_s, self.times, self.clock = chunkwise, lease_s, times, clock
        self.max_open, self.trace = max_open, trace
        self.loops: dict[str, ServingLoop] = {}
        self.exchanges: dict[str, PageExchange] = {}
        self.prefills: dict[str, PrefillScheduler] = {}
        self.decodes: dict[str, DecodeScheduler] = {}
        self.routers: dict[str, Any] = {}
        self.clients: dict[str, Any] = {}
        self.frontends: dict[str, Any] = {}
        self.buried: list[ServingLoop] = []
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, msg.Tokens] = {}
        for number in range(prefill.count):
            self.start_prefill(f"p{number}")
        for number in range(decode.count):
            self.start_decode(f"d{number}")

    @property
    def prefill(self) -> PrefillScheduler:
        return self.prefills["p0"]

    @property
    def connected(self) -> bool:
        return any(prefill.welcome for prefill in self.decode.connections)

    @property
    def decode(self) -> DecodeScheduler:
        return self.decodes["d0"]

    def _start(self, name: str, side: Side) -> tuple[ServingLoop, PageExchange]:
        params = kv_params_of(
            self.model.config,
            page_size=side.page_size,
            n_devices=side.tp * side.dp,
            data_parallel_degree=side.dp,
            group_layers=side.groups,
            **side.params,
        )
        params = dataclasses.replace(params, **side.replaced)
        memory = side.pages * page_bytes(params, num_layers_of(self.model.config), side.page_size) * side.dp
        memory += state_bytes_of(self.model, side.tp, side.rows) * side.dp
        manager = manager_for(
            self.model,
            params,
            side.rows * side.dp,
            4096,
            ["cpu"] * params.n_devices,
            available_cache_memory=memory,
            **side.options,
        )
        if side.overlap is None:
            self.loops[name] = ServingLoop(manager, HFRunner(self.model, manager.states), side.budget)
        # The runner gets a copy of the model, because it switches the model's attention, perhaps in another thread.
        else:
            runner = side.overlap(HFRunner(copy.deepcopy(self.model), manager.states))
            self.loops[name] = OverlappedLoop(manager, runner, side.budget)
        self.exchanges[name] = PageExchange(
            manager, name, bind=f"ipc://{self.directory}/{name}.hand", replica_options={**QUICK, "timed": self.trace}
        )
        return self.loops[name], self.exchanges[name]

    def start_prefill(self, name: str) -> None:
        loop, exchange = self._start(name, self.sides["prefill"])
        router = self.routers[name] = bind_router(self.context, f"ipc://{self.directory}/{name}")
        self.prefills[name] = PrefillScheduler(
            name, loop, exchange, router, times=PrefillTimes(lease_s=self.lease_s), clock=self.clock
        )

    def start_decode(self, name: str) -> None:
        loop, exchange = self._start(name, self.sides["decode"])
        client, frontend = self.context.socket(zmq.PAIR), self.context.socket(zmq.PAIR)
        endpoint = f"inproc://frontend-{next(_numbers)}"  # With inproc sockets a message arrives as soon as it is sent.
        client.bind(endpoint)
        frontend.connect(endpoint)
        self.clients[name], self.frontends[name] = client, frontend
        prefills = [f"ipc://{self.directory}/p{number}" for number in range(self.sides["prefill"].count)]
        self.decodes[name] = DecodeScheduler(
            name,
            loop,
            exchange,
            self.context,
            prefills,
            frontend,
            max_open=self.max_open,
            chunkwise=self.chunkwise,
            times=self.times,
            clock=self.clock,
            trace=self.trace,
        )

    def stop_prefill(self, name: str) -> None:
        """Simulates the end of a prefill process: its sockets close, and its engines are removed."""
        del self.prefills[name]
        self.routers.pop(name).close()
        self._stop(name)

    def stop_decode(self, name: str) -> None:
        """Simulates the end of a decode process. Messages that its client has not read are lost."""
        self.decodes.pop(name).close()
        self.clients.pop(name).close()
        self.frontends.pop(name).close()
        self._stop(name)

    def _stop(self, name: str) -> None:
        self.loops[name].close()
        self.exchanges.pop(name).close()
        # A real process frees its memory at its end. This service keeps the loop, because a READ of freed memory would
        # be a different fault.
        self.buried.append(self.loops.pop(name))

    def close(self) -> None:
        for loop in self.loops.values():
            loop.close()
        for exchange in self.exchanges.values():
            exchange.close()
        for decode in self.decodes.values():
            decode.close()
        self.context.destroy(linger=0)

    # ---- driving it

    def submit(self, prompts: Sequence[Sequence[int]], new: int = NEW) -> None:
        decodes = list(self.decodes.values())
        for number, prompt in enumerate(prompts):
            self._submit(f"r{number}", prompt, new, decodes[number % len(decodes)])

    def submit_one(
        self, request_id: str, prompt: Sequence[int], new: int = NEW, decode: DecodeScheduler | None = None
    ) -> DecodeRequest:
        decode = decode or self.decode
        self._submit(request_id, prompt, new, decode)
        return decode._requests[request_id]

    def _submit(self, request_id: str, prompt: Sequence[int], new: int, decode: DecodeScheduler) -> None:
        self.tokens[request_id] = []
        self.ended.pop(request_id, None)
        decode.submit(msg.Submit(request_id=request_id, prompt=tuple(prompt), max_new_tokens=new))

    def poll(self) -> None:
        for scheduler in (*self.prefills.values(), *self.decodes.values()):
            scheduler.poll()
        self.collect()

    def collect(self) -> None:
        for client in self.clients.values():
            for (data,) in received(client):
                message = msg.decode(data)
                assert isinstance(message, msg.Tokens)
                assert message.request_id not in self.ended, "a token after the end"
                self.tokens.setdefault(message.request_id, []).extend(message.tokens)
                if message.finished:
                    self.ended[message.request_id] = message

    def until(
        self,
        condition: Callable[[], object],
        what: str,
        timeout_s: float = 30,
        poll: Callable[[], object] | None = None,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            (poll or self.poll)()
            self.collect()
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"

    def serve(self, prompts: Sequence[Sequence[int]], new: int = NEW) -> list[list[int]]:
        self.ended.clear()
        self.submit(prompts, new)
        self.until(lambda: len(self.ended) == len(prompts), "the last token")
        return [self.tokens[f"r{number}"] for number in range(len(prompts))]

    def assert_nothing_held(self) -> None:
        every = [*self.prefills.values(), *self.decodes.values()]
        loops = self.loops.values()
        self.until(
            lambda: not any(one.open_requests for one in every) and not any(loop.has_work for loop in loops),
            "the last notification",
        )
        assert [one.stats().pages_held for one in every] == [0] * len(every)
