"""One process of a disaggregated pair: SGLang's scheduler with its own event loop, and a substitute for the tokenizer.

The scheduler, its queues, its sockets, the rendezvous on HTTP, the model and its attention are SGLang's. A thread
replaces the tokenizer. It uses the scheduler's real socket, and exchanges JSON lines with the test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from tests.sglang_engine import stand_ins

stand_ins.install()
os.environ |= {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # With several ranks, compiling takes a minute.
}

import msgspec  # noqa: E402
import torch  # noqa: E402
import zmq  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402
from sglang.srt.managers.disagg_service import start_disagg_service  # noqa: E402
from sglang.srt.managers.io_struct import (  # noqa: E402
    AbortReq,
    BatchTokenIDOutput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    ShutdownReq,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
    sock_recv,
    sock_send,
    unwrap_from_pickle,
)
from sglang.srt.managers.kv_hints import decode_kv_hints_envelope  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.models import registry  # noqa: E402, F401  (imports every model, which takes seconds)
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import PortArgs, ServerArgs  # noqa: E402
from sglang.srt.utils.network import get_zmq_socket  # noqa: E402

from scheduler_adapters.pull_or_compute import PullOrCompute  # noqa: E402
from scheduler_adapters.sglang.weights import served_weights  # noqa: E402
from tests.sglang_engine.tokenized import tokenized  # noqa: E402
from transfer.nixl.agent import Agent  # noqa: E402

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tests.sglang_engine.pd_pair import Options

torch.set_num_threads(1)  # The number of threads is set before this process forks another process.
load_plugins()  # Every process of a server makes this call.
BACKEND = "pagewire"


def server_arguments(options: Options) -> ServerArgs:
    roles: dict[str, Any] = {
        "disaggregation_mode": options.role,
        "disaggregation_transfer_backend": BACKEND,
        "disaggregation_bootstrap_port": options.port,
        "num_reserved_decode_tokens": 16,
        # The only other choice is a host pool in pinned memory, which needs CUDA.
        "disaggregation_decode_retraction_backup": "cpu_tensor",
    }
    return ServerArgs(
        model_path=options.model,
        host="127.0.0.1",
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        skip_tokenizer_init=True,
        page_size=options.page_size,
        tp_size=options.tp,
        max_total_tokens=640,
        max_running_requests=8,
        chunked_prefill_size=64,
        **(roles if options.role != "null" else {}),
        **options.more,
    )


class Tokenizer:
    """The messages between SGLang's tokenizer manager and a scheduler, for prompts that are already tokens."""

    def __init__(self, ports: Any, connection: Connection) -> None:
        self._connection = connection
        self._one_at_a_time = threading.Lock()
        context = zmq.Context(1)
        self._heard = get_zmq_socket(context, zmq.PULL, ports.tokenizer_ipc_name, True)
        self._told = get_zmq_socket(context, zmq.PUSH, ports.scheduler_input_ipc_name, True)
        self.scheduler: Any = None
        self.rows = 0

    def run(self) -> None:
        threading.Thread(target=self._hear, daemon=True).start()
        with contextlib.suppress(EOFError):
            while True:
                asked = self._connection.recv()
                getattr(self, asked.pop("op"))(**asked)

    def say(self, **fields: Any) -> None:
        """Sends these fields to the test as a line of JSON."""
        with self._one_at_a_time:
            self._connection.send(fields)

    def _send(self, request: Any) -> None:
        sock_send(self._told, request)

    def _hear(self) -> None:
        while True:
            output = sock_recv(self._heard)
            if isinstance(output, AbortReq):
                self.say(
                    name=output.rid, tokens=[], finished=output.finished_reason or {"type": "abort", "message": ""}
                )
            elif isinstance(output, UpdateWeightFromDiskReqOutput):
                self.say(updated=output.message)
            elif isinstance(output, FlushCacheReqOutput):
                self.say(flushed=output.success)
            elif isinstance(output, BatchTokenIDOutput):
                infos: Any = unwrap_from_pickle(output.customized_info) or {}
                for place, name in enumerate(output.rids):
                    self.say(
                        name=name,
                        tokens=list(output.output_ids[place]) if output.output_ids else [],
                        finished=output.finished_reasons[place],
                        cached=output.cached_tokens[place],
                        sources=infos.get("kv_sources", {place: None})[place],
                    )

    def generate(
        self, name: str, prompt: list[int], new: int, room: int = 0, host: str = "", port: int = 0, **fields: Any
    ) -> None:
        pair = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room} if room else {}
        if "kv_hints" in fields:
            fields["kv_hints"] = decode_kv_hints_envelope(fields["kv_hints"])
        self._send(tokenized(name, prompt, new, **pair, **fields))

    def abort(self, name: str) -> None:
        self._send(AbortReq(rid=name))

    def update(self, model: str, version: str | None, flush: bool, between_chunks: bool) -> None:
        """Loads other weights, as SGLang's HTTP server would. Does so in the middle of a prompt if told."""
        while between_chunks and self.scheduler.chunked_req is None:
            time.sleep(0.001)
        self._send(
            UpdateWeightFromDiskReqInput(
                model_path=model, load_format="auto", weight_version=version, flush_cache=flush
            )
        )

    def flush(self) -> None:
        self._send(FlushCacheReqInput())

    def hold(self, on: bool) -> None:
        """Makes a finished READ look unfinished, until `hold` is turned off."""
        HELD["on"], HELD["reads"] = on, 0
        self.say(held=on)

    def reads(self) -> None:
        """Returns how often a held READ was checked."""
        self.say(reads=HELD["reads"])

    def usage(self) -> None:
        scheduler = self.scheduler
        allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
        slots = getattr(scheduler, "req_to_metadata_buffer_idx_allocator", None)
        manager = manager_of(scheduler)
        self.say(
            usage={
                "tokens": allocator.size - allocator.available_size() - cache.evictable_size(),
                "locked": cache.protected_size(),
                "rows": self.rows - scheduler.req_to_token_pool.available_size(),
                "metadata": slots.size - slots.available_size() if slots is not None else 0,
                "rooms": 0 if manager is None else open_rooms(manager),
                "states": 0 if manager is None else len(manager.request_status),
                "idle": int(not scheduler.is_fully_idle()),
            }
        )

    def exchange(self) -> None:
        """Returns how many pages were lent, what came of questions to peers, and how peers name this server."""
        exchange = self.scheduler.tree_cache.exchange
        said = {"source": msgspec.to_builtins(exchange.source), "compatibility": exchange.compatibility}
        sleeper = self.scheduler.idle_sleeper
        is_woken = sleeper is not None and exchange._bell.fileno() in sleeper.poller
        said |= {"weights": served_weights().text, "is_woken": is_woken}
        self.say(exchange=exchange.counts | said)

    def unmeasure(self) -> None:
        """Makes the server ask peers whatever it has measured: computing the small model is often quicker."""
        self.scheduler.tree_cache.exchange._peers.estimate = PullOrCompute()
        self.say(unmeasured=True)

    def phase(self, room: int) -> None:
        """Returns SGLang's own name for the state of a room. The result is empty if there is no state."""
        names = {value: name for name, value in vars(KVPoll).items() if isinstance(value, int)}
        self.say(phase=names.get(manager_of(self.scheduler).request_status.get(room, -1), ""))

    def stop(self) -> None:
        self._send(ShutdownReq())


HELD = {"on": False, "reads": 0}


def manager_of(scheduler: Any) -> Any:
    queue = scheduler.disagg_prefill_bootstrap_queue or scheduler.disagg_decode_prealloc_queue
    return None if queue is None else queue.kv_manager


def open_rooms(manager: Any) -> int:
    sides = [side for side in (manager.leases, manager.pulls) if side is not None]
    return sum(side.open_count for side in sides)


def hold_reads() -> None:
    """Lets a test hold READs. The duration of a READ is the only property of the transfer that tests change."""
    done, read = Agent.done, Agent.read

    def is_held() -> bool:
        HELD["reads"] += HELD["on"]
        return bool(HELD["on"])

    def held_read(agent: Agent, *args: Any) -> Any:
        peer, local, remote, kinds = args
        return agent.post("READ", peer, local, remote, b"", kinds)[0] if is_held() else read(agent, *args)

    Agent.done = lambda agent, handle: not is_held() and done(agent, handle)
    Agent.read = held_read


def main(options: Options, connection: Connection) -> None:
    """Runs one rank of a server until it gets the command to stop."""
    with open(options.log, "a") as log:  # noqa: PTH123
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ |= options.environment
    if options.tp > 1:  # SGLang needs to know the core of each rank.
        cores = sorted(os.sched_getaffinity(0))
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(cores[rank % len(cores)]) for rank in range(options.tp)
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    logging.getLogger("pagewire").setLevel(logging.INFO)  # SGLang has set the level of the others
    # On SIGUSR1 the process prints a traceback to its log. This shows why a process hangs.
    faulthandler.register(signal.SIGUSR1)
    arguments = server_arguments(options)
    ports = PortArgs(**options.ports) if options.ports else PortArgs.init_new(arguments)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=options.rank, dp_rank=None, gpu_id=options.rank))
    hold_reads()
    if options.rank:
        Scheduler(arguments, ports).run_event_loop()
        return
    if options.role == "prefill":
        start_disagg_service()  # In a server, the process of the tokenizer makes this call.
    tokenizer = Tokenizer(ports, connection)
    tokenizer.say(ports=dataclasses.asdict(ports))
    scheduler = tokenizer.scheduler = Scheduler(arguments, ports)
    tokenizer.rows = scheduler.req_to_token_pool.available_size()
    threading.Thread(target=tokenizer.run, daemon=True).start()
    tokenizer.say(ready=True)
    scheduler.run_event_loop()
    scheduler.tree_cache.release_host_resources()  # as SGLang does when a server ends
    manager = manager_of(scheduler)
    if manager is not None:
        manager.shutdown()
