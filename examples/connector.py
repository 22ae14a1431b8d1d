"""A hand-over between two engines that own their pages. Prefill has one rank, decode has two, each in its own process.

Prefill has written the KV of 32 tokens. Decode's request has one more token, which decode runs itself. The workers and
the scheduler's side of an engine may also be separate processes, because they exchange only plain data
(`ConnectorMetadata`, `WorkerOutput`, `kv_transfer_params`).

    python examples/connector.py
"""

import dataclasses
import multiprocessing
import time
import uuid
from multiprocessing.connection import Connection

import torch

from pagewire import GroupConfig, NixlConnectorScheduler, NixlConnectorWorker, Progress, Prompt, WorkerConfig

GROUP = GroupConfig(layers={"layer.0": 0}, block_size=16, num_kv_heads=2, head_dim=8, dtype="float32")
KV = torch.arange(64.0).view(1, 2, 2, 16, 1).expand(2, 2, 2, 16, 8)  # keys and values, blocks, heads, tokens, dims
PROMPT = Prompt(range(33))


@dataclasses.dataclass
class Engine:
    """One engine: the caches and workers of its ranks, its scheduler's side, and the events reported so far."""

    caches: list[torch.Tensor]
    workers: list[NixlConnectorWorker]
    scheduler: NixlConnectorScheduler
    reported: Progress = dataclasses.field(default_factory=Progress)

    def step(self) -> None:
        """Runs one step, as a serving loop does."""
        metadata = self.scheduler.build_metadata()
        for worker in self.workers:
            worker.start_load_kv(metadata)
        time.sleep(1e-3)  # the model runs
        for rank, worker in enumerate(self.workers):
            progress = self.scheduler.update(rank, worker.take_output())
            # keep the events of every field, because each event is reported only once
            for name in progress.__struct_fields__:
                getattr(self.reported, name).update(getattr(progress, name))

    def close(self) -> None:
        """Closes the workers, and then the scheduler's side. The memory of the caches must live until then."""
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.close()


def engine(name: str, ranks: int) -> Engine:
    """Returns an engine with 8 blocks on each rank. Each rank's blocks hold that rank's heads."""
    incarnation = uuid.uuid4().hex
    configs = [
        WorkerConfig(
            engine_id=name,
            incarnation=incarnation,
            groups=(GROUP,),
            model="m",
            tp_rank=rank,
            tp_size=ranks,
            secret="known to all of a fleet",  # noqa: S106 - read from a file in earnest
        )
        for rank in range(ranks)
    ]
    caches = [torch.zeros(2, 8, 2 // ranks, 16, 8) for _ in configs]
    workers, scheduler = [NixlConnectorWorker(config) for config in configs], NixlConnectorScheduler(configs[0])
    for worker, cache in zip(workers, caches, strict=True):
        worker.register_kv_caches({"layer.0": cache})
    scheduler.set_handshake_metadata({rank: worker.get_handshake_metadata() for rank, worker in enumerate(workers)})
    return Engine(caches, workers, scheduler)


def prefill(pipe: Connection) -> None:
    """Offers a lease, sends its parameters to decode, and keeps the blocks until the request is in `sent`."""
    ours = engine("prefill", ranks=1)
    ours.caches[0][:, [3, 5]] = KV  # 32 tokens of a request are computed
    ours.scheduler.offer("request")
    pipe.send(ours.scheduler.params("request", PROMPT, [[3, 5]], num_tokens=32))
    while "request" not in ours.reported.sent:
        ours.step()
    ours.close()


def main() -> None:
    """Loads the blocks at decode, and uses them once the request is in `received` and not in `failed`."""
    pipe, theirs = multiprocessing.Pipe()
    multiprocessing.Process(target=prefill, args=(theirs,)).start()
    ours = engine("decode", ranks=2)
    wanted = ours.scheduler.read("request", pipe.recv(), PROMPT)
    if wanted is None:
        raise SystemExit("the params name no pages")
    ours.scheduler.load("request", wanted, [[6, 1]], num_tokens=33, num_computed_tokens=0)
    while "request" not in ours.reported.received:
        ours.step()
    equal = [torch.equal(cache[:, [6, 1]], KV[:, :, [rank]]) for rank, cache in enumerate(ours.caches)]
    print("equal on each rank:", equal, "failed:", ours.reported.failed)
    ours.close()


if __name__ == "__main__":
    main()
