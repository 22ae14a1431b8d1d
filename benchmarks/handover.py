"""How long after a prompt's last chunk does decode run its first step, with and without pulling chunk by chunk?

There are one prefill process and two decode processes, which get prompts alternately. One decode process pulls pages
while the rest of the prompt runs, and the other after all of it has run. Every prompt is new, so nothing is cached. All
processes use the machine's monotonic clock. Prefill is pinned to the first core, decode to the last. Two columns are in
milliseconds. `handover` is the time from the end of the model's run of the last chunk to the start of decode's first
step. `prefill` is the time from the start of the first chunk to the end of the last chunk's run.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import zmq

from benchmarks.frame import Row, options, report
from scheduler_adapters.hf.runner import HFRunner, kv_params_of, load_model, manager_for
from scheduler_adapters.loop import Output, Request, ServingLoop
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.decode import DecodeScheduler
from scheduler_adapters.service.prefill import PrefillScheduler
from scheduler_adapters.service.sockets import bind_router, received, wait_for_any
from transfer.pull.exchange import PageExchange

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvcache.replica.context import TextContext

PAGE = 16
BUDGET = 512
NEW = 2
WARM_UP = 1
# The keys and values of a token take 2 KiB in the small Llama, and 32 KiB with wide heads, as in a larger model.
MODELS = {"small": {}, "wide": {"num_key_value_heads": 8, "num_attention_heads": 8, "head_dim": 128}}


class TimedLoop(ServingLoop):
    """A loop that records, for each request, when it first ran, and when it last ran or joined the loop."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.times: dict[str, list[float]] = {}
        self._joined: set[str] = set()

    def adopt(self, request: Request, context: TextContext) -> None:
        """Adopts a request whose first step will be timed."""
        super().adopt(request, context)
        self._joined.add(request.request_id)

    def step(self) -> list[Output]:
        """Runs a step, and records when it started for each request that has joined.

        For a request that runs here from its first token, the step's start and end are recorded.
        """
        before = time.perf_counter()
        for request_id in self._joined:
            self.times[request_id] = [before]
        self._joined.clear()
        outputs = super().step()
        for entry in self._running.values():
            self.times.setdefault(entry.request.request_id, [before])
        for output in outputs:
            self.times.setdefault(output.request_id, [before]).append(time.perf_counter())
        return outputs


def make(kind: str, name: str, at: str) -> tuple[TimedLoop, PageExchange]:
    """The loop and the exchange of one process."""
    torch.set_num_threads(1)
    model = load_model(None) if kind == "small" else wide_model()
    params = kv_params_of(model.config, page_size=PAGE)
    memory = 3 * (1 << 14) * params.bytes_per_token(model.config.num_hidden_layers)
    manager = manager_for(model, params, 4, 1 << 15, ["cpu"], available_cache_memory=memory)
    return TimedLoop(manager, HFRunner(model), BUDGET), PageExchange(manager, name, bind=f"ipc://{at}/{name}.hand")


def wide_model() -> Any:
    """A small Llama with the keys and values of a larger model."""
    import transformers  # noqa: PLC0415 - heavy

    torch.manual_seed(0)
    config = load_model(None).config.to_dict() | MODELS["wide"]
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()


def prefill_process(kind: str, at: str, pipe: Connection) -> None:
    """Serves until it is told to stop. Answers any other message with the times since the previous message."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    context: Any = zmq.Context()
    # a context's linger applies to all of its sockets, so that closing does not wait for messages to a dead peer
    context.linger = 0
    loop, exchange = make(kind, "p", at)
    scheduler = PrefillScheduler("p", loop, exchange, bind_router(context, f"ipc://{at}/p"))
    pipe.send("ready")
    while True:
        if pipe.poll():
            if pipe.recv() == "stop":
                break
            pipe.send(loop.times)
            loop.times = {}
        if not scheduler.poll():
            wait_for_any(scheduler.sockets, 1)
    exchange.close()


def decode_process(kind: str, at: str, name: str, pipe: Connection) -> None:
    """Serves prompts one at a time. Answers each with the time of its first step."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    context: Any = zmq.Context()
    # a context's linger applies to all of its sockets, so that closing does not wait for messages to a dead peer
    context.linger = 0
    loop, exchange = make(kind, name, at)
    client, frontend = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    client.bind(f"inproc://{name}")
    frontend.connect(f"inproc://{name}")
    chunkwise = name == "chunkwise"
    scheduler = DecodeScheduler(name, loop, exchange, context, [f"ipc://{at}/p"], frontend, chunkwise=chunkwise)
    pipe.send("ready")
    while True:
        if pipe.poll():
            prompt = pipe.recv()
            if prompt is None:
                break
            scheduler.submit(msg.Submit(request_id="r", prompt=prompt, max_new_tokens=NEW))
        if not scheduler.poll():
            wait_for_any(scheduler.sockets, 1)
        for (data,) in received(client):
            message = msg.decode(data)
            if isinstance(message, msg.Tokens) and message.finished:
                pipe.send(message.error or loop.times["r"][0])
    exchange.close()


def measure(kind: str, lengths: list[int], repeats: int) -> list[Row]:
    """The rows of one model, `kind`."""
    spawn, rng, rows = multiprocessing.get_context("spawn"), np.random.default_rng(0), list[Row]()
    with tempfile.TemporaryDirectory() as at:
        pipes: dict[str, Connection] = {}
        processes: list[Any] = []
        for name in ("p", "whole", "chunkwise"):
            pipes[name], theirs = spawn.Pipe()
            target, args = (
                (prefill_process, (kind, at, theirs)) if name == "p" else (decode_process, (kind, at, name, theirs))
            )
            processes.append(spawn.Process(target=target, args=args, daemon=True))
            processes[-1].start()
            theirs.close()  # without this call, the parent would never notice that the process has died
        for pipe in pipes.values():
            pipe.recv()
        for tokens in lengths:
            found: dict[str, list[tuple[float, float]]] = {"whole": [], "chunkwise": []}
            for _ in range(WARM_UP + repeats):
                for name, times in found.items():
                    times.append(one(pipes["p"], pipes[name], tuple(rng.integers(0, 256, tokens).tolist())))
            rows += [row(kind, tokens, name, times[WARM_UP:]) for name, times in found.items()]
        for name, pipe in pipes.items():
            pipe.send("stop" if name == "p" else None)
        for process in processes:
            process.join()
    return rows


def one(prefill: Connection, decode: Connection, prompt: tuple[int, ...]) -> tuple[float, float]:
    """Serves one prompt. Returns the milliseconds of its hand-over and of its prefill."""
    decode.send(prompt)
    first_step = decode.recv()
    if isinstance(first_step, str):
        raise SystemExit(first_step)
    prefill.send("times")
    (times,) = prefill.recv().values()
    return (first_step - times[-1]) * 1e3, (times[-1] - times[0]) * 1e3


def row(kind: str, tokens: int, mode: str, times: list[tuple[float, float]]) -> Row:
    """One line of the table."""
    handover, prefill = zip(*times, strict=True)
    return {
        "model": kind,
        "tokens": tokens,
        "pull": mode,
        "handover_ms_min": round(min(handover), 2),
        "handover_ms_median": round(statistics.median(handover), 2),
        "prefill_ms_min": round(min(prefill), 1),
        "prefill_ms_median": round(statistics.median(prefill), 1),
        "n": len(times),
    }


def main() -> None:
    """Measures both models."""
    chosen = options(__doc__)
    lengths, repeats = ([2048], 3) if chosen.quick else ([2048, 16384], 3)
    report(
        "handover",
        [line for kind in MODELS for line in measure(kind, lengths if kind == "small" else lengths[:1], repeats)],
        chosen,
    )


if __name__ == "__main__":
    main()
