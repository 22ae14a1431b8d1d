"""The main program of a prefill or decode process (`scheduler_adapters.service.program` starts it).

The settings arrive as one line of JSON on standard input. The pipe then stays open, because its closing shows that the
parent has exited.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import zmq

from kvcache.endpoints.watch import ManagerWatch
from kvcache.errors import InvariantError, KVCacheError
from kvcache.manager import PagedKVCacheManager
from kvcache.params import KVEvents
from kvcache.watch.messages import Beside
from scheduler_adapters.errors import IllegalMoveError, MessageError
from scheduler_adapters.loop import ServingLoop
from scheduler_adapters.overlapped import OverlappedLoop, ThreadedRunner
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.decode import MAX_OPEN, DecodeScheduler
from scheduler_adapters.service.prefill import PrefillScheduler
from scheduler_adapters.service.requests import PrefillTimes
from scheduler_adapters.service.sockets import (
    LAST_WORDS_MS,
    MAX_UNREAD,
    Context,
    FrontendQueue,
    Socket,
    bind_router,
    join_frontend,
    received,
    wait_for_any,
)
from scheduler_adapters.service.weights import WeightsSwitch
from transfer.memory import MemoryType
from transfer.nixl.agent import Agent
from transfer.nixl.chaos import ChaosAgent, Rates
from transfer.pull.exchange import PageExchange
from transfer.watch import transfers_of
from transfer.wire.keys import Keyring, load_keyring
from transfer.wire.secret import read_secret

if TYPE_CHECKING:
    from scheduler_adapters.hf.weights import ModelWeights

# In milliseconds: how long the main loop sleeps if there is no message or event. It cannot sleep longer, because no
# socket wakes it when a deadline has passed.
_WAIT_MS = 1
# In milliseconds: how long the main loop sleeps in a process without requests. The process must wake up for signals and
# reconnections.
_IDLE_MS = 100
# In seconds: a Python thread releases the GIL after this time if another thread wants it. The time is short because the
# transfer thread has to poll every millisecond.
_SWITCH_S = 2e-4


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one process."""

    model: str | None  # model directory; None for the small Llama
    seed: int  # seed of the small Llama
    page_size: int  # in tokens
    cache_bytes: int  # memory for pages
    max_seq_len: int  # most tokens of a request
    max_requests: int  # requests that can hold pages at the same time
    token_budget: int  # most tokens of one step
    overlap: bool = False  # whether to plan a step while the model runs the previous one
    tp: int  # shards that the heads are split over, all on `device`
    device: str  # torch device of the model and its pages
    dp: int = 1  # number of replicas, each with its own pages
    group_layers: bool = True  # whether layers with a window or with chunks get block tables of their own
    threads: int = 1  # threads of torch
    chunkwise: bool = True  # whether a decode process pulls the first pages while the rest of a prompt is computed
    lease_s: float = 10.0  # in seconds: duration of a lease that its reader does not renew
    chaos: int | None = None  # seed for random transfer faults; None for no faults
    verify: bool = False  # whether to compare pulled pages with checksums of the source's pages
    # how many messages the frontend may leave unread; if there are more, the process's requests fail
    max_unread: int = MAX_UNREAD
    max_open: int = MAX_OPEN  # limit of open requests; any request beyond it is refused
    name: str = ""  # name of the process
    role: msg.Role = "prefill"  # which scheduler it runs
    frontend: str = ""  # endpoint of the frontend, to connect to
    listen: str = ""  # endpoint where a prefill process listens for decode processes
    prefills: tuple[str, ...] = ()  # endpoints of the prefill processes, for a decode process
    # Host on which the process publishes KV events; empty for none. These events contain prompts and answers in clear
    # text.
    kv_events: str = ""
    ready_s: float = 0.0  # seconds between two `Ready` messages to a frontend that tracks processes; 0 sends only one
    handshake: str = "tcp://127.0.0.1:0"  # endpoint at which peers ask for this process's engines
    keyring: str = ""  # file with this process's keys (`transfer.wire.keys`); empty for plain sockets
    # whether to create an OpenTelemetry span for each hand-over, if the process has a tracer provider
    trace: bool = False
    metrics: str = ""  # host:port of the Prometheus metrics; port 0 picks a free port; empty for none
    watch: str = ""  # endpoint where the process can be watched (`kvcache.watch`); empty for none
    # The fleet's secret (`transfer.wire.secret`), from which the keys of all sockets are derived; used instead of a
    # keyring. Reading from other hosts requires a secret or a keyring.
    secret: str = ""
    # hosts and networks that this process may read from, in addition to its own host
    allowed_peers: tuple[str, ...] = ()


def build_loop(config: ServerConfig) -> tuple[ServingLoop[PagedKVCacheManager], dict[str, str]]:
    """Returns the loop of one process, and the settings that its peers must share.

    The version of its manager's weights is the `model_name` of its model.

    Raises:
        InvalidParamsError, InvalidRequestError, PoolTooSmallError, ModelLoadError: the settings cannot work.
    """
    from scheduler_adapters.hf.runner import (  # noqa: PLC0415  (heavy)
        HFRunner,
        attend_over_pages,
        kv_params_of,
        load_model,
        manager_for,
    )
    from scheduler_adapters.hf.weights import architecture_name, model_name  # noqa: PLC0415

    model = load_model(config.model, config.seed, config.device)
    attend_over_pages(model)
    params = kv_params_of(
        model.config,
        page_size=config.page_size,
        enable_prefix_caching=True,  # the default is False for models with recurrent layers
        n_devices=config.tp * config.dp,
        data_parallel_degree=config.dp,
        group_layers=config.group_layers,
    )
    params = dataclasses.replace(params, weights=bytes.fromhex(model_name(model)))
    if config.kv_events:
        at = f"tcp://[{config.kv_events}]:0" if ":" in config.kv_events else f"tcp://{config.kv_events}:0"
        params = dataclasses.replace(params, kv_events=KVEvents(at, at))
    devices = [config.device] * params.n_devices
    sizes = config.max_requests, config.max_seq_len
    manager = manager_for(model, params, *sizes, devices, available_cache_memory=config.cache_bytes)
    runner = HFRunner(model, manager.states)
    loop = (
        OverlappedLoop(manager, ThreadedRunner(runner), config.token_budget)
        if config.overlap
        else ServingLoop(manager, runner, config.token_budget)
    )
    return loop, {"model": architecture_name(model)}


def weights_of(loop: ServingLoop[PagedKVCacheManager]) -> ModelWeights:
    """Returns the weights of the model that a loop of `build_loop` runs."""
    from scheduler_adapters.hf.weights import ModelWeights  # noqa: PLC0415

    runner: Any = loop.runner
    return ModelWeights(getattr(runner, "runner", runner).model, (loop.manager.weights or b"").hex())


class ChaosAgents:
    """Creates agents with random faults, each with its own seed.

    Faults that corrupt data silently are included only if pages are verified.
    """

    def __init__(self, seed: int, *, wrong_bytes: bool) -> None:
        self._seeds = itertools.count(seed)
        # At these rates, each fault happens several times in forty requests.
        self._rates = Rates(refuse=0.04, drop=0.2, short=0.12 * wrong_bytes, corrupt=0.05 * wrong_bytes)
        self._made: list[ChaosAgent] = []

    def __call__(self, name: str, memory_type: MemoryType) -> Agent:
        """Creates another agent."""
        self._made.append(ChaosAgent(name, memory_type, seed=next(self._seeds), rates=self._rates))
        return self._made[-1]

    @property
    def faults(self) -> dict[str, int]:
        """The injected faults by kind, summed over all agents; 0 for a kind that has not occurred."""
        total: Counter[str] = Counter(dict.fromkeys(self._rates.kinds, 0))
        for agent in self._made:
            total.update(agent.faults.copy())  # a copy, because the transfer thread keeps counting
        return dict(total)


def keys_of(keyring: str, secret: str) -> Keyring | None:
    """Returns the keys of a process: from a keyring file, or derived from a secret; None if both are empty.

    Raises:
        HandshakeError, InvalidEngineError: the file, or the secret, cannot be used.
    """
    if keyring:
        return load_keyring(Path(keyring))
    shared = read_secret(secret)
    return None if shared is None else shared.keyring


def serve(config: ServerConfig, context: Context, socket: Socket, told: DrainSignal) -> None:
    """Sets up the process, sends `Ready`, and serves until the process is told to stop or has drained."""
    chaos = None if config.chaos is None else ChaosAgents(config.chaos, wrong_bytes=config.verify)
    keyring = keys_of(config.keyring, config.secret)
    loop, compatibility = build_loop(config)
    manager = loop.manager
    exchange = PageExchange(
        manager,
        config.name,
        bind=config.handshake,
        compatibility=compatibility,
        verify=config.verify,
        agent=chaos or Agent,
        keyring=None if config.secret else keyring,
        secret=config.secret,
        replica_options={"timed": config.trace},
        allowed_peers=config.allowed_peers,
    )
    weights = weights_of(loop)
    ready = _ready(config, manager, exchange)
    # the loop closes first, so that a step that still runs ends before its pages are freed
    with closing(manager), closing(exchange), closing(loop):
        scheduler: PrefillScheduler | DecodeScheduler
        if config.role == "prefill":
            router, times = bind_router(context, config.listen, keyring), PrefillTimes(lease_s=config.lease_s)
            scheduler = PrefillScheduler(config.name, loop, exchange, router, times=times, weights=weights.name)
            ready = msgspec.structs.replace(ready, listen=router.address)
        else:
            scheduler = DecodeScheduler(
                config.name,
                loop,
                exchange,
                context,
                config.prefills,
                socket,
                max_unread=config.max_unread,
                max_open=config.max_open,
                chunkwise=config.chunkwise,
                keyring=keyring,
                trace=config.trace,
                weights=weights.name,
            )
        with (
            closing(WeightsSwitch(config.name, weights, manager, scheduler)) as switch,
            served_metrics(config, scheduler, loop, exchange) as metrics,
            watched_service(config.watch, scheduler, manager, exchange, keyring) as watch,
        ):
            ready = msgspec.structs.replace(ready, metrics=metrics, watch="" if watch is None else watch.address)
            _Rounds(scheduler, socket, Herald(ready, config.ready_s), switch, chaos, watch).run(told)


def _ready(config: ServerConfig, manager: PagedKVCacheManager, exchange: PageExchange) -> msg.Ready:
    """Returns the `Ready` message of this process."""
    events, replay = (manager.kv_event_endpoints or [("", None)])[0]
    return msg.Ready(
        name=config.name,
        role=config.role,
        incarnation=exchange.incarnation,
        max_tokens=min(config.max_seq_len, manager.longest_request + 1),  # the last token needs no room
        page_size=manager.page_size,
        kv_events=events,
        kv_replay=replay or "",
        pulse=exchange.address,
        engines=tuple(exchange.engine_id(replica) for replica in range(min(manager.num_replicas, 64))),
        hash_algorithm=manager.params.hash_algorithm,
        layer_groups=tuple(table.group for table in manager.layer_tables.tables),
        has_states=manager.params.states is not None,
        weights=(manager.weights or b"").hex(),
    )


def served_metrics(
    config: ServerConfig,
    scheduler: PrefillScheduler | DecodeScheduler,
    loop: ServingLoop[PagedKVCacheManager],
    exchange: PageExchange,
) -> AbstractContextManager[str]:
    """A `with` block in which the process's Prometheus metrics are served, if wanted. Yields their address, or "".

    Raises:
        ServiceError: the address cannot be bound.
    """
    if not config.metrics:
        return nullcontext("")
    from scheduler_adapters.service.prometheus import collectors, serve_metrics  # noqa: PLC0415  (an extra)

    made = collectors(scheduler, loop.manager, exchange, server=config.name, role=config.role)
    return serve_metrics(config.metrics, made)


def watched_service(
    endpoint: str,
    scheduler: PrefillScheduler | DecodeScheduler,
    manager: PagedKVCacheManager,
    exchange: PageExchange,
    keyring: Keyring | None,
) -> AbstractContextManager[ManagerWatch | None]:
    """Returns a context manager. Within its block, `pagewire top` can read this process at `endpoint`.

    The context manager yields a `ManagerWatch`, or None if `endpoint` is empty. The main loop must call
    `ManagerWatch.attend` in every round.
    """
    if not endpoint:
        return nullcontext()
    secure = None if keyring is None else keyring.secure_server
    beside = service_beside(scheduler, exchange)
    return closing(ManagerWatch(manager, endpoint, name=scheduler.name, secure=secure, beside=beside))


def service_beside(scheduler: PrefillScheduler | DecodeScheduler, exchange: PageExchange) -> Callable[[], Beside]:
    """Returns a function that reads a service process for `pagewire top`.

    The function reads the phases and totals of the scheduler, and the leases and pulls of the page exchange. The thread
    of `ManagerWatch` calls the function.
    """
    transfers = transfers_of(exchange)

    def read() -> Beside:
        stats, found = scheduler.counters(), transfers()
        told = {"running": stats.running, "queued": stats.waiting, "failed": stats.failed, "retries": stats.retries}
        figures = found.figures | {name: float(count) for name, count in told.items()}
        return found._replace(phases=scheduler.phases, figures=figures)

    return read


class DrainSignal:
    """Records that a signal has requested a drain.

    It is not a `threading.Event`, because a second signal during `Event.set` would deadlock.
    """

    drain = False

    def on_signal(self, _number: int, _frame: object) -> None:
        """Requests a drain."""
        self.drain = True


class Herald:
    """Sends `Ready` when the process starts, when something in it has changed, and every `ready_s` seconds."""

    def __init__(self, ready: msg.Ready, ready_s: float) -> None:
        self._ready = ready
        self._ready_s = ready_s
        self._due = 0.0

    def say(self, frontend: FrontendQueue, *, draining: bool, weights: str) -> None:
        """Sends `Ready` if it is due. The message is delayed while other messages to the frontend are queued."""
        if (draining, weights) != (self._ready.draining, self._ready.weights):
            self._ready, self._due = msgspec.structs.replace(self._ready, draining=draining, weights=weights), 0.0
        if (now := time.monotonic()) >= self._due and not frontend.is_behind:
            self._due = now + self._ready_s if self._ready_s else math.inf
            frontend.send(self._ready)


class _Rounds:
    """The main loop. It handles the frontend's messages and runs the scheduler until the process has to exit."""

    def __init__(
        self,
        scheduler: PrefillScheduler | DecodeScheduler,
        socket: Socket,
        herald: Herald,
        switch: WeightsSwitch,
        chaos: ChaosAgents | None,
        watch: ManagerWatch | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._decode = scheduler if isinstance(scheduler, DecodeScheduler) else None
        self._frontend = FrontendQueue(socket) if self._decode is None else self._decode.frontend
        self._socket = socket
        self._herald = herald
        self._switch = switch
        self._chaos = chaos
        self._watch = watch
        self._stopped = False

    def run(self, told: DrainSignal) -> None:
        """Serves until the frontend says `Stop`, or until the process has drained."""
        scheduler, frontend = self._scheduler, self._frontend
        while not self._stopped:
            if told.drain:
                scheduler.drain()
            self._switch.attend()
            self._herald.say(frontend, draining=scheduler.draining, weights=self._switch.name)
            if (loaded := self._switch.take_loaded()) is not None:
                frontend.send(loaded)
            # While the frontend leaves too many answers unread, its own messages are not read. They wait in the socket.
            hears = [] if frontend.is_deaf else [self._socket]
            for frames in itertools.chain.from_iterable(map(received, hears)):
                self._on_frames(frames)
            if self._decode is None:
                frontend.flush()
            if self._watch is not None:
                self._watch.attend()
            if scheduler.has_drained and not frontend.is_behind:
                frontend.send(msg.Left(stats=scheduler.stats()))
                return
            if not scheduler.poll() and not self._stopped:
                idle = scheduler.is_idle and not frontend.is_behind
                wait_for_any([*hears, *scheduler.sockets], _IDLE_MS if idle else _WAIT_MS)

    def _on_frames(self, frames: list[bytes]) -> None:
        decode = self._decode
        try:
            message = msg.decode_frames(frames, msg.FromFrontend)
        except MessageError as error:
            self._frontend.send(msg.Rejected(reason=msg.clipped(str(error))))
            return
        match message:
            case msg.Stop():
                self._stopped = True
            case msg.Drain():
                self._scheduler.drain()
            case msg.Ask():
                faults = {} if self._chaos is None else self._chaos.faults
                self._frontend.send(msgspec.structs.replace(self._scheduler.stats(), faults=faults))
            case msg.Load(model=model):
                self._switch.load(model)
            case msg.Switch(weights=weights):
                self._switch.switch(weights)
            case msg.Members() if decode is not None:
                decode.follow(message.prefills)
            case msg.Submit() if decode is not None:
                decode.submit(message)
            case msg.Abort() if decode is not None:
                decode.abort(message.request_id, message.serial)
            case _:
                pass  # only decode processes handle the remaining messages


def main() -> int:
    """Runs one process, whose parent is already watched. Returns the exit status."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerConfig)
    # Ctrl-C reaches the parent too, which then stops this process in order
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return run(config)
    except KVCacheError as error:
        print(" ".join(str(error).splitlines()), file=sys.stderr)  # noqa: T201  (the log; the parent reports its last line)
        return 1


def run(config: ServerConfig, draining: tuple[signal.Signals, ...] = (signal.SIGTERM,)) -> int:
    """Serves until the frontend says `Stop` or the process has drained. Each signal in `draining` requests a drain.

    Returns the exit status.

    Raises a `KVCacheError` for an expected failure. Any other exception, or an error that shows a bug in this package,
    prints a traceback and returns status 1. The frontend is told about the error in either case.
    """
    told = DrainSignal()
    for number in draining:
        signal.signal(number, told.on_signal)
    sys.setswitchinterval(_SWITCH_S)
    torch.set_num_threads(config.threads)
    # The frontend's socket has a separate ZMQ context, so that its last messages are flushed at the end. Sockets that
    # check the keys of their peers need `shared`, the context of the whole process.
    context: Context = zmq.Context()
    frontend = context.socket(zmq.DEALER)
    try:
        join_frontend(frontend, config.frontend, config.name, keys_of(config.keyring, config.secret))
        shared: Context = zmq.Context.instance()  # pyright: ignore[reportUnknownVariableType] -- untyped there
        serve(config, shared, frontend, told)
    except Exception as error:
        expected = isinstance(error, KVCacheError) and not isinstance(error, InvariantError | IllegalMoveError)
        text = str(error) if isinstance(error, KVCacheError) else f"{type(error).__name__}: {error}"
        frontend.setsockopt(zmq.SNDTIMEO, LAST_WORDS_MS)
        with suppress(zmq.Again):  # if the frontend does not read this, the exit status tells the parent
            frontend.send(msg.encode(msg.Fatal(name=config.name, error=text)))
        if expected:
            raise
        traceback.print_exc()
        return 1
    finally:
        context.destroy()
    return 0
