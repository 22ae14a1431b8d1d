"""The rows of the comparison: a question, our figure, the figure of each peer that answers it, and the target."""

from __future__ import annotations

from typing import NamedTuple

MAX = ("max257", "max-legacy", "max-jenga")


class Question(NamedTuple):
    """One row.

    Attributes:
        text: what is measured; in microseconds, where it says nothing else.
        ours: the name of our figure.
        target: the most that it may be, or None.
        max: the name of the figure of MAX's managers.
        vllm: the name of vLLM's.
        unit: microseconds are divided by it.
    """

    text: str
    ours: str
    target: float | None = None
    max: str = ""
    vllm: str = ""
    unit: float = 1.0

    def of(self, peer: str) -> str:
        """The name of the peer's figure; empty where it has none."""
        return self.max if peer in MAX else self.vllm if peer == "vllm" else ""


def _prompts() -> list[Question]:
    targets = {("sha256", 4096): 170, ("sha256", 32_768): 1000, ("xxh3_128", 4096): 100, ("xxh3_128", 32_768): 500}
    questions: list[Question] = []
    for page in (16, 128):
        for case in ("cold", "warm", "evicting"):
            for (algorithm, length), target in targets.items():
                theirs = "xxhash" if algorithm == "xxh3_128" else algorithm
                questions.append(
                    Question(
                        f"reserve {length:,} tokens, {case}, {algorithm}, pages of {page}",
                        f"{case} {page} {length} {algorithm}",
                        target if page == 16 and case != "evicting" else None,
                        f"{case} {page} {length}",
                        f"{case} {page} {length} {theirs}",
                    )
                )
    return questions


# MAX's figure leaves `update` out, ours has it. vLLM's is allocation, append and hash; it builds no table there.
QUESTIONS = (
    Question("decode step, 1,024 requests, Batch", "decode 16 1024 Batch", 150, "decode 16 1024", "decode 16 1024"),
    Question("the same, plain calls", "decode 16 1024 per request", 1500, "decode 16 1024", "decode 16 1024"),
    Question("decode step, 1 request, Batch", "decode 16 1 Batch", 20, "decode 16 1", "decode 16 1"),
    Question("the same, plain calls", "decode 16 1 per request", 20, "decode 16 1", "decode 16 1"),
    Question("decode step, 1,024 requests, Batch, pages of 128", "decode 128 1024 Batch", None, "decode 128 1024"),
    Question("the same, plain calls", "decode 128 1024 per request", None, "decode 128 1024"),
    *_prompts(),
    Question("next turn at 32,768 tokens, context kept", "next turn kept"),
    Question("next turn at 32,768 tokens, hasher kept", "next turn hasher kept"),
    Question("next turn at 32,768 tokens, new context, sha256", "next turn new", None, "", "warm 16 32768 sha256"),
    Question("publish 2,048 pages (step)", "publish 16 32768 sha256", None, "publish 16 32768"),
    Question("release 2,048 pages", "release 16 32768", 40, "release 16 32768", "release 16 32768"),
    Question("evict, per page, small pool", "evict 32768", 0.3, "evict", "evict"),
    Question("evict, per page, 4M pages", "evict 4000000", 0.3),
    Question("memory per page, 1M pages, all published, B", "memory 1M", 100, "", "memory 1M"),
    Question("build a pool of 1M pages, ms", "build 1M", 100, "", "build 1M", 1e3),
    Question("gc pass with 1M pages, ms", "gc 1M", None, "", "gc 1M", 1e3),
)
