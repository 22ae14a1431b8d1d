"""The gain from more memory on a trace: `pagewire replay` with the pages of each choice, compared with the optimum."""

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

_MEMORY = (0.25, 0.5, 2.0, 4.0)  # times what there is
_HOSTS = (2, 4)
_TIERS = (1, 4)  # times the pages of a host
MOST_POINTS = 1 + len(_MEMORY) + len(_HOSTS) + len(_TIERS)
_ROUNDED = 1.05  # a state's size, at most, once it is whole pages
_MOST_BLOCKS = 1 << 26  # the books of that many take gigabytes


class TracePoint(msgspec.Struct, frozen=True):
    """What a trace hits with some memory.

    Attributes:
        memory: bytes of each device, for pages.
        hosts: that share the requests, each with all its devices.
        tier: bytes of each host's tier below its pages.
        blocks: of the trace that all pools hold.
        tier_blocks: of the trace that all tiers hold.
        bytes: of pools and tiers together.
        hit_pct: blocks of prompts that were there.
        lru_pct: of them those that a plain LRU of one pool hits, without a tier.
        optimum_pct: those that one pool of all this memory can hit at best; these two are of pages alone.
        points: of hits more than with what there is.
        saved_s: seconds of prefill less than with what there is, over the trace.
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
    """The hits with the present memory, and with each change of it."""

    requests: int
    block_tokens: int
    prefill_s: float  # of the whole trace, were nothing cached
    now: TracePoint
    others: list[TracePoint]


@dataclass(frozen=True, slots=True)
class TraceQuestion:
    """What is replayed: a host's devices as `choice` has them, tokens of a block of the trace, and prefill's speed."""

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
        """What a block is: a page, or as many as it takes for a state to be rounded up little; a server's at most."""
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
    """Replay the trace with the given memory, and with less and more of it.

    Sizes that are too small for the longest request are left out; `ReplayError` if the given one is, or if the tier
    does not hold two states. Recurrent states lie among the pages, as `share_memory` has them.
    """
    if question.block_tokens % question.page_size:
        raise PlanError(f"--block-tokens is {question.block_tokens}: no multiple of the page size {question.page_size}")
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
    """Blocks of the trace that the pages of one replica hold."""
    page = question.choice.token_bytes * question.page_size
    return memory // page // (question.block_tokens // question.page_size)


def _point(trace: Sequence[Blocks], question: TraceQuestion, memory: int, hosts: int, tier: int) -> TracePoint:
    replicas = hosts * question.choice.dp
    blocks, below = _blocks(question, memory) * replicas, hosts * (tier // question.block_bytes)
    most = _MOST_BLOCKS // question.divided.block_pages
    if blocks + below > most:
        raise PlanError(f"--trace: {blocks + below:,} blocks of {question.block_tokens} tokens: {most:,} at most")
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
    """Hits against memory, hosts and tiers, and the optimum. Raises as `plots.pyplot`; `OSError`."""
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
