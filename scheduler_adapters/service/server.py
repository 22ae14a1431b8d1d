"""What a prefill or decode process does (`scheduler_adapters.service.program` starts it).

Its settings come as one line of JSON on standard input. The pipe stays open: its end means that the parent is gone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import signal
import sys
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
import zmq

from kvcache.errors import KVCacheError
from scheduler_adapters.errors import MessageError
from scheduler_adapters.hf.hybrid import HybridKVCacheManager
from scheduler_adapters.loop import ServingLoop
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.decode import MAX_OPEN, DecodeScheduler
from scheduler_adapters.service.front import MAX_UNREAD, Front
from scheduler_adapters.service.parent import die_with_parent
from scheduler_adapters.service.prefill import PrefillScheduler
from scheduler_adapters.service.requests import PrefillTimes
from scheduler_adapters.service.sockets import Context, Socket, bind_router, received, wait_for_any
from transfer.nixl.agent import Agent
from transfer.nixl.chaos import ChaosAgent, Rates
from transfer.pull.exchange import PageExchange
from transfer.wire.keys import load_keyring

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvcache.manager import PagedKVCacheManager
    from transfer.memory import MemoryType

_IDLE_MS = 1
_LAST_WORDS_MS = 1000
# A thread that computes in Python gives the lock up after this long: the transfer thread polls every millisecond.
_SWITCH_S = 2e-4


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is told.

    Attributes:
        model: model directory; None for the small Llama.
        seed: of the small Llama.
        page_size: tokens of a page.
        cache_bytes: memory for pages.
        max_seq_len: most tokens of a request.
        max_requests: rows: requests that hold pages at a time.
        token_budget: most tokens of one step.
        tp: shards that the heads are split over, all on `device`.
        dp: replicas, each with pages of its own.
        device: torch device of the model and its pages.
        threads: of torch.
        chunkwise: decode pulls pages while the rest of a prompt still runs.
        lease_s: seconds that a lease stands without a word of its reader.
        chaos: seed of an agent that misbehaves; None for one that does not.
        verify: what is pulled is compared with the source's page checks.
        max_unread: messages that the parent may leave unread; beyond that its requests fail.
        max_open: requests that the parent may have on their way; beyond that each further one is refused.
        name: of the process.
        role: which scheduler it runs.
        front: endpoint of the parent, to connect to.
        listen: where a prefill process listens for decode processes.
        prefills: where the prefill processes listen, for a decode process.
        handshake: where the process tells peers of its engines.
        keyring: file of this process's keys (`transfer.wire.keys`); empty for plain sockets.
        secret: shared by the fleet (`transfer.wire.secret`), for what engines tell each other, in place of a keyring;
            sources on other hosts are read from only with one of them.
    """

    model: str | None
    seed: int
    page_size: int
    cache_bytes: int
    max_seq_len: int
    max_requests: int
    token_budget: int
    tp: int
    device: str
    dp: int = 1
    threads: int = 1
    chunkwise: bool = True
    lease_s: float = 10.0
    chaos: int | None = None
    verify: bool = False
    max_unread: int = MAX_UNREAD
    max_open: int = MAX_OPEN
    name: str = ""
    role: msg.Role = "prefill"
    front: str = ""
    listen: str = ""
    prefills: tuple[str, ...] = ()
    handshake: str = "tcp://127.0.0.1:0"
    keyring: str = ""
    secret: str = ""


def build_loop(config: WorkerConfig) -> tuple[ServingLoop[PagedKVCacheManager], dict[str, str]]:
    """The loop of one process, and what must agree with its peers.

    Raises:
        InvalidParamsError, PoolTooSmallError, ModelLoadError: the settings cannot work.
    """
    from scheduler_adapters.hf.runner import HFRunner, kv_params_of, load_model, manager_for  # noqa: PLC0415  (heavy)

    model = load_model(config.model, config.seed, config.device)
    params = kv_params_of(
        model.config, page_size=config.page_size, n_devices=config.tp * config.dp, data_parallel_degree=config.dp
    )
    manager = manager_for(
        model,
        params,
        config.max_requests,
        config.max_seq_len,
        [config.device] * params.n_devices,
        available_cache_memory=config.cache_bytes,
    )
    states = manager.states if isinstance(manager, HybridKVCacheManager) else None
    return ServingLoop(manager, HFRunner(model, states), config.token_budget), {"model": model_name(model)}


def model_name(model: PreTrainedModel) -> str:
    """Names a model by its configuration and the first values of each of its weights: pages of another are no good."""
    # Where it was loaded from, and by which version, is no part of what its pages mean.
    config = {key: value for key, value in model.config.to_dict().items() if key[0] != "_" and "version" not in key}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in model.state_dict().items():
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(weight.detach().flatten()[:64].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class ChaosAgents:
    """Makes agents that misbehave, each by a seed of its own. Bytes go wrong silently only where they are compared."""

    def __init__(self, seed: int, *, wrong_bytes: bool) -> None:
        self._seeds = itertools.count(seed)
        # Each fault happens several times in forty requests.
        self._rates = Rates(refuse=0.04, drop=0.2, short=0.12 * wrong_bytes, corrupt=0.05 * wrong_bytes)
        self._made: list[ChaosAgent] = []

    def __call__(self, name: str, memory_type: MemoryType) -> Agent:
        """One more."""
        self._made.append(ChaosAgent(name, memory_type, seed=next(self._seeds), rates=self._rates))
        return self._made[-1]

    @property
    def faults(self) -> dict[str, int]:
        """How often each fault has happened, all agents together; 0 for one that has not."""
        total: Counter[str] = Counter(dict.fromkeys(self._rates.kinds, 0))
        for agent in self._made:
            total.update(agent.faults.copy())  # the transfer thread goes on counting
        return dict(total)


def serve(config: WorkerConfig, context: Context, socket: Socket) -> None:
    """Set everything up, say `Ready`, and serve until told to stop."""
    chaos = None if config.chaos is None else ChaosAgents(config.chaos, wrong_bytes=config.verify)
    keyring = load_keyring(Path(config.keyring)) if config.keyring else None
    loop, compatibility = build_loop(config)
    exchange = PageExchange(
        loop.manager,
        config.name,
        bind=config.handshake,
        compatibility=compatibility,
        verify=config.verify,
        agent=chaos or Agent,
        keyring=keyring,
        secret=config.secret,
    )
    try:
        scheduler: PrefillScheduler | DecodeScheduler
        if config.role == "prefill":
            router = bind_router(context, config.listen, keyring)
            scheduler = PrefillScheduler(
                config.name, loop, exchange, router, times=PrefillTimes(lease_s=config.lease_s)
            )
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
            )
        _serve(scheduler, socket, config.name, chaos)
    finally:
        exchange.close()
        loop.manager.close()


def _serve(scheduler: PrefillScheduler | DecodeScheduler, socket: Socket, name: str, chaos: ChaosAgents | None) -> None:
    front = scheduler.front if isinstance(scheduler, DecodeScheduler) else Front(socket)
    front.send(msg.Ready(name=name))
    while True:
        # A front that leaves its answers unread is not heard either: what it sends waits, until its own deadline.
        hears = [] if front.is_deaf else [socket]
        for frames in itertools.chain.from_iterable(map(received, hears)):
            try:
                message = msg.decode_frames(frames, msg.FromFront)
            except MessageError as error:
                front.send(msg.Rejected(reason=msg.clipped(str(error))))
                continue
            if isinstance(message, msg.Stop):
                return
            if isinstance(message, msg.Ask):
                faults = {} if chaos is None else chaos.faults
                front.send(msgspec.structs.replace(scheduler.stats(), faults=faults))
            elif isinstance(scheduler, DecodeScheduler):
                _take(scheduler, message)
        if isinstance(scheduler, PrefillScheduler):
            front.flush()
        if not scheduler.poll():
            wait_for_any([*hears, *scheduler.sockets], _IDLE_MS)


def _take(scheduler: DecodeScheduler, message: msg.AnyMessage) -> None:
    if isinstance(message, msg.Submit):
        scheduler.submit(message)
    elif isinstance(message, msg.Abort):
        scheduler.abort(message.request_id, message.serial)


def main() -> int:
    """Run one process; the exit status."""
    die_with_parent()
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and stops us in order
    sys.setswitchinterval(_SWITCH_S)
    torch.set_num_threads(config.threads)
    # The front has a context of its own, so that its last words are waited for. Keys are looked at in the process's.
    context: Context = zmq.Context()
    front = context.socket(zmq.DEALER)
    front.setsockopt(zmq.IDENTITY, config.name.encode())
    front.connect(config.front)
    try:
        serve(config, zmq.Context.instance(), front)
    except Exception as error:  # noqa: BLE001  (the parent reports it, whatever it is)
        traceback.print_exc()
        text = str(error) if isinstance(error, KVCacheError) else f"{type(error).__name__}: {error}"
        front.setsockopt(zmq.SNDTIMEO, _LAST_WORDS_MS)
        with suppress(zmq.Again):  # nobody reads: the exit status tells the parent as well
            front.send(msg.encode(msg.Fatal(name=config.name, error=text)))
        return 1
    finally:
        context.destroy(linger=1000)
    return 0
