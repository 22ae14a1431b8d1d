"""Two engines with two groups of layers, whose block sizes and layouts differ, and a load that fails.

One layer sees all tokens, and the other one sees the last 20. Prefill has blocks of 16 tokens, heads first. Decode has
blocks of 8 tokens, tokens first. The request has 40 tokens. The second layer needs only tokens 21 to 39, so the blocks
before those are left out. For each group, `first_blocks` is the index of the first block that is given; leave it out if
all blocks are given. In this example both sides run in one process.

    python examples/connector_groups.py
"""

import dataclasses
import functools
import time
import uuid

import torch

from pagewire import GroupConfig, NixlConnectorScheduler, NixlConnectorWorker, Progress, Prompt, WorkerConfig

HEADS, HEAD_DIM, BLOCKS, WINDOW = 2, 4, 12, 20


@dataclasses.dataclass
class Engine:
    """An engine of one rank: its caches, its worker, its scheduler's side, and the events reported so far."""

    caches: dict[str, torch.Tensor]
    worker: NixlConnectorWorker
    scheduler: NixlConnectorScheduler
    reported: Progress = dataclasses.field(default_factory=Progress)

    def step(self) -> None:
        """Runs one step, as a serving loop does."""
        self.worker.start_load_kv(self.scheduler.build_metadata())
        time.sleep(1e-3)  # the model runs
        progress = self.scheduler.update(0, self.worker.take_output())
        # keep the events of every field, because each event is reported only once
        for name in progress.__struct_fields__:
            getattr(self.reported, name).update(getattr(progress, name))

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.close()


def engine(name: str, layout: str, size: int) -> Engine:
    """Returns an engine with blocks of `size` tokens."""
    shared = functools.partial(
        GroupConfig, block_size=size, num_kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32", layout=layout
    )
    full = shared(layers={"full": 0})
    near = shared(layers={"near": 1}, kind="sliding_window", window=WINDOW)
    config = WorkerConfig(engine_id=name, incarnation=uuid.uuid4().hex, groups=(full, near), model="m")
    shape = (2, BLOCKS, HEADS, size, HEAD_DIM) if layout == "HND" else (2, BLOCKS, size, HEADS, HEAD_DIM)
    caches = {layer: torch.rand(shape) for layer in ("full", "near")}
    worker, scheduler = NixlConnectorWorker(config), NixlConnectorScheduler(config)
    worker.register_kv_caches(caches)
    scheduler.set_handshake_metadata({0: worker.get_handshake_metadata()})
    return Engine(caches, worker, scheduler)


def main() -> None:
    """Loads one request. The load of a second request fails, because its lease ends before decode reads."""
    prefill, decode = engine("p", "HND", 16), engine("d", "NHD", 8)
    source, reader = prefill.scheduler, decode.scheduler
    source.offer("good")
    source.offer("late")
    good = source.params("good", Prompt(range(41)), [[3, 5, 7], [4, 6]], num_tokens=40, first_blocks=(0, 1))
    late = source.params("late", Prompt(range(17)), [[1], [2]], num_tokens=16)
    source.abort("late", "its client has gone")  # ends the lease at once, whether or not a reader is reading
    while "late" not in prefill.reported.sent:
        prefill.step()
    # None would mean that the params name no pages
    if (wanted := reader.read("good", good, Prompt(range(41)))) is not None:
        blocks = [[1, 2, 3, 4, 5], [6, 7, 8]]
        reader.load("good", wanted, blocks, num_tokens=41, num_computed_tokens=0, first_blocks=(0, 2))
    if (wanted := reader.read("late", late, Prompt(range(17)))) is not None:
        reader.load("late", wanted, [[9, 10], [9, 10]], num_tokens=17, num_computed_tokens=0)
    while not decode.reported.received == prefill.reported.sent.keys() == {"good", "late"}:
        prefill.step()
        decode.step()

    full = prefill.caches["full"][:, [3, 5, 7]].transpose(2, 3).reshape(2, 48, HEADS, HEAD_DIM)[:, :40]
    near = prefill.caches["near"][:, [4, 6]].transpose(2, 3).reshape(2, 32, HEADS, HEAD_DIM)[:, 5:24]  # tokens 21 to 39
    ours = [
        decode.caches["full"][:, 1:6].reshape(full.shape),
        decode.caches["near"][:, 6:9].reshape(2, 24, *near.shape[2:]),
    ]
    print("full layer equal:", torch.equal(ours[0], full), "window layer equal:", torch.equal(ours[1][:, 5:], near))
    print("failed loads:", sorted(decode.reported.failed))  # each entry names its lease, its source and the reason
    print("how leases ended:", prefill.reported.sent)
    for one in (prefill, decode):
        one.close()


if __name__ == "__main__":
    main()
