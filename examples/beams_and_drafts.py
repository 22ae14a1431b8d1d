"""Beam search with `fork`, and speculative decoding that drops wrong guesses.

A fork shares the full pages of its parent and copies the last one, so beams cost little memory. A draft is a token that
the model has not confirmed. The request runs its drafts together with its known tokens, keeps the drafts that were
right, and drops the others.

The model is the one of `serving_loop.py`, beside this file.

    python examples/beams_and_drafts.py
"""

import torch
from serving_loop import HEAD_DIM, HEADS, PAGE_SIZE, Model

from pagewire import KVCacheParams, PagedKVCacheManager, TextContext

MAX_LENGTH, NEW_TOKENS, BEAMS, GUESSES = 64, 16, 3, 4
PROMPT = list(range(14))


def beam_search(manager: PagedKVCacheManager, model: Model) -> list[tuple[float, list[int]]]:
    """Returns the `BEAMS` best continuations of the prompt, the likeliest first, each with its log probability."""
    beams = [(0.0, TextContext(PROMPT, MAX_LENGTH, request_id="beam"))]
    manager.external_claim("beam")
    for step in range(NEW_TOKENS):
        requests = [request for _, request in beams]
        for request in requests:
            manager.maybe_reserve(request)
        (inputs,) = manager.fetch(requests)
        candidates: list[tuple[float, int, int]] = []
        for row, (score, request) in enumerate(beams):
            scores = (score + model.logits(request, inputs, row)[-1].log_softmax(-1)).topk(BEAMS)
            more: list[tuple[float, int]] = list(zip(scores.values.numpy(), scores.indices.numpy(), strict=True))
            candidates += [(float(total), row, int(token)) for total, token in more]
        best = sorted(candidates, reverse=True)[:BEAMS]

        # The model has computed these tokens. `step` tells the manager, which can then fork the requests.
        for request in requests:
            request.update(0)  # a placeholder for the token that each beam chooses below
        manager.step(requests)
        chosen: list[tuple[float, TextContext]] = []
        for place, (score, row, token) in enumerate(best):
            parent = requests[row]
            child = TextContext([*parent.tokens[:-1].tolist(), token], MAX_LENGTH, request_id=f"beam-{step}-{place}")
            if not manager.fork(parent, child):
                raise SystemExit("too few pages for another beam")
            chosen.append((score, child))
        for request in requests:
            manager.release(request.request_id)
        beams = chosen
    for _, request in beams:
        manager.release(request.request_id)
    return [(score, request.tokens.tolist()) for score, request in beams]


def speculate(manager: PagedKVCacheManager, model: Model, guesser: list[int]) -> tuple[list[int], int]:
    """Decodes greedily with guesses. Returns the tokens, and how often the model ran."""
    request, runs = TextContext(PROMPT, MAX_LENGTH, request_id="draft"), 0
    end = len(PROMPT) + NEW_TOKENS
    with manager.claim(request):
        while request.end_idx < end:
            # Append guesses to the known tokens. `num_steps` reserves room for them.
            known, start = request.end_idx, request.start_idx
            guesses = guesser[known : min(known + GUESSES, end - 1)]
            manager.maybe_reserve(request, num_steps=1 + len(guesses))
            for guess in guesses:
                request.update(guess)
            request.set_token_indices(start_idx=start)  # run the last known token and all guesses
            (inputs,) = manager.fetch([request])
            # The model's own tokens: one for the position of each guess, and one after the last guess.
            found = model.run(request, inputs, 0)[-1 - len(guesses) :].numpy().tolist()
            runs += 1

            # Keep the guesses before the first one that the model would not have chosen. Append the model's own token.
            right = next((at for at, guess in enumerate(guesses) if guess != found[at]), len(guesses))
            request.set_token_indices(active_idx=known + right, end_idx=known + right)
            request.update(found[right])
            manager.step([request])
    return request.tokens.tolist(), runs


def log_probability(model: Model, tokens: list[int]) -> float:
    """Returns the log probability of the tokens after the prompt, computed without a cache."""
    scores = model.logits_without_cache(tokens[:-1])[len(PROMPT) - 1 :].log_softmax(-1)
    return float(scores.gather(1, torch.tensor(tokens[len(PROMPT) :])[:, None]).sum())


def main() -> None:
    """Runs beam search and speculative decoding, and compares both with the model's results without a cache."""
    params = KVCacheParams(torch.float32, HEADS, HEAD_DIM, enable_prefix_caching=True, page_size=PAGE_SIZE)
    manager = PagedKVCacheManager(
        params, max_batch_size=8, max_seq_len=MAX_LENGTH, num_layers=1, devices=["cpu"], available_cache_memory=1 << 20
    )
    model = Model()
    for score, tokens in beam_search(manager, model):
        expected = log_probability(model, tokens)
        if abs(score - expected) > 1e-3:
            raise SystemExit(f"beam {tokens}: the log probability is {score}, expected {expected}")
        print(f"a beam of log probability {score:.2f} ends with {tokens[-4:]}")

    greedy = list(PROMPT)
    while len(greedy) < len(PROMPT) + NEW_TOKENS:
        greedy.append(model.run_without_cache(greedy))
    # The tokens of this guesser are those of the model, except that every sixth one is wrong.
    guesser = [token if at % 6 else 0 for at, token in enumerate(greedy)]
    tokens, runs = speculate(manager, model, guesser)
    if tokens != greedy:
        raise SystemExit(f"with guesses {tokens}, without {greedy}")
    print(f"{NEW_TOKENS} tokens in {runs} runs, equal to those without guesses")
    manager.check()
    manager.close()


if __name__ == "__main__":
    main()
