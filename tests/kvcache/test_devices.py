"""Serving loops over the pages of a device. Every token must equal the token that is computed without a cache. On a GPU
the host runs ahead of the device (`tests.kvcache.summing_model`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcache import PagedKVCacheManager, StepInFlight, TextContext
from tests.kvcache.build import manager_of
from tests.kvcache.summing_model import answer, decode, run, wait_on_device

SIZE, NEW, LONGEST = 4, 9, 96
PROMPTS = [[(31 * number + place * (number + 2)) % 97 + 1 for place in range(23 + number)] for number in range(6)]

GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)
on_each_device = pytest.mark.parametrize("device", ["cpu", GPU])
on_a_gpu = pytest.mark.parametrize("device", [GPU])


def pages_on(device: str, pages: int = 64, **options: Any) -> PagedKVCacheManager:
    return manager_of(
        pages, page_size=SIZE, max_seq_len=LONGEST, layers=2, dtype=torch.int64, checks=False, device=device, **options
    )


def step(manager: PagedKVCacheManager, batch: list[TextContext]) -> list[int]:
    """Runs one step of one replica's requests. Waits for the device only if a request has reached the end of its
    tokens.
    """
    assert manager.reserve_batch(batch).all()
    replica = manager.get_replica(batch[0])
    inputs = manager.fetch(batch)
    tokens = run(batch, [inputs[replica * len(inputs) // manager.num_replicas]])
    yields = [context.active_idx == context.end_idx for context in batch]
    found: list[int] = tokens.tolist() if any(yields) else [0] * len(batch)
    for context, token in zip(batch, found, strict=True):
        context.update(token)
    manager.step(batch)
    return [token for token, last in zip(found, yields, strict=True) if last]


def prefill(manager: PagedKVCacheManager, context: TextContext, chunk: int = 8) -> int:
    """Runs a prompt in chunks. Returns its first new token."""
    while True:
        assert manager.maybe_reserve(context)
        end = min(context.end_idx, context.start_idx + chunk)
        context.set_token_indices(active_idx=end)
        if tokens := step(manager, [context]):
            return tokens[0]


def serve(manager: PagedKVCacheManager, prompt: list[int], count: int = NEW) -> list[int]:
    context = TextContext(prompt, LONGEST)
    with manager.claim(context):
        tokens = [prefill(manager, context)]
        while len(tokens) < count:
            tokens += step(manager, [context])
    return tokens


@on_each_device
@pytest.mark.parametrize("own_stream", [False, True])
def test_prompts_that_were_evicted_come_back_from_the_host(device: str, own_stream: bool) -> None:
    if device == "cpu" and own_stream:
        pytest.skip("streams are a GPU's")
    stream = torch.cuda.Stream() if own_stream else None
    manager = pages_on(device, pages=16, host_slots=200, session=stream)
    with torch.cuda.stream(stream):  # With None the current stream is used.
        for _ in range(3):
            for prompt in PROMPTS:
                assert serve(manager, prompt) == answer(prompt, NEW)
        manager.check()
    assert manager.metrics.h2d_blocks_copied > 20
    manager.close()


def delay_copies(manager: PagedKVCacheManager) -> None:
    """Delays the copies to and from the host that are requested from now on."""
    assert manager._replicas.tiers is not None
    (side,) = manager._replicas.tiers.replicas[0]._mover._sides.values()
    with torch.cuda.stream(side):
        wait_on_device(torch.device("cuda"), 2_000_000_000)  # about a second


@on_a_gpu
def test_no_page_is_overwritten_before_its_copy_to_the_host_is_over(device: str) -> None:
    manager = pages_on(device, pages=16, host_slots=200)
    delay_copies(manager)
    for prompt in [*PROMPTS, PROMPTS[0]]:
        assert serve(manager, prompt) == answer(prompt, NEW)
    assert manager.metrics.h2d_blocks_copied > 0
    manager.check()
    manager.close()


@on_a_gpu
def test_the_model_waits_for_pages_that_come_from_the_host(device: str) -> None:
    manager = pages_on(device, pages=16, host_slots=200)
    for prompt in PROMPTS:
        serve(manager, prompt)
    delay_copies(manager)
    assert serve(manager, PROMPTS[0]) == answer(PROMPTS[0], NEW)
    assert manager.metrics.h2d_blocks_copied > 0
    manager.check()
    manager.close()


@on_each_device
def test_copies_of_forks_wait_for_the_model_to_write_them(device: str) -> None:
    manager = pages_on(device)
    for prompt in PROMPTS:
        parent = TextContext(prompt, LONGEST)
        with manager.claim(parent):
            assert manager.maybe_reserve(parent)
            parent.set_token_indices(active_idx=parent.end_idx - (2 if parent.end_idx % SIZE == 1 else 1))
            # The request's last page is not full. On a GPU the model has not written it yet.
            step(manager, [parent])
            child = parent.fork()
            assert manager.fork(parent, child)
            for context in (child, parent):
                tokens = [prefill(manager, context), *step(manager, [context]), *step(manager, [context])]
                assert tokens == answer(prompt, 3)
            manager.release(child.request_id)
    manager.check()
    manager.close()


class Launched:
    """A decode step of a padded batch over tensors with fixed addresses. On a GPU the step is a captured graph. On a
    CPU it is a plain call.
    """

    def __init__(self, blocks: torch.Tensor, table: torch.Tensor, starts: torch.Tensor) -> None:
        self.blocks, self.table, self.starts = blocks, table, starts
        self.tokens = torch.zeros(len(starts), dtype=torch.int64, device=blocks.device)
        self.found = torch.zeros_like(self.tokens)
        self.graph: Any = None
        if blocks.is_cuda:
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                self._run()

    def _run(self) -> None:
        wait_on_device(self.blocks.device, 400_000)
        self.found.copy_(decode(self.blocks, self.table, self.starts, self.tokens))

    def launch(self, tokens: list[int]) -> None:
        """Launches a step with one token for each row. Rows that pad the batch have no token."""
        self.tokens[: len(tokens)] = torch.tensor(tokens).to(self.tokens.device)
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()


@on_each_device
def test_a_captured_step_runs_over_copies_of_fetched_tables(device: str) -> None:
    """Between two replays of one graph, requests arrive, get new pages, leave, and are loaded from the host."""
    manager = pages_on(device, pages=30, host_slots=200)
    blocks = manager.device_tensors[0][0]
    table = torch.zeros(8, LONGEST // SIZE, dtype=torch.int32, device=device)
    captured = Launched(blocks, table, torch.zeros(8, dtype=torch.int32, device=device))
    waiting, running = [*PROMPTS, *PROMPTS], list[tuple[TextContext, list[int]]]()
    answered = 0
    while waiting or running:
        if waiting and len(running) < 3:
            context = TextContext(prompt := waiting.pop(0), LONGEST)
            manager.external_claim(context.request_id)
            first = prefill(manager, context)
            running.append((context, answer(prompt, NEW)))
            assert running[-1][1].pop(0) == first
        batch = [context for context, _ in running]
        assert manager.reserve_batch(batch).all()
        (inputs,) = manager.fetch(batch)
        table.zero_()
        captured.starts.zero_()
        table[: len(batch), : inputs.lookup_table.shape[1]] = inputs.lookup_table
        captured.starts[: len(batch)] = inputs.cache_lengths
        captured.launch([int(context.tokens[-1]) for context in batch])
        for (context, expected), token in zip(running, captured.found.tolist(), strict=False):
            assert token == expected.pop(0)
            context.update(token)
        manager.step(batch)
        for context, expected in [*running]:
            if not expected:
                running.remove((context, expected))
                manager.release(context.request_id)
                answered += 1
    assert answered == 12
    assert manager.metrics.h2d_blocks_copied > 0
    manager.check()
    manager.close()


class Ahead:
    """Requests in a batch that is padded to eight rows. Each step is planned while the previous step runs."""

    def __init__(self, manager: PagedKVCacheManager) -> None:
        self.manager = manager
        self.captured: dict[int, Launched] = {}  # The captured graphs, by the address of their block tables.
        self.left: dict[TextContext, list[int]] = {}  # For each context, the expected tokens that have not come yet.
        self.launched: tuple[StepInFlight, list[TextContext], Launched] | None = None
        self.answered = 0

    def admit(self, prompt: list[int]) -> None:
        context = TextContext(prompt, LONGEST)
        self.manager.external_claim(context.request_id)
        expected = answer(prompt, NEW)
        assert prefill(self.manager, context) == expected.pop(0)
        self.left[context] = expected

    def step(self) -> None:
        """Plans a step, takes the tokens of the running step, launches the planned step, and ends the step before the
        running step.
        """
        # Requests whose last token is computed by the running step are left out.
        batch = [context for context, left in self.left.items() if len(left) > (self.launched is not None)]
        planned = None
        if batch:
            assert self.manager.reserve_batch(batch).all()
            planned = self.manager.fetch_ahead(batch)
        ran, self.launched = self.launched, None
        if ran is not None:
            for context, token in zip(ran[1], ran[2].found.tolist(), strict=False):
                assert token == self.left[context].pop(0)
                context.realize_future_token(token)
        if planned is not None:
            self.launch(planned, batch)
        if ran is not None:
            self.finish(ran[0], ran[1])

    def launch(self, planned: StepInFlight, batch: list[TextContext]) -> None:
        (inputs,) = planned.padded(8)
        address = inputs.lookup_table.data_ptr()
        if address not in self.captured:
            self.captured[address] = Launched(inputs.blocks, inputs.lookup_table, inputs.cache_lengths)
        self.captured[address].launch([int(context.tokens[-1]) for context in batch])
        for context in batch:
            context.update_with_future_token()
        self.launched = planned, batch, self.captured[address]

    def finish(self, ran: StepInFlight, batch: list[TextContext]) -> None:
        self.manager.step(batch)
        self.manager.end_step(ran)
        for context in [one for one in batch if not self.left[one]]:
            del self.left[context]
            self.manager.release(context.request_id)
            self.answered += 1


@on_each_device
def test_a_step_captured_for_each_set_of_tables_runs_in_place_while_the_next_is_planned(device: str) -> None:
    """Each captured graph reads the tables directly, without a copy. Pages are released between the steps."""
    manager = pages_on(device, pages=40, host_slots=200)
    ahead, waiting = Ahead(manager), [*PROMPTS, *PROMPTS]
    while waiting or ahead.left:
        while ahead.launched is None and waiting and len(ahead.left) < 3:
            ahead.admit(waiting.pop(0))
        ahead.step()
    assert ahead.answered == 12
    assert len(ahead.captured) == 2
    manager.check()
    manager.close()
