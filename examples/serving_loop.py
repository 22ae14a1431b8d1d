"""A serving loop with its own attention layer: continuous batching, preemption, two replicas, a prefix cache.

The model is one attention layer with random weights. It reads and writes the pages that `fetch` names, so its code
shows where a token's keys and values lie. There are too few pages for all requests at once. When a replica runs out of
pages, the loop preempts the request that was admitted last. At the end, every answer is compared with one computed
without a cache.

    python examples/serving_loop.py
"""

from collections import deque

import torch
from torch.nn.functional import scaled_dot_product_attention

from pagewire import KVCacheParams, PagedKVCacheManager, RaggedKVCacheInputs, TextContext

VOCABULARY, HEADS, HEAD_DIM, PAGE_SIZE, NEW_TOKENS = 512, 2, 16, 4, 12


class Model:
    """One attention layer between an embedding and that embedding's transpose. It decodes greedily."""

    def __init__(self) -> None:
        weights = torch.Generator().manual_seed(0)
        width = HEADS * HEAD_DIM
        self.embedding = torch.randn(VOCABULARY, width, generator=weights)
        self.positions = torch.randn(256, width, generator=weights)
        # projects to queries, keys and values
        self.project = torch.randn(3, width, width, generator=weights) / width**0.5

    def run(self, context: TextContext, inputs: RaggedKVCacheInputs, row: int) -> torch.Tensor:
        """Runs `tokens[start_idx:active_idx]` of one request. Returns the greedy token after each of them."""
        return self.logits(context, inputs, row).argmax(-1)

    def logits(self, context: TextContext, inputs: RaggedKVCacheInputs, row: int) -> torch.Tensor:
        """Returns the logits from which `run` takes the greedy tokens: `[tokens, VOCABULARY]`."""
        start, end = context.start_idx, context.active_idx
        query, key, value = self.qkv(context.tokens[start:end].tolist(), start)

        # Token p of a request is at index p % PAGE_SIZE of the request's page number p // PAGE_SIZE.
        pages = inputs.lookup_table[row].long()
        keys, values = inputs.blocks[:, 0, 0], inputs.blocks[:, 1, 0]  # layer 0: [pages, PAGE_SIZE, heads, head_dim]
        at = torch.arange(start, end)
        keys[pages[at // PAGE_SIZE], at % PAGE_SIZE] = key
        values[pages[at // PAGE_SIZE], at % PAGE_SIZE] = value

        read = pages[: -(-end // PAGE_SIZE)]
        return self.attend(query, keys[read].flatten(0, 1)[:end], values[read].flatten(0, 1)[:end], start)

    def run_without_cache(self, tokens: list[int]) -> int:
        """Returns the greedy token after all `tokens`, computed from scratch."""
        return int(self.logits_without_cache(tokens)[-1].argmax())

    def logits_without_cache(self, tokens: list[int]) -> torch.Tensor:
        """Returns the logits after each of `tokens`, computed from scratch: `[tokens, VOCABULARY]`."""
        query, key, value = self.qkv(tokens, 0)
        return self.attend(query, key, value, 0)

    def qkv(self, tokens: list[int], start: int) -> torch.Tensor:
        """Returns queries, keys and values of tokens from position `start` on: `[3, tokens, heads, head_dim]`."""
        hidden = self.embedding[tokens] + self.positions[start : start + len(tokens)]
        return (hidden @ self.project).unflatten(-1, (HEADS, HEAD_DIM))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int) -> torch.Tensor:
        """Computes causal attention of the queries, which begin at position `start`.

        Returns the logits after each query.
        """
        mask = torch.arange(len(key)) <= torch.arange(start, start + len(query))[:, None]
        query, key, value = (states.transpose(0, 1) for states in (query, key, value))
        hidden = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return hidden.transpose(0, 1).flatten(1) @ self.embedding.T


def serve(manager: PagedKVCacheManager, model: Model, requests: list[TextContext]) -> int:
    """Serves all requests to their `max_length`. Returns how often a request was preempted."""
    waiting, running, preemptions = deque(requests), list[TextContext](), 0
    while waiting or running:
        # Reserve pages for the next step of each running request, the oldest first.
        for request in list(running):
            while request in running and not manager.maybe_reserve(request):
                replica = manager.get_replica(request)
                newest = next(one for one in reversed(running) if manager.get_replica(one) == replica)
                manager.release(newest.request_id)  # its context is kept, because the request is claimed again later
                running.remove(newest)
                waiting.appendleft(newest)
                preemptions += 1

        # Admit requests while there are rows and pages. `maybe_reserve` moves `start_idx` past a cached prefix.
        while waiting and manager.admission(waiting[0]).fits:
            request = waiting.popleft()
            manager.external_claim(request.request_id, manager.get_or_recommend_replica(request))
            manager.maybe_reserve(request)
            running.append(request)

        # Run one step of every running request. `fetch` returns one entry for each replica.
        batch = sorted(running, key=manager.get_replica)
        for replica, inputs in enumerate(manager.fetch(batch)):
            mine = [request for request in batch if manager.get_replica(request) == replica]
            for row, request in enumerate(mine):
                request.update(int(model.run(request, inputs, row)[-1]))
        manager.step(batch)  # publishes the pages that have become full

        for request in batch:
            if request.current_length == request.max_length:
                manager.release(request.request_id)
                running.remove(request)
    return preemptions


def main() -> None:
    """Serves eight requests with a common beginning on two replicas of 16 pages each."""
    params = KVCacheParams(
        torch.float32,
        HEADS,
        HEAD_DIM,
        enable_prefix_caching=True,
        page_size=PAGE_SIZE,
        n_devices=2,
        data_parallel_degree=2,
    )
    page_bytes = params.bytes_per_token(num_layers=1) * PAGE_SIZE
    manager = PagedKVCacheManager(
        params,
        max_batch_size=16,
        max_seq_len=64,
        num_layers=1,
        devices=["cpu", "cpu"],
        available_cache_memory=32 * page_bytes,
    )
    model, system = Model(), list(range(10))
    prompts = [[*system, 100 + number, 200 + number, 300 + number] for number in range(8)]
    requests = [TextContext(prompt, max_length=len(prompt) + NEW_TOKENS) for prompt in prompts]
    preemptions = serve(manager, model, requests)

    for prompt, request in zip(prompts, requests, strict=True):
        expected = list(prompt)
        while len(expected) < request.max_length:
            expected.append(model.run_without_cache(expected))
        if request.tokens.tolist() != expected:
            raise SystemExit(f"request {request.request_id}: {request.tokens.tolist()}; expected {expected}")
    manager.check()  # recounts every page
    print(f"{len(requests)} answers are equal to those computed without a cache")
    cached, total = manager.metrics.cache_tokens, manager.metrics.prompt_tokens
    print(f"{preemptions} preemptions, {cached} of {total} prompt tokens were cached")
    manager.close()


if __name__ == "__main__":
    main()
