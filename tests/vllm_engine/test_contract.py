"""The adapter contract, with vLLM's real schedulers on both sides of our connector."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.scheduler_adapters.contract import NEW, AdapterContract, Counters, Limits, Outcome, prompt_of
from tests.vllm_engine.engine import Engine, Shape, expected_tokens, secret_of
from tests.vllm_engine.test_engine import PREFILL
from transfer.nixl.agent import Agent
from transfer.pull.replica import ReplicaTransfer

SHAPE = Shape(
    blocks=31,
    max_batched=64,
    rows=6,
    policy="recompute",
    # With a secret, prefill accepts the restarted engine before the short leases expire.
    extra={"host": "127.0.0.1", "port": 0, "kv_lease_duration": 1.0, "secret": secret_of("of this fleet alone")},
)
FINISHED = {"length": "length", "stop": "eos", "error": "error", "abort": "cancelled"}


class VLLMDriver:
    """A proxy, a prefill and a decode engine. vLLM owns the blocks and the schedules; our connector moves the pages."""

    phases = ("waiting", "prefill", "held", "queued", "pulling", "decoding")
    peers = ("prefill", "decode")
    survives = ("prefill", "pull")  # If decode cannot read pages, it computes their tokens itself.

    def __init__(self, folder: Path) -> None:
        self.limits = Limits(SHAPE.block_size, SHAPE.blocks - 1, SHAPE.rows, SHAPE.max_batched)
        self.folder = folder
        self.engines: dict[str, Engine] = {}
        self.starts = 0
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.at: dict[str, str] = {}  # For each request, the engine that has it now.
        self.ended: dict[str, Outcome] = {}
        self.came: dict[str, list[int]] = {}
        self.hits: dict[tuple[str, str], int] = {}
        self.failed: set[str] = set()
        self.paused: set[str] = set()
        self.preemptions = self.most_tokens = self.peak_pages = 0
        self.stalled = False
        self.patch = pytest.MonkeyPatch()
        self._hold_reads()
        for name in self.peers:
            self.revive_peer(name)

    def _hold_reads(self) -> None:
        """Patches NIXL so that every READ seems to be in flight until the driver ends it."""
        read, done = Agent.read, Agent.done

        def held_read(agent: Agent, *args: Any) -> Any:
            peer, local, remote, kinds = args
            return agent.post("READ", peer, local, remote, b"", kinds)[0] if self.stalled else read(agent, *args)

        self.patch.setattr(Agent, "read", held_read)
        self.patch.setattr(Agent, "done", lambda *args: not self.stalled and done(*args))

    @property
    def idle(self) -> bool:
        return not self.at and all(
            not engine.scheduler.has_requests() and engine.free_blocks == engine.free_at_start
            for engine in self.engines.values()
        )

    def submit(self, request_id: str, prompt: Sequence[int], new: int) -> None:
        self.asked[request_id] = list(prompt), new
        self.came[request_id] = []
        self.at[request_id] = "prefill"
        if "prefill" in self.engines:
            self.engines["prefill"].add(request_id, prompt, 1, dict(PREFILL))
        else:
            self._end(request_id, "error", "prefill does not answer")

    def _end(self, request_id: str, reason: str, error: str = "") -> None:
        self.at.pop(request_id, None)
        self.ended[request_id] = Outcome(self.came[request_id], reason, error)

    def step(self) -> None:
        self.stalled = False
        self._hand_over(self.paused)
        self.paused = set()
        for name in self.engines:
            self._step(name)

    def _step(self, name: str) -> None:
        engine = self.engines[name]
        before = len(engine.outputs)
        engine.step()
        self.preemptions += engine.preempted
        self.most_tokens = max(self.most_tokens, sum(engine.scheduled[-1].values()))
        self.peak_pages = max(self.peak_pages, engine.peak_blocks)
        for output in engine.outputs[before:]:
            if self.at.get(output.request_id) == name == "decode":
                self._decoded(output)

    def _decoded(self, output: Any) -> None:
        self.came[output.request_id] += output.new_token_ids
        if output.finish_reason is not None:
            reason = FINISHED[str(output.finish_reason)]
            self._end(output.request_id, reason, "vLLM's load failure policy" if reason == "error" else "")

    def _hand_over(self, but: Collection[str] = ()) -> None:
        """Acts as the proxy: puts the params from prefill's answer into decode's request."""
        for request_id in [name for name, engine in self.at.items() if engine == "prefill" and name not in but]:
            prefill = self.engines["prefill"]
            if prefill.finish_reason(request_id):
                if "decode" not in self.engines:
                    self._end(request_id, "error", "decode does not answer")
                    continue
                prompt, new = self.asked[request_id]
                self.at[request_id] = "decode"
                self.engines["decode"].add(request_id, prompt, new, prefill.params(request_id))

    def bring(self, request_id: str, phase: str) -> tuple[list[int], int]:
        prompt, new = prompt_of(201, 5 * self.limits.budget // 2), 3 * NEW
        prefill, decode = self.engines["prefill"], self.engines["decode"]
        reached: dict[str, Callable[[], object]] = {
            "waiting": lambda: True,
            "prefill": lambda: prefill.scheduler.requests[request_id].num_computed_tokens,
            "held": lambda: prefill.finish_reason(request_id),
            "queued": lambda: self.at[request_id] == "decode",
            "pulling": lambda: decode.status(request_id) is RequestStatus.WAITING_FOR_REMOTE_KVS,
            "decoding": lambda: len(self.came[request_id]) > 2,
        }
        self.submit(request_id, prompt, new)
        while not reached[phase]():
            if phase == "queued" and prefill.finish_reason(request_id):
                self._hand_over()
                break
            if phase == "pulling" and prefill.finish_reason(request_id):
                self._hand_over()
                self.stalled = True  # A READ stays in flight until the next step.
                self._step("decode")
                time.sleep(0.02)
                assert reached[phase]()
                break
            self.step()
        if phase == "held":
            self.paused = {request_id}
        return prompt, new

    def cancel(self, request_id: str) -> None:
        if request_id not in self.at:
            return
        for engine in self.engines.values():
            if request_id in engine.scheduler.requests and not engine.finish_reason(request_id):
                engine.abort(request_id)
        if self.at[request_id] == "prefill" and self.engines["prefill"].finish_reason(request_id):
            # The proxy has the params, but its client is gone. It asks decode only to free prefill's blocks.
            self._hand_over()
            self.engines["decode"].abort(request_id)
        self._end(request_id, "cancelled")

    def outcome(self, request_id: str) -> Outcome:
        return self.ended.get(request_id, Outcome(list(self.came[request_id])))

    def counters(self) -> Counters:
        reused = sum(min(self.hits.get((name, request_id), 0) for name in self.peers) for request_id in self.asked)
        return Counters(self.preemptions, reused, self.most_tokens, self.peak_pages, len(self.failed))

    def held_pages(self) -> int:
        return sum(engine.free_at_start - engine.free_blocks for engine in self.engines.values())

    def check(self) -> None:
        for engine in self.engines.values():
            pool = engine.scheduler.kv_cache_manager.block_pool
            assert not engine.scheduler.requests
            assert [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null] == []

    def kill_peer(self, peer: str) -> Collection[str]:
        self.stalled = False  # The end of an engine in this process would wait for a stalled READ.
        engine = self.engines.pop(peer)
        engine.close()
        lost = {request_id for request_id, at in self.at.items() if at == peer}
        for request_id in lost:
            self._end(request_id, "error", f"{peer} was killed")
        return lost

    def revive_peer(self, peer: str) -> None:
        self.starts += 1
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}[peer]
        self.engines[peer] = engine = Engine(self.folder, role, SHAPE, f"{peer}-{self.starts}")
        self._watch(peer, engine)

    def _watch(self, peer: str, engine: Engine) -> None:
        connector = engine.connector
        match, refuse = connector.get_num_new_matched_tokens, connector.update_connector_output

        def matched(request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            self.hits[peer, request.request_id] = num_computed_tokens
            return match(request, num_computed_tokens)

        def updated(output: Any) -> None:
            self.failed |= output.failed_recving
            refuse(output)

        connector.get_num_new_matched_tokens, connector.update_connector_output = matched, updated

    def fail_pull(self, request_id: str, *, final: bool) -> None:  # noqa: ARG002 - there is one attempt
        def fail(replica: ReplicaTransfer) -> None:
            for key in list(replica._pulls):
                replica.cancel(key, "the READs failed, as asked for")

        (worker,) = self.engines["decode"].workers
        worker._worker._worker._running().call(fail)

    def close(self) -> None:
        self.stalled = False
        for engine in self.engines.values():
            engine.close()
        self.patch.undo()


class TestVLLM(AdapterContract):
    driver = VLLMDriver

    @pytest.fixture
    def reference(self) -> Callable[[Sequence[int], int], list[int]]:
        return lambda prompt, new: expected_tokens(prompt, new, SHAPE)

    @pytest.fixture
    def adapter(self, tmp_path: Path) -> Iterator[VLLMDriver]:
        made = VLLMDriver(tmp_path)
        yield made
        made.close()
