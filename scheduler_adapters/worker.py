"""What a prefill or decode process does (`scheduler_adapters.program` starts it).

Its settings come as one line of JSON on standard input. The pipe stays open: its end means that the parent is gone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
import zmq

from kvcache.errors import KVCacheError
from scheduler_adapters import messages as msg
from scheduler_adapters.decode import DecodeScheduler
from scheduler_adapters.exchange import Exchange
from scheduler_adapters.hybrid import HybridKVCacheManager
from scheduler_adapters.loop import ServingLoop
from scheduler_adapters.parent import die_with_parent
from scheduler_adapters.prefill import PrefillScheduler
from scheduler_adapters.rooms import PrefillTimes
from scheduler_adapters.sockets import Context, Socket, bind_router, received, wait_for_any
from transfer.agent import Agent
from transfer.chaos import ChaosAgent, Rates
from transfer.side_channel import load_keyring

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from kvcache.manager import PagedKVCacheManager
    from transfer.metadata import MemoryType

_IDLE_MS = 1
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
        name: of the process.
        role: which scheduler it runs.
        front: endpoint of the parent, to connect to.
        listen: where a prefill process listens for decode processes.
        prefills: where the prefill processes listen, for a decode process.
        handshake: where the process tells peers of its engines.
        keyring: file of this process's keys (`transfer.side_channel`); empty for plain sockets.
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
    name: str = ""
    role: msg.Role = "prefill"
    front: str = ""
    listen: str = ""
    prefills: tuple[str, ...] = ()
    handshake: str = "tcp://127.0.0.1:0"
    keyring: str = ""


def build_loop(config: WorkerConfig) -> tuple[ServingLoop[PagedKVCacheManager], dict[str, str]]:
    """The loop of one process, and what must agree with its peers.

    Raises:
        InvalidParamsError, PoolTooSmallError, ModelLoadError: the settings cannot work.
    """
    from scheduler_adapters.hf import HFRunner, kv_params_of, load_model, manager_for  # noqa: PLC0415  (heavy)

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


def chaos_agents(seed: int, *, wrong_bytes: bool) -> Callable[[str, MemoryType], Agent]:
    """Agents that misbehave, each by a seed of its own. Bytes that go wrong silently only where they are compared."""
    seeds = itertools.count(seed)
    rates = Rates(short=0.05, corrupt=0.05) if wrong_bytes else Rates()
    return lambda name, memory_type: ChaosAgent(name, memory_type, seed=next(seeds), rates=rates)


def serve(config: WorkerConfig, context: Context, front: Socket) -> None:
    """Set everything up, say `Ready`, and serve until told to stop."""
    keyring = load_keyring(Path(config.keyring)) if config.keyring else None
    loop, compatibility = build_loop(config)
    exchange = Exchange(
        loop.manager,
        config.name,
        bind=config.handshake,
        compatibility=compatibility,
        verify=config.verify,
        agent=Agent if config.chaos is None else chaos_agents(config.chaos, wrong_bytes=config.verify),
        keyring=keyring,
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
                front,
                chunkwise=config.chunkwise,
                keyring=keyring,
            )
        front.send(msg.encode(msg.Ready(name=config.name)))
        _serve(scheduler, front)
    finally:
        exchange.close()
        loop.manager.close()


def _serve(scheduler: PrefillScheduler | DecodeScheduler, front: Socket) -> None:
    while True:
        for (data,) in received(front):
            match msg.decode(data):
                case msg.Stop():
                    return
                case msg.Ask():
                    front.send(msg.encode(scheduler.stats()))
                case msg.Submit() as submit if isinstance(scheduler, DecodeScheduler):
                    scheduler.submit(submit)
                case msg.Abort(request_id=request_id) if isinstance(scheduler, DecodeScheduler):
                    scheduler.abort(request_id)
                case _:
                    pass
        if not scheduler.poll():
            wait_for_any([front, *scheduler.sockets], _IDLE_MS)


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
        front.send(msg.encode(msg.Fatal(name=config.name, error=text)))
        return 1
    finally:
        context.destroy(linger=1000)
    return 0
