"""A speculating engine, as the docstring of `kvcache.states.state_pages` describes it. It drives a manager and a runner
with guessed tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from kvcache.replica.context import TextContext
from scheduler_adapters.hf.runner import HFRunner, is_rounding_tie
from scheduler_adapters.hf.tiny import ByteTokenizer
from tests.scheduler_adapters.conftest import _own_logits
from tests.scheduler_adapters.serving import new_manager, own_tokens

PAGE, NEW = 8, 24
SYSTEM = ByteTokenizer().encode("What all of these prompts begin with. ")
ENDS = ("Who wrote it?", "And who read it, some time later?", "x", "Was it long?")
PROMPTS = [[*SYSTEM, *ByteTokenizer().encode(text)[1:]] for text in ENDS]
LONGEST_AGAIN = 16


class Engine:
    """An engine with running, waiting and finished requests.

    `share` is the share of guesses that are right. With `across`, guesses may end anywhere, not only at the end of a
    page. `manager` replaces the manager of `pages` pages.
    """

    def __init__(
        self,
        model: Any,
        share: float,
        most: int = 3,
        *,
        budget: int = 64,
        pages: int = 200,
        rows: int = 8,
        copies: int = 16,
        shards: int = 1,
        across: bool = False,
        manager: Any = None,
        seed: int = 0,
        **states: Any,
    ) -> None:
        self.model, self.share, self.most, self.budget, self.across = model, share, most, budget, across
        options = {} if model.config.model_type == "llama" else {"state_copies": copies, **states}
        self.manager = manager or new_manager(
            model, pages, PAGE, rows, states=options, n_devices=shards, enable_prefix_caching=True
        )
        self.runner = HFRunner(model, self.manager.states)
        self.random = random.Random(seed)
        self.answers: list[list[int]] = []
        self.waiting: list[TextContext] = []
        self.running: dict[str, TextContext] = {}
        self.done: dict[str, TextContext] = {}
        self.drafted = self.accepted = self.without = self.set_back = self.gave_way = 0

    @property
    def has_states(self) -> bool:
        return bool(self.manager.states)

    def knows(self, prompts: Iterable[list[int]]) -> list[list[int]]:
        """Adds the known answers to these prompts, from which the guesses are taken."""
        self.answers = [[*prompt, *own_tokens(self.model, prompt, NEW)] for prompt in prompts]
        return self.answers

    def add(self, name: str, prompt: list[int]) -> None:
        self.waiting.append(TextContext(prompt, 4096, name))

    def serve(self, prompts: Iterable[list[int]], each: Callable[[], None] = lambda: None) -> list[list[int]]:
        """Serves the prompts until the answers are as long as the known answers. Returns the answers."""
        self.done = {}
        for at, prompt in enumerate(prompts):
            self.add(f"r{at}", prompt)
        while self.waiting or self.running:
            self.step()
            each()
        return [self.done[name].tokens.tolist() for name in sorted(self.done)]

    def step(self) -> None:
        self.admit()
        batch = [context for context in list(self.running.values()) if self.reserve(context)]
        counts = [self.guess(context) for context in batch]
        found = self.runner.verify(batch, self.manager.fetch(batch), counts)
        for context, count, tokens in zip(batch, counts, found, strict=True):
            self.take_up(context, count, tokens)
        before = [context.start_idx for context in batch]
        self.manager.step(batch)
        self.set_back += [context.start_idx for context in batch] != before
        self.manager.check()
        for context in batch:
            if any(len(a) <= context.end_idx and a == context.tokens[: len(a)].tolist() for a in self.answers) or (
                context.end_idx >= max(map(len, self.answers))
            ):
                self.done[context.request_id] = self.running.pop(context.request_id)
                self.manager.release(context.request_id)

    def admit(self) -> None:
        while self.waiting and self.manager.admission(self.waiting[0]).fits:
            context = self.waiting.pop(0)
            self.manager.external_claim(context.request_id)
            if not self.manager.maybe_reserve(context):
                self.manager.release(context.request_id)
                self.waiting.insert(0, context)
                return
            self.running[context.request_id] = context

    def reserve(self, context: TextContext) -> bool:
        if not self.manager.maybe_reserve(context, 1 + self.most):
            self.give_way(context)
            return False
        context.set_token_indices(active_idx=min(context.active_idx, context.start_idx + max(2, self.budget)))
        return True

    def give_way(self, context: TextContext) -> None:
        self.manager.release(context.request_id)
        self.manager.check()
        del self.running[context.request_id]
        self.waiting.append(context)
        self.gave_way += 1

    def guess(self, context: TextContext) -> int:
        """Appends guesses to the known tokens of a request. Returns their number."""
        start, end = context.start_idx, context.end_idx
        most = self.most if self.across else min(self.most, -end % PAGE)
        if not most or context.active_idx < end or end - start > LONGEST_AGAIN:
            return 0
        known = context.tokens.tolist()
        coming = next((a[end:] for a in self.answers if a[:end] == known), [])
        coming = coming[: self.random.randint(1, most)]
        if not coming:
            return 0
        if not self.runner.draft(context.request_id):
            self.without += 1
            return 0
        for token in coming:
            context.update(token if self.random.random() < self.share else (token + 1) % 259)
        context.set_token_indices(start_idx=start)
        self.drafted += len(coming)
        return len(coming)

    def take_up(self, context: TextContext, count: int, found: list[int]) -> None:
        """Removes the wrong guesses among the last `count` guesses, and appends the next token."""
        end, right = context.end_idx, 0
        guesses = context.tokens[end - count : end].tolist()
        while right < count and guesses[right] == found[right]:
            right += 1
        if wrong := count - right:
            context.set_token_indices(active_idx=end - wrong, end_idx=end - wrong)
        context.update(found[right])
        self.accepted += right


def assert_equal(model: Any, answers: list[list[int]], found: list[list[int]]) -> None:
    """Asserts that answers are equal. Up to half of the answers may differ if two tokens or two experts are tied. In
    this case the model itself gives both results.
    """
    differ = 0
    for answer, tokens in zip(answers, found, strict=True):
        ours = tokens[: len(answer)]
        if ours == answer:
            continue
        differ += 1
        at = next(at for at, pair in enumerate(zip(ours, answer, strict=False)) if pair[0] != pair[1])
        whole = int(_own_logits(model, answer[:at]).argmax())
        assert whole == ours[at] or is_rounding_tie(model, answer[:at], ours[at:], answer[at:])
    assert differ <= max(1, len(answers) // 2)
