"""Computes what more memory would gain on a trace. The trace is replayed with each amount of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pagewire import plots
from pagewire.plan.memory import Choice
from pagewire.replay.replay import WHOLE, BlockPages, needed_pages, optimum_hits, replay
from pagewire.replay.trace_hints import Blocks
from scheduler_adapters.errors import PlanError

_MEMORY = (0.25, 0.5, 2.0, 4.0)  # multiples of the given memory for which the trace is replayed
_HOSTS = (2, 4)
_TIERS = (1, 4)  # sizes of a lower tier, in multiples of a host's pages
MOST_POINTS = 1 + len(_MEMORY) + len(_HOSTS) + len(_TIERS)
_ROUNDED = 1.05  # how much larger than its exact size a state may become when it is rounded up to whole pages
_MOST_BLOCKS = 1 << 26  # a replay with more blocks would take gigabytes of memory


class TracePoint(msgspec.Struct, frozen=True):
    """The hits of the trace with one amount of memory.

    Attributes:
        memory: bytes of each device that pages get.
        hosts: hosts that share the requests, each with all its devices.
        tier: bytes of the tier below each host's pages.
        blocks: number of blocks of the trace that fit into all pools together.
        tier_blocks: number of blocks of the trace that fit into all tiers together.
        bytes: bytes of all pools and tiers together.
        hit_pct: percentage of the prompts' blocks that were hits in the manager.
        lru_pct: percentage of hits in a plain LRU with one pool of `blocks` blocks and no tier.
        optimum_pct: the best possible percentage of hits in one pool with the blocks of all pools and tiers. Like
            `lru_pct`, it ignores states.
        points: percentage points of hits gained, compared with the given memory.
        saved_s: seconds of prefill saved over the trace, compared with the given memory.
    """

    memory: int
    hosts: int
    tier: int
    blocks: int
    tier_blocks: int
    bytes: int
    hit_pct: float
    lru_pct: float
    optimum_pct: float
    points: float = 0.0
    saved_s: float = 0.0


class TracePlan(msgspec.Struct, frozen=True):
    """The hits of a trace with the given memory (`now`), and with each other amount of memory (`others`)."""

    requests: int
    block_tokens: int
    prefill_s: float  # seconds of prefill that the whole trace takes without a cache
    now: TracePoint
    others: list[TracePoint]


@dataclass(frozen=True, slots=True)
class TraceQuestion:
    """The parameters of a replay: the division of a host's devices, the memory, the sizes, and the speed of prefill."""

    choice: Choice
    memory: int
    page_size: int
    block_tokens: int
    prefill_speed: float
    tier: int

    @property
    def block_bytes(self) -> int:
        """The bytes of a block of the trace, on all ranks of a replica."""
        return self.choice.token_bytes * self.choice.tp * self.block_tokens

    @property
    def divided(self) -> BlockPages:
        """The number of pages into which the replay divides each block of the trace.

        Without states, a block is one page. With states, the size of a state is rounded up to whole pages. A block is
        then divided into so many pages that the rounding adds at most 5 % to a state, but never into more pages than
        a real server has for a block.
        """
        block, most = self.choice.token_bytes * self.block_tokens, self.block_tokens // self.page_size
        if not self.choice.state_bytes:
            return WHOLE
        every = (BlockPages(count, -(-self.choice.state_bytes * count // block)) for count in range(1, most + 1))
        enough = self.choice.state_bytes * _ROUNDED
        return next(
            one for one in every if one.block_pages == most or one.state_pages * block <= enough * one.block_pages
        )


def sweep(
    trace: Sequence[Blocks], question: TraceQuestion, progress: Callable[[TracePoint], None] = lambda _: None
) -> TracePlan:
    """Replays the trace with the given memory, with less memory and with more memory.

    Sizes that are too small for the longest request are left out. Recurrent states lie among the pages, as with
    `share_memory`.

    Raises:
        ReplayError: the given memory is too small for the longest request, or the tier is too small for two states.
        PlanError: the block is not a multiple of the page size, or there are too many blocks.
    """
    if question.block_tokens % question.page_size:
        raise PlanError(
            f"--block-tokens is {question.block_tokens}: a multiple of the page size {question.page_size} is needed"
        )
    memory, tier = question.memory, question.tier
    host = question.memory * question.choice.tp * question.choice.dp
    asked = [(int(memory * times), 1, tier) for times in _MEMORY]
    asked += [(memory, hosts, tier) for hosts in _HOSTS]
    asked += [(memory, 1, tier + times * host) for times in _TIERS]
    now = _point(trace, question, memory, 1, tier)
    progress(now)
    longest, refs, others = max(map(len, trace)), sum(map(len, trace)), list[TracePoint]()
    for at in asked:
        if _blocks(question, at[0]) * question.divided.block_pages >= needed_pages(longest, question.divided):
            found = _point(trace, question, *at)
            more = (found.hit_pct - now.hit_pct) / 100
            seconds = more * refs * question.block_tokens / question.prefill_speed
            others.append(msgspec.structs.replace(found, points=100 * more, saved_s=seconds))
            progress(others[-1])
    prefill_s = refs * question.block_tokens / question.prefill_speed
    return TracePlan(len(trace), question.block_tokens, prefill_s, now, others)


def _blocks(question: TraceQuestion, memory: int) -> int:
    """Returns how many blocks of the trace fit into the pages of one replica."""
    page = question.choice.token_bytes * question.page_size
    return memory // page // (question.block_tokens // question.page_size)


def _point(trace: Sequence[Blocks], question: TraceQuestion, memory: int, hosts: int, tier: int) -> TracePoint:
    replicas = hosts * question.choice.dp
    blocks, below = _blocks(question, memory) * replicas, hosts * (tier // question.block_bytes)
    most = _MOST_BLOCKS // question.divided.block_pages
    if blocks + below > most:
        raise PlanError(
            f"--trace: {blocks + below:,} blocks of {question.block_tokens} tokens: at most {most:,} are allowed"
        )
    found = replay(trace, blocks, replicas, host_blocks=below, divided=question.divided)
    best = optimum_hits(trace, blocks + below) if below else found.optimum_hits
    refs = found.block_refs
    return TracePoint(
        memory=memory,
        hosts=hosts,
        tier=tier,
        blocks=blocks,
        tier_blocks=below,
        bytes=hosts * (memory * question.choice.tp * question.choice.dp + tier),
        hit_pct=100 * found.hits / refs,
        lru_pct=100 * found.reference_lru_hits / refs,
        optimum_pct=100 * best / refs,
    )


def draw(found: TracePlan, title: str, path: Path) -> None:
    """Draws the hits against memory, hosts and tiers, and the optimum.

    Raises `OSError`, and the errors of `plots.pyplot`.
    """
    every = [found.now, *found.others]
    now = found.now

    def line(name: str, wanted: Callable[[TracePoint], bool], y: str = "hit_pct", **more: Any) -> plots.Curve:
        chosen = [point for point in every if point is now or wanted(point)]
        return plots.Curve(name, [(point.bytes / 2**30, getattr(point, y)) for point in chosen], **more)

    figure, ((axes,),) = plots.figure(1)
    plots.draw_lines(
        axes,
        [
            line("optimum of one pool", lambda _: True, "optimum_pct", role="limit"),
            line("memory of one host", lambda point: (point.hosts, point.tier) == (1, now.tier)),
            line("hosts of the same memory", lambda point: point.hosts > 1),
            line("a tier below one host", lambda point: point.tier > now.tier),
        ],
        title=title,
        along="GiB of pools and tiers in all",
        up="blocks hit, %",
        logs="x",
    )
    plots.mark(axes, now.bytes / 2**30, "now")
    plots.save(figure, path)
