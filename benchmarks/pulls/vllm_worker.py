"""vLLM's NixlConnector between two processes, on blocks of a chosen size. Runs in the environment of vLLM.

`python vllm_worker.py SCRIPTS LAYERS,HEADS,HEAD_DIM,BLOCKS,POOL ...` pulls `BLOCKS` random blocks of 16 tokens from a
pool of `POOL` blocks. It uses both connectors' real workers, and prints a JSON row for each argument. `SCRIPTS` is the
folder of the peers' scripts. One of them creates a vLLM engine on a machine without a GPU. This file imports no code of
ours.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from typing import Any

import numpy as np

_ROUNDS = 24  # about as many samples as for ours, because more samples would give lower minima
_TIMEOUT_S = 60


def demo_of(scripts: str) -> Any:
    """Imports the script that creates engines. The import chooses the platform and writes a model's configuration."""
    if scripts not in sys.path:
        sys.path.insert(0, scripts)
    import vllm_nixl_cpu_demo  # noqa: PLC0415

    return vllm_nixl_cpu_demo


def engine(demo: Any, role: str, sizes: tuple[int, ...]) -> Any:
    """A vLLM engine: scheduler, connector and worker.

    `sizes` has layers, heads, head_dim, blocks, and blocks of the pool.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    # undoes vLLM's pinning to one core, because both processes would share that core
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    demo.L, demo.H, demo.DH = sizes[:3]
    if threads := os.environ.get("PAGEWIRE_VLLM_NIXL_THREADS"):
        configure = demo.d.vcfg
        demo.d.vcfg = lambda *given, **named: configure(*given, **named, extra={"num_threads": int(threads)})
    demo.PORT[0] = port - 10  # the script adds 10 for each engine
    return demo.NixlEngine(role, sizes[4])


def produce(pipe: Any, scripts: str, model: str, sizes: tuple[int, ...]) -> None:
    """Runs the source: fills its blocks, sends its address, and polls."""
    demo = demo_of(scripts)
    demo.d.MODEL = model  # the two sides also compare this path
    made = engine(demo, "kv_producer", sizes)
    for tensor in made.kv.values():
        tensor.fill_(1)
    worker = made.w.connector_worker
    pipe.send((os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"], worker.engine_id))
    while not pipe.poll(1e-3):
        worker.get_transfer_results()
    made.w.shutdown()
    made.s.connector.shutdown()


def pull(worker: Any, name: str, params: dict[str, Any], ids: list[list[int]]) -> tuple[float, float]:
    """Returns the microseconds of one pull, and of the call that begins the pull."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata  # noqa: PLC0415

    metadata = NixlConnectorMetadata()
    told = {**params, "remote_request_id": name, "remote_block_ids": (ids[1],)}
    metadata.add_new_req_to_recv(name, (ids[0],), told, awaiting_kvs=True)
    start = time.perf_counter_ns()
    worker.start_load_kv(metadata)
    begun = time.perf_counter_ns()
    end = time.monotonic() + _TIMEOUT_S
    while True:
        if name not in worker._recving_transfers:  # noqa: SLF001 - it tells nobody
            # after a handshake, vLLM begins the READ only in the call of the next step
            worker.start_load_kv(NixlConnectorMetadata())
        results = worker.get_transfer_results()
        if name in results.finished_recving:
            break
        if time.monotonic() > end:
            raise TimeoutError(name)
    done = time.perf_counter_ns()
    if results.failed_recving:
        raise RuntimeError(f"vLLM could not read {name}")
    return (done - start) / 1e3, (begun - start) / 1e3


def consume(scripts: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """One row."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    demo = demo_of(scripts)
    child = context.Process(target=produce, args=(theirs, scripts, demo.d.MODEL, sizes), daemon=True)
    child.start()
    theirs.close()  # without this call, the parent would never notice that the process has died
    port, engine_id = ours.recv()
    made = engine(demo, "kv_consumer", sizes)
    for tensor in made.kv.values():
        tensor.fill_(2)  # writes to the pages once, because pages that were never written are slower
    params = {
        "remote_engine_id": engine_id,
        "remote_host": "127.0.0.1",
        "remote_port": int(port),
        "remote_registration_generation": 1,
        "tp_size": 1,
    }
    rng = np.random.default_rng(0)
    times: list[tuple[float, float]] = []
    for at in range(_ROUNDS):
        ids = [rng.permutation(sizes[4] - 1)[: sizes[3]] + 1 for _ in range(2)]
        times.append(pull(made.w.connector_worker, f"r{at}", params, [found.tolist() for found in ids]))
    intact = all(bool((tensor[ids[0]] == 1).all()) for tensor in made.kv.values())
    ours.send(None)
    made.w.shutdown()
    made.s.connector.shutdown()
    child.join(20)
    child.kill()
    totals, hosts = zip(*times[1:], strict=True)  # leaves out the first pull, which includes the first contact
    keys = ("layers", "heads", "head_dim", "blocks", "pool")
    return {
        **dict(zip(keys, sizes, strict=True)),
        "first_us": times[0][0],
        "us_min": min(totals),
        "us_median": statistics.median(totals),
        "host_us": min(hosts),
        "intact": intact,
    }


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        row = consume(sys.argv[1], tuple(map(int, argument.split(","))))
        print(json.dumps(row), flush=True)
    sys.stdout.flush()
    os._exit(0)  # needed because vLLM leaves threads that do not stop by themselves
