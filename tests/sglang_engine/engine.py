"""SGLang's real scheduler, model runner and attention on the CPU, in this process, driven step by step. Only the
outermost `while` of the event loop belongs to the tests, so that a test can check the state between two steps.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from typing import Any

import torch

from tests.sglang_engine import stand_ins
from tests.sglang_engine.subscriber import CONFIG, Subscriber
from tests.sglang_engine.tokenized import tokenized

# With these settings SGLang itself recounts its pools and rows after every step, and fails at the first difference.
os.environ |= {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
CHUNK = 64
POOL_TOKENS = 640
ROWS = 8


class Engine:
    """One scheduler with one model. SGLang allows only one in a process.

    Args:
        model: directory of the model.
        page_size: tokens of a page.
        backend: `--radix-cache-backend`; None for SGLang's own tree.
    """

    def __init__(self, model: str, page_size: int, backend: str | None) -> None:
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        load_plugins()  # Every process of a server makes this call. It registers the backend of pagewire.
        arguments = ServerArgs(
            model_path=model,
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            skip_tokenizer_init=True,
            page_size=page_size,
            max_total_tokens=POOL_TOKENS,
            max_running_requests=ROWS,
            chunked_prefill_size=CHUNK,
            schedule_conservativeness=0.05,  # The scheduler admits more requests than fit, so that some are retracted.
            enable_priority_scheduling=True,
            radix_cache_backend=backend,
            kv_events_config=CONFIG,
        )
        ports = PortArgs.init_new(arguments)
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        self.scheduler = Scheduler(arguments, ports)
        self.cache: Any = self.scheduler.tree_cache
        self.allocator: Any = self.scheduler.token_to_kv_pool_allocator
        self.page_size = page_size
        self.retracted = 0
        self.requests: dict[str, Any] = {}

    def submit(self, name: str, prompt: list[int], new: int, stop: int | None = None, **fields: Any) -> None:
        """Passes a request to the scheduler, as SGLang's tokenizer process would."""
        self.scheduler.process_input_requests([tokenized(name, prompt, new, stop, **fields)])
        self.requests[name] = next(req for req in self.scheduler.waiting_queue if req.rid == name)

    def abort(self, name: str) -> None:
        """Does what SGLang does when a client disconnects."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.process_input_requests([AbortReq(rid=name)])

    def step(self) -> bool:
        """Runs one turn of the event loop. Returns whether there was a batch to run."""
        scheduler = self.scheduler
        before = {name for name, req in self.requests.items() if req.is_retracted}
        with torch.inference_mode():
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
            scheduler.cur_batch_for_debug = batch
            if batch:
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            else:
                scheduler.on_idle()  # The call recounts every pool and raises an error if a page has leaked.
            scheduler.last_batch = batch
            scheduler.invariant_checker.self_check_during_busy()
        self.retracted += len({name for name, req in self.requests.items() if req.is_retracted} - before)
        if hasattr(self.cache, "check"):
            self.cache.check()
        return batch is not None

    def run(self, limit: int = 2000) -> dict[str, list[int]]:
        """Runs until all requests have ended. Returns the tokens of every request since the last `run`."""
        for _ in range(limit):
            if not self.step() and self.scheduler.is_fully_idle():
                found = {name: list(req.output_ids) for name, req in self.requests.items()}
                self.requests = {}
                return found
        raise AssertionError(f"not idle after {limit} steps")

    def pages_of(self, name: str) -> list[int]:
        """Returns the pages in the row of a running request."""
        kv = self.requests[name].kv
        row = self.scheduler.req_to_token_pool.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len]
        return (row[:: self.page_size] // self.page_size).tolist()

    def cached_tokens(self, requests: dict[str, list[int]], new: int) -> list[int]:
        """Runs one request after another. Returns how many tokens of each prompt were found cached."""
        found = []
        for name, prompt in requests.items():
            self.submit(name, prompt, new)
            request = self.requests[name]
            self.run()
            found.append(int(request.cached_tokens))
        return found


def main() -> None:
    """Runs the requests on standard input with SGLang's own tree, and prints JSON. The JSON says how many tokens each
    request finds cached. With `--events` it also says what a subscriber knows of the tree at the end.
    """
    stand_ins.install()
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--page-size", type=int, required=True)
    parser.add_argument("--events", action="store_true")
    options = parser.parse_args()
    requests, new = json.load(sys.stdin)
    engine = Engine(options.model, options.page_size, None)
    subscriber = Subscriber(engine)
    found: Any = engine.cached_tokens(requests, new)
    if options.events:
        found = list(subscriber.catch_up())
    subscriber.close()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
