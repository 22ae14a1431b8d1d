"""Loads new weights while requests run, as reinforcement learning does every few minutes, and rolls them back.

The KV of this model is a number for each token, which depends on the weights and on all tokens before. So each answer
shows which weights its cache is of. The loop says once that the weights have changed. It never clears the cache, and no
request finds pages of other weights, unless it asks for them.

    python examples/weights.py
"""

import torch

from pagewire import KVCacheParams, PagedKVCacheManager, TextContext

PAGE_SIZE, PROMPT, NEW_TOKENS = 4, [*range(8)], 4


def kv(before: float, token: int, step: int) -> float:
    """Returns the KV of a token, given the KV of the token before it and the weights, which are one number."""
    return (before * 7 + token * step) % 1009


def run(manager: PagedKVCacheManager, context: TextContext, step: int) -> None:
    """Runs one step of a request with the weights of a training step."""
    manager.maybe_reserve(context)
    inputs = manager.fetch([context])[0]
    cache = inputs.blocks.flatten(1)
    table = inputs.lookup_table[0]
    for position in range(context.start_idx, context.active_idx):
        earlier = position - 1
        before = float(cache[table[earlier // PAGE_SIZE], earlier % PAGE_SIZE]) if position else 0.0
        cache[table[position // PAGE_SIZE], position % PAGE_SIZE] = kv(before, int(context.tokens[position]), step)
    context.update(9)
    manager.step([context])


def last_kv(manager: PagedKVCacheManager, context: TextContext) -> float:
    """Returns the KV of the last computed token."""
    last = context.start_idx - 1
    page = manager.get_req_blocks(context.request_id)[last // PAGE_SIZE]
    return float(manager.device_tensors[0][0].flatten(1)[page, last % PAGE_SIZE])


def expected(context: TextContext, of_first: int, of_rest: int, first: int) -> float:
    """Returns the last KV if the first tokens were computed with some weights, and the rest with others."""
    value = 0.0
    for position, token in enumerate(context.tokens[: context.start_idx].tolist()):
        value = kv(value, token, of_first if position < first else of_rest)
    return value


def main() -> None:
    """Switches the weights with each way of treating requests that run, then goes back to the first ones."""
    params = KVCacheParams(
        torch.float64, 1, 1, is_mla=True, enable_prefix_caching=True, page_size=PAGE_SIZE, weights="step 1"
    )
    manager = PagedKVCacheManager(params, 4, 64, 1, ["cpu"], available_cache_memory=1 << 14)
    first = manager.weights

    finishes = TextContext(PROMPT, 64, "finishes")
    manager.external_claim("finishes")
    run(manager, finishes, step=1)
    manager.set_weights("step 2")  # by default, running requests finish with the pages that they have
    for _ in range(NEW_TOKENS):
        run(manager, finishes, step=2)
    told = {version: tokens for _, tokens, version in manager.lineage("finishes")}
    right = "right" if last_kv(manager, finishes) == expected(finishes, 1, 2, told[first]) else "wrong"
    print(f"finish: {told[first]} of 12 tokens are of step 1, {told[manager.weights]} of step 2, ", end="")
    print(f"and the answer is {right}")
    manager.release("finishes")

    manager.set_weights("step 1")
    again = TextContext(PROMPT, 64, "again")
    manager.external_claim("again")
    run(manager, again, step=1)
    manager.set_weights("step 2", running="recompute")
    for _ in range(NEW_TOKENS):
        run(manager, again, step=2)
    (_, tokens, _) = manager.lineage("again")[0]
    right = "right" if last_kv(manager, again) == expected(again, 2, 2, 0) else "wrong"
    print(f"recompute: {tokens} of 12 tokens are of step 2, and the answer is {right}")
    manager.release("again")

    manager.set_weights("step 1")
    cached = manager.admission(TextContext([*PROMPT, 9, 9, 9, 9], 64)).cached_pages * PAGE_SIZE
    print(f"rollback to step 1: {cached} of 12 tokens are cached")

    manager.set_weights("step 3")
    stale = TextContext([*PROMPT, 9], 64, "stale", max_staleness=1)  # it may use pages of the version before
    manager.external_claim("stale")
    run(manager, stale, step=3)
    told = {version: tokens for _, tokens, version in manager.lineage("stale")}
    right = "right" if last_kv(manager, stale) == expected(stale, 1, 3, told[first]) else "wrong"
    print(f"max_staleness=1: {told[first]} of 9 tokens are of step 1, and the answer is {right}")


if __name__ == "__main__":
    main()
