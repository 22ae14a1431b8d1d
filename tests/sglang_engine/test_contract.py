"""The contract of the adapters, with SGLang's real scheduler over our cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest

from tests.scheduler_adapters.contract import NEW, AdapterContract, Counters, Limits, Outcome, prompt_of
from tests.sglang_engine.engine import CHUNK, POOL_TOKENS, ROWS


class SGLangDriver:
    """The driver for SGLang. SGLang owns the rows, the free pages and the schedule. pagewire owns the cached pages. One
    engine serves all tests.
    """

    phases = ("waiting", "prefill", "decoding")
    peers = ()
    survives = ()

    def __init__(self, engine: Any) -> None:
        page_size = engine.page_size
        self.limits = Limits(page_size, POOL_TOKENS // page_size, ROWS, CHUNK)
        self.engine, self.scheduler = engine, engine.scheduler
        self.requests: dict[str, Any] = {}
        self.cancelled: set[str] = set()
        self.most: Counter[str] = Counter()
        self.ran = False
        self.patch = pytest.MonkeyPatch()
        run_batch = self.scheduler.run_batch

        def watched(batch: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = batch.extend_num_tokens if batch.forward_mode.is_extend() else len(batch.reqs)
            self.most["tokens"] = max(self.most["tokens"], tokens)
            self.most["pages"] = max(self.most["pages"], self.held_pages())
            return run_batch(batch, *args, **kwargs)

        self.patch.setattr(self.scheduler, "run_batch", watched)

    @property
    def idle(self) -> bool:
        return not self.ran and self.scheduler.is_fully_idle()

    def submit(self, request_id: str, prompt: Sequence[int], new: int) -> None:
        self.engine.submit(request_id, list(prompt), new)
        self.requests[request_id] = self.engine.requests[request_id]

    def step(self) -> None:
        self.ran = self.engine.step()

    def bring(self, request_id: str, phase: str) -> tuple[list[int], int]:
        prompt, new = prompt_of(201, 5 * CHUNK // 2), 3 * NEW
        self.submit(request_id, prompt, new)
        request = self.requests[request_id]
        while phase == "prefill" and self.scheduler.chunked_req is not request:
            self.step()
        while phase == "decoding" and len(request.output_ids) < 3:
            self.step()
        return prompt, new

    def cancel(self, request_id: str) -> None:
        if request_id in self.requests and not self.requests[request_id].finished():
            self.cancelled.add(request_id)
        self.engine.abort(request_id)

    def outcome(self, request_id: str) -> Outcome:
        request = self.requests[request_id]
        tokens, reason = list(request.output_ids), request.finished_reason
        if request_id in self.cancelled:
            return Outcome(tokens, "cancelled")
        if reason is None:
            return Outcome(tokens)
        told = reason.to_json()
        if told["type"] == "abort":
            return Outcome(tokens, "error", str(told["message"]))
        return Outcome(tokens, {"length": "length", "stop": "eos"}[told["type"]])

    def counters(self) -> Counters:
        reused = sum(int(request.cached_tokens) for request in self.requests.values())
        return Counters(self.engine.retracted, reused, self.most["tokens"], self.most["pages"])

    def held_pages(self) -> int:
        allocator, cache = self.engine.allocator, self.engine.cache
        return (allocator.size - allocator.available_size() - cache.evictable_size()) // self.limits.page_size

    def check(self) -> None:
        self.engine.cache.check()
        rows = self.scheduler.req_to_token_pool
        assert rows.available_size() == rows.size, f"{rows.size - rows.available_size()} rows are held"

    def kill_peer(self, peer: str) -> Collection[str]:
        raise NotImplementedError

    revive_peer = fail_pull = kill_peer

    def close(self) -> None:
        self.patch.undo()


class TestSGLang(AdapterContract):
    driver = SGLangDriver

    @pytest.fixture
    def adapter(self, engine: Any) -> Iterator[SGLangDriver]:
        made = SGLangDriver(engine)
        yield made
        made.close()
