"""A hybrid model: one recurrent layer (linear attention) beside one attention layer, with a prefix cache for both.

A recurrent layer keeps one state for all tokens so far, and overwrites it with each token. The manager gives each
request a state page, and keeps copies of states at the ends of some pages. A cached prefix therefore ends at the last
cached page for which such a copy exists.

The model is the one of `serving_loop.py`, beside this file.

    python examples/recurrent_model.py
"""

import torch
from serving_loop import HEAD_DIM, HEADS, PAGE_SIZE, VOCABULARY, Model

from pagewire import KVCacheParams, PagedKVCacheManager, RaggedKVCacheInputs, StatePages, StateShape, TextContext

NEW_TOKENS, DECAY = 8, 0.9
KIND = ("ssm",)  # the state's matrices; a layer with a convolution would also keep its last inputs


class HybridModel(Model):
    """The model of `serving_loop.py`, with a recurrent layer before its attention layer."""

    def __init__(self) -> None:
        super().__init__()
        weights = torch.Generator().manual_seed(1)
        width = HEADS * HEAD_DIM
        self.project_recurrent = torch.randn(3, width, width, generator=weights) / width**0.5
        self.state = torch.zeros(HEADS, HEAD_DIM, HEAD_DIM)

    def run_hybrid(self, context: TextContext, inputs: RaggedKVCacheInputs, states: StatePages) -> int:
        """Runs `tokens[start_idx:active_idx]` of one request. Returns the greedy token after them."""
        # `pages_at` refuses a request whose state does not include exactly the tokens before `start_idx`.
        pages = states.pages_at([context.request_id], [context.start_idx])
        self.state = states.read(0, pages, KIND)[0]  # the state of recurrent layer 0: [heads, d_state, head_dim]
        token = int(self.run(context, inputs, 0)[-1])
        states.write(0, pages, KIND, self.state[None])
        states.advance(pages, [context.active_idx])  # from now on the state includes this many tokens
        return token

    def run_without_cache(self, tokens: list[int]) -> int:
        """Returns the greedy token after all `tokens`, computed from scratch."""
        self.state = torch.zeros(HEADS, HEAD_DIM, HEAD_DIM)
        return super().run_without_cache(tokens)

    def qkv(self, tokens: list[int], start: int) -> torch.Tensor:
        """Runs the recurrent layer, then projects its output for the attention layer."""
        query, key, value = (self.embedding[tokens] @ self.project_recurrent).unflatten(-1, (HEADS, HEAD_DIM))
        outputs: list[torch.Tensor] = []
        for q, k, v in zip(query, key, value, strict=True):  # token by token, each [heads, head_dim]
            self.state = DECAY * self.state + k[:, :, None] * v[:, None, :]
            outputs.append((q[:, None, :] @ self.state)[:, 0])
        hidden = torch.stack(outputs).flatten(1) / HEAD_DIM + self.positions[start : start + len(tokens)]
        return (hidden @ self.project).unflatten(-1, (HEADS, HEAD_DIM))


def answer(manager: PagedKVCacheManager, model: HybridModel, prompt: list[int]) -> tuple[list[int], int]:
    """Decodes `NEW_TOKENS` tokens. Returns all tokens, and how many prompt tokens were cached."""
    request = TextContext(prompt, max_length=len(prompt) + NEW_TOKENS)
    with manager.claim(request):
        manager.maybe_reserve(request)
        cached = request.start_idx
        while request.current_length < request.max_length:
            # A prompt may run in several chunks, because `maybe_reserve` ends a chunk where a copy of the state is to
            # be kept.
            manager.maybe_reserve(request)
            (inputs,) = manager.fetch([request])
            request.update(model.run_hybrid(request, inputs, manager.states[0]))
            manager.step([request])
    return request.tokens.tolist(), cached


def main() -> None:
    """Holds a conversation of three turns and compares each answer with one computed without a cache."""
    shape = StateShape(
        layers=1,
        heads=HEADS,
        head_dim=HEAD_DIM,
        groups=1,
        d_state=HEAD_DIM,
        kernel=1,
        conv_dtype=torch.float32,
        form="linear",
    )
    params = KVCacheParams(
        torch.float32, HEADS, HEAD_DIM, enable_prefix_caching=True, page_size=PAGE_SIZE, states=shape
    )
    manager = PagedKVCacheManager(  # `num_layers` counts only the attention layers
        params, max_batch_size=4, max_seq_len=128, num_layers=1, devices=["cpu"], available_cache_memory=1 << 20
    )
    model, tokens = HybridModel(), list(range(11))
    for turn in range(3):
        prompt = [*tokens, *range(VOCABULARY - 20 * turn - 9, VOCABULARY - 20 * turn)]
        tokens, cached = answer(manager, model, prompt)
        expected = list(prompt)
        while len(expected) < len(tokens):
            expected.append(model.run_without_cache(expected))
        if tokens != expected:
            raise SystemExit(f"turn {turn}: the tokens are {tokens}, expected {expected}")
        print(f"turn {turn + 1}: {cached} of {len(prompt)} prompt tokens were cached, the answer is right")
    manager.check()
    print(f"{manager.states[0].num_kept} copies of states are kept")
    manager.close()


if __name__ == "__main__":
    main()
