"""The rows of the comparison.

Each row has a question, our figure, the peers' figures, and a target. The programs differ in these points:

- A decode step of ours and of MAX's manager is reserve, tables and step; `step` hashes and publishes. Our figure also
  includes the update with the new tokens, which MAX's leaves out. A step of vLLM is allocation, append and hash; no
  table is built there. A step of SGLang does less: it allocates a slot for each request's token and writes the slot to
  the request's row. It hashes and caches nothing.
- Reserving a prompt is its hash, its lookup and the allocation of its pages. The request itself exists already. Ours
  and vLLM's figures are for the same hash function; MAX's hash has 64 bits. vLLM publishes the pages when it allocates
  them, but ours and MAX's are published in `step`. For a new prompt the fair comparison is `reserved and published`.
- `next turn` is a request that continues a conversation by 256 tokens. No peer has an equivalent of `context kept` and
  `hasher kept`. The fair comparisons are `new context` and, starting from the list of tokens of an HTTP request,
  `from a list`.
- vLLM's script turns the garbage collector off while it measures, except for `next turn`. With ours and MAX's it is on.
- Our pages are released into a pool that was in use for a long time. The peers' pages are released into a new pool.
- The memory of vLLM and MAX is that of their block pool alone, including what the requests that filled it have freed.
  Ours is that of the whole manager, after malloc has returned freed memory.
- Ours is a minimum of 15 samples a round (256 steps), vLLM's of 9 to 25 (64), MAX's of 12 to 100 (60 to 300).
- NIXL alone reads the same pages without a lease and without a fence, so nothing shows that the pages are valid.
"""

from __future__ import annotations

from typing import NamedTuple


class Question(NamedTuple):
    """One row of the comparison.

    Attributes:
        text: what is measured, in microseconds unless it says otherwise.
        ours: the name of our figure.
        target: the highest figure of ours that is acceptable, or None.
        max: name of the figure for MAX's managers.
        vllm: name of vLLM's figure.
        unit: the microseconds are divided by this number.
        nixl: name of the figure of NIXL alone.
        sglang: name of SGLang's figure.
    """

    text: str
    ours: str
    target: float | None = None
    max: str = ""
    vllm: str = ""
    unit: float = 1.0
    nixl: str = ""
    sglang: str = ""

    def of(self, peer: str) -> str:
        """Returns the name of the figure that `peer` has for this row; empty if this peer has no such figure."""
        of = {"max": self.max, "nixl": self.nixl, "sglang": self.sglang, "vllm": self.vllm}
        return next(name for whose, name in of.items() if peer.startswith(whose))


def _step(text: str, step: str, how: str, target: float | None = None) -> Question:
    return Question(text, step + how, target, step, step, sglang=step)


def _prompts() -> list[Question]:
    targets = {("sha256", 4096): 170, ("sha256", 32_768): 1000, ("xxh3_128", 4096): 100, ("xxh3_128", 32_768): 500}
    questions: list[Question] = []
    for page in (16, 128):
        for case in ("cold", "admit", "warm", "evicting"):
            for (algorithm, length), target in targets.items():
                theirs = "xxhash" if algorithm == "xxh3_128" else algorithm
                named = "cold, reserved and published" if case == "admit" else case
                questions.append(
                    Question(
                        f"reserve {length:,} tokens, {named}, {algorithm}, pages of {page}",
                        f"{case} {page} {length} {algorithm}",
                        target if page == 16 and case in {"cold", "warm"} else None,
                        f"{case} {page} {length}",
                        # vLLM publishes reserved pages at once, so it has no figure for reserving alone
                        "" if case in {"cold", "evicting"} else f"{case} {page} {length} {theirs}",
                    )
                )
    return questions


def _pulls() -> list[Question]:
    return [
        Question(f"pull {what} of 64 KiB", f"pull 64 {pages}", nixl=f"pull 64 {pages}")
        for pages, what in ((1, "1 page"), (256, "256 random pages"), (2048, "2,048 random pages"))
    ]


QUESTIONS = (
    _step("decode step, 1,024 requests, Batch", "decode 16 1024", " Batch", 150),
    _step("the same, every context read after it", "decode 16 1024", " Batch, contexts read"),
    _step("the same, plain calls", "decode 16 1024", " per request", 1500),
    _step("decode step, 1 request, Batch", "decode 16 1", " Batch", 20),
    _step("decode step, 1 request, plain calls", "decode 16 1", " per request", 20),
    Question("decode step, 1,024 requests, Batch, pages of 128", "decode 128 1024 Batch", None, "decode 128 1024"),
    Question("the same, plain calls, pages of 128", "decode 128 1024 per request", None, "decode 128 1024"),
    *_prompts(),
    Question("next turn at 32,768 tokens, context kept", "next turn kept"),
    Question("next turn at 32,768 tokens, hasher kept", "next turn hasher kept"),
    Question(
        "next turn at 32,768 tokens, new context, sha256", "next turn new", None, "next turn new", "next turn new"
    ),
    Question(
        "next turn at 32,768 tokens, from a list",
        "next turn new, from a list",
        None,
        "next turn list",
        "next turn list",
    ),
    Question("publish 2,048 pages (step)", "publish 16 32768 sha256", None, "publish 16 32768"),
    Question("release 2,048 pages", "release 16 32768", 40, "release 16 32768", "release 16 32768"),
    Question("evict, per page, small pool", "evict 32768", 0.3, "evict", "evict"),
    Question("evict, per page, 4M pages", "evict 4000000", 0.3),
    Question("memory per page, 1M pages, all published, B", "memory 1M", 100, "memory 1M", "memory 1M"),
    Question("build a pool of 1M pages, ms", "build 1M", 100, "build 1M", "build 1M", 1e3),
    Question("gc pass with 1M pages, ms", "gc 1M", None, "gc 1M", "gc 1M", 1e3),
    *_pulls(),
)
