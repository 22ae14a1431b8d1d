"""The main program of a prefill or decode process: `python -m scheduler_adapters.worker`.

Its settings come as one line of JSON on standard input. The pipe stays open: its end means that the parent is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING

import msgspec
import torch
import zmq

from kvcache.errors import KVCacheError
from kvcache.manager import PagedKVCacheManager
from scheduler_adapters import messages as msg
from scheduler_adapters.disagg import DecodeServer, PrefillServer, received
from scheduler_adapters.loop import ServingLoop
from scheduler_adapters.transfer_thread import TransferThread
from transfer.engine import KVTransferEngine

if TYPE_CHECKING:
    from kvcache.params import KVCacheParams

_PR_SET_PDEATHSIG = 1
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
        device: torch device of the model and its pages.
        threads: of torch.
        role: which server it runs.
        front: endpoint of the parent, to connect to.
        prefill: endpoint of the prefill server: it binds there, decode connects.
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
    threads: int = 1
    role: msg.Role = "prefill"
    front: str = ""
    prefill: str = ""


def die_with_parent() -> None:
    """End this process when its parent ends, in whatever way. Called first, with the settings line read already.

    Standard input ends with the parent. On Linux the kernel also kills us, should Python be stuck.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        # Not through sys.stdin: its lock, held by a reading thread, would abort an orderly exit.
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(3)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def build_manager(config: WorkerConfig, params: KVCacheParams, num_layers: int) -> PagedKVCacheManager:
    """The manager of one process. Raises `InvalidParamsError` or `PoolTooSmallError` where the sizes cannot work."""
    return PagedKVCacheManager(
        params,
        config.max_requests,
        config.max_seq_len,
        num_layers,
        [config.device] * config.tp,
        available_cache_memory=config.cache_bytes,
    )


def serve(config: WorkerConfig, context: zmq.Context[zmq.Socket[bytes]], front: zmq.Socket[bytes]) -> None:
    """Set everything up, say `Ready`, and serve until told to stop."""
    from scheduler_adapters.hf import HFRunner, kv_params_of, load_model, num_layers_of  # noqa: PLC0415  (heavy)

    model = load_model(config.model, config.seed, config.device)
    params = kv_params_of(model.config, page_size=config.page_size, n_devices=config.tp)
    manager = build_manager(config, params, num_layers_of(model.config))
    loop = ServingLoop(manager, HFRunner(model), config.token_budget)
    pages = manager.total_num_pages + 1  # the null page is one of the tensor's
    thread = TransferThread(KVTransferEngine(config.role, manager.device_tensors, total_num_pages=pages))
    peer = context.socket(zmq.ROUTER if config.role == "prefill" else zmq.DEALER)
    try:
        if config.role == "prefill":
            peer.bind(config.prefill)
            server: PrefillServer | DecodeServer = PrefillServer(loop, thread, peer)
        else:
            peer.connect(config.prefill)
            server = DecodeServer(loop, thread, peer, front)
            while not server.connected:
                server.poll()
                peer.poll(_IDLE_MS)
        front.send(msg.encode(msg.Ready(role=config.role)))
        _serve(server, front, peer)
    finally:
        thread.close()
        manager.close()


def _serve(server: PrefillServer | DecodeServer, front: zmq.Socket[bytes], peer: zmq.Socket[bytes]) -> None:
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(peer, zmq.POLLIN)
    while True:
        for (data,) in received(front):
            match msg.decode(data):
                case msg.Stop():
                    return
                case msg.Ask():
                    front.send(msg.encode(server.stats()))
                case msg.Submit() as submit if isinstance(server, DecodeServer):
                    server.submit(submit)
                case _:
                    pass
        if not server.poll():
            poller.poll(_IDLE_MS)


def main() -> int:
    """Run one process; the exit status."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and stops us in order
    sys.setswitchinterval(_SWITCH_S)
    torch.set_num_threads(config.threads)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front = context.socket(zmq.DEALER)
    front.setsockopt(zmq.IDENTITY, config.role.encode())
    front.connect(config.front)
    try:
        serve(config, context, front)
    except Exception as error:  # noqa: BLE001  (the parent reports it, whatever it is)
        traceback.print_exc()
        text = str(error) if isinstance(error, KVCacheError) else f"{type(error).__name__}: {error}"
        front.send(msg.encode(msg.Fatal(role=config.role, error=text)))
        return 1
    finally:
        context.destroy(linger=1000)
    return 0


if __name__ == "__main__":
    sys.exit(main())
