"""Transfers a request between the two engines of random pairs, in real processes over real NIXL.

Every byte is compared.

    python -m tests.transfer.pairs [--count 300] [--seed 0] [--only NUMBER] [--json FILE]

The report also says what vLLM 0.33's connector does with each pair, by the observed rules of its worker.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.transfer.pair_model import GroupSpec, Pair, Side, group_config
from tests.transfer.pair_ranks import EngineUnderTest, Rank, children, transfer

MOST_RANKS = 4
LAYOUTS = ("NHD", "HND", "blocks-first", "blocks-first-HND", "packed", "packed-NHD", "LHBNC")
CROSS_LAYER = ("cross-layer", "cross-layer-NHD", "BLHNC", "BLNHC", "BHLNC")
FAMILIES = (
    "tp 1->2",
    "tp 2->1",
    "tp 1->4",
    "tp 4->1",
    "tp 2->4",
    "tp 4->2",
    "tp 2->3",
    "tp 3->2",
    "replicated at the source 4->2",
    "replicated at the source 4->1",
    "replicated at the reader 2->4",
    "replicated at both 4->3",
    "replicated at both 3->4",
    "pp 1->2",
    "pp 2->1",
    "pp 3->2 and tp",
    "pages smaller at the source",
    "pages larger at the source",
    "pages that do not divide",
    "kernel pages",
    "cross-layer to per-layer",
    "per-layer to cross-layer",
    "cross-layer to cross-layer",
    "mla 1->2",
    "mla 2->1",
    "mla pages differ",
    "sliding window",
    "sliding window, pages differ",
    "mamba 1->2",
    "mamba 2->1",
    "mamba with replicated groups 1->4",
    "hybrid of three kinds",
    "prefix there",
    "all there",
    "host buffers",
    "anything",
)


def draw(number: int, seed: int = 0) -> tuple[str, Pair]:
    """Draws the pair with this number. The family of the pair follows from the number. Everything else is random."""
    rng = random.Random(f"{seed}/{number}")
    family = FAMILIES[number % len(FAMILIES)]
    source, reader = _side(rng), _side(rng)
    groups: tuple[GroupSpec, ...] = (GroupSpec(layers=tuple(range(rng.choice((2, 3)))), heads=rng.choice((4, 6, 8))),)
    draft = _cut(family, (groups, source, reader))
    change = CHANGES.get(re.split(r"[ ,]", family)[0])
    groups, source, reader = draft if change is None else change(rng, family, draft)
    return family, _with_blocks(rng, Pair(groups, source, reader, rng.randrange(1, 60)), family)


def _side(rng: random.Random) -> Side:
    layout = rng.choice(LAYOUTS)
    dimensions = 4 if layout.startswith(("packed", "LHBNC")) else 5
    order = tuple(rng.sample(range(dimensions), dimensions)) if rng.random() < 0.25 else ()
    return Side(
        layout=layout,
        order=order,
        block_size=rng.choice((4, 8, 16)),
        apart=layout in {"NHD", "HND"} and rng.random() < 0.3,
        channels_first=rng.random() < 0.7,
    )


Draft = tuple[tuple[GroupSpec, ...], Side, Side]


def _replicated(rng: random.Random, family: str, draft: Draft) -> Draft:
    groups, source, reader = draft
    return (replace(groups[0], heads=1 if "4->1" in family and rng.random() < 0.5 else 2),), source, reader


def _pages(rng: random.Random, family: str, draft: Draft) -> Draft:
    groups, source, reader = draft
    size, more = rng.choice((4, 8)), rng.choice((2, 4))
    if family == "kernel pages":
        source = replace(source, block_size=size * 4, kernel_block_size=size * rng.choice((1, 2)))
        return groups, source, replace(reader, block_size=size * more, kernel_block_size=size)
    sizes = {
        "pages smaller at the source": (size, size * more),
        "pages larger at the source": (size * more, size),
        "pages that do not divide": rng.choice(((6, 4), (4, 6), (12, 8), (8, 12), (5, 7), (16, 12))),
    }[family]
    return groups, replace(source, block_size=sizes[0]), replace(reader, block_size=sizes[1])


def _cross_layer(rng: random.Random, family: str, draft: Draft) -> Draft:
    groups, *sides = draft
    for at, kind in enumerate(family.split(" to ")):
        if kind == "cross-layer":
            sides[at] = replace(sides[at], layout=rng.choice(CROSS_LAYER), apart=False, order=())
    tp = rng.choice(((1, 1), (1, 2), (2, 1)))
    return groups, replace(sides[0], tp=tp[0]), replace(sides[1], tp=tp[1])


def _latent(rng: random.Random, family: str, draft: Draft) -> Draft:
    _, source, reader = draft
    source, reader = replace(source, order=()), replace(reader, order=(), block_size=source.block_size)
    if "differ" in family:
        source, reader = replace(source, block_size=4, tp=2), replace(reader, block_size=rng.choice((16, 6)), tp=2)
    return (GroupSpec(kind="mla", dim=12),), source, reader


def _window(rng: random.Random, family: str, draft: Draft) -> Draft:
    groups, source, reader = draft
    groups = (*groups, GroupSpec(kind="sliding_window", layers=(7, 6), window=rng.choice((2, 9, 20))))
    source, reader = replace(source, tp=rng.choice((1, 2))), replace(reader, tp=rng.choice((1, 2)))
    return groups, source, reader if "differ" in family else replace(reader, block_size=source.block_size)


def _mamba(rng: random.Random, family: str, draft: Draft) -> Draft:
    groups = (GroupSpec(kind="mamba", state_heads=rng.choice((4, 8)), state_groups=1 if "4" in family else 2),)
    return groups, *draft[1:]


def _hybrid(rng: random.Random, family: str, draft: Draft) -> Draft:  # noqa: ARG001 -- one signature for all
    groups = (
        GroupSpec(layers=(0, 3)),
        GroupSpec(kind="mamba", layers=(1, 4), state_groups=1),
        GroupSpec(kind="sliding_window", layers=(2, 5), window=11),
    )
    _, source, reader = draft
    source = replace(source, tp=rng.choice((1, 2)), pp=rng.choice((1, 2)))
    return groups, source, replace(reader, tp=rng.choice((1, 2)))


def _host_buffers(rng: random.Random, family: str, draft: Draft) -> Draft:  # noqa: ARG001 -- one signature for all
    groups, source, reader = draft
    return groups, replace(source, host_buffer=rng.random() < 0.7, tp=2), replace(reader, host_buffer=True)


def _anything(rng: random.Random, family: str, draft: Draft) -> Draft:  # noqa: ARG001 -- one signature for all
    groups, source, reader = draft
    source = replace(source, tp=rng.choice((1, 2, 3, 4)))
    reader = replace(reader, tp=rng.choice((1, 2)), pp=rng.choice((1, 2)), block_size=rng.choice((5, 8, 16)))
    return groups, source, reader


CHANGES = {
    "replicated": _replicated,
    "pages": _pages,
    "kernel": _pages,
    "cross-layer": _cross_layer,
    "per-layer": _cross_layer,
    "mla": _latent,
    "sliding": _window,
    "mamba": _mamba,
    "hybrid": _hybrid,
    "host": _host_buffers,
    "anything": _anything,
}
"""Maps the first word of a family's name to the function that changes a draft for this family."""


def _cut(family: str, draft: Draft) -> Draft:
    """Sets the ranks of both sides by the ratio in the family's name."""
    groups, source, reader = draft
    ratio = next((word for word in family.split() if "->" in word), "")
    if not ratio:
        return draft
    one, other = (int(part) for part in ratio.split("->"))
    if not family.startswith("pp"):
        return groups, replace(source, tp=one), replace(reader, tp=other)
    tp = 2 if "and tp" in family else 1
    return (GroupSpec(layers=(0, 1, 2, 3)),), replace(source, pp=one), replace(reader, pp=other, tp=tp)


def _with_blocks(rng: random.Random, pair: Pair, family: str) -> Pair:
    """Draws the blocks on both sides, in any order, and the tokens that the reader already has. Sometimes there are
    more blocks than needed.
    """
    size = pair.reader.block_size
    if family == "all there":
        pair = replace(pair, num_tokens=size * rng.randrange(1, 4))
        pair = replace(pair, computed=pair.num_tokens)
    elif rng.random() < (1.0 if family == "prefix there" else 0.3):
        pair = replace(pair, computed=rng.randrange((pair.num_tokens - 1) // size + 1) * size)
    extra, source_blocks, reader_blocks = rng.choice((0, 0, 1)), [], []
    for spec in pair.groups:
        state = spec.kind == "mamba"
        there, here = group_config(spec, pair.source), group_config(spec, pair.reader)
        count = 1 if state else -(-pair.num_tokens // there.block_size) + extra
        source_blocks.append(tuple(rng.sample(range(pair.source.num_blocks), count)))
        needed = max(pair.computed, here.needed(pair.num_tokens))
        begin = max(pair.computed, needed // here.block_size * here.block_size) // here.block_size
        count = 1 if state else max(0, -(-pair.num_tokens // here.block_size) - begin) + extra
        reader_blocks.append(tuple(rng.sample(range(pair.reader.num_blocks), count)))
    return replace(pair, source_blocks=tuple(source_blocks), reader_blocks=tuple(reader_blocks))


def vllm_refusal(pair: Pair) -> str:
    """Returns why vLLM 0.33 refuses a pair, or an empty text if vLLM accepts it. The function applies vLLM's rules
    without running vLLM.
    """
    source, reader = pair.source, pair.reader
    attention = [spec for spec in pair.groups if spec.kind != "mamba"]
    heads = [1 if spec.kind == "mla" else spec.heads for spec in attention]
    split = bool(attention) and any(spec.kind != "mla" for spec in attention)
    hybrid = len(pair.groups) > 1 or not attention
    ours, theirs = (group_config(pair.groups[0], side).page_size for side in (reader, source))
    layouts = [(side.layout, side.apart, side.order) for side in (source, reader)]
    heads_first = source.layout in {"HND", "blocks-first-HND", "packed", "LHBNC"}
    rules = {
        "tensor-parallel sizes must divide": max(source.tp, reader.tp) % min(source.tp, reader.tp) > 0,
        "no pipeline stages at the reader, nor at the source of a hybrid": reader.pp > 1 or (source.pp > 1 and hybrid),
        "heads must divide among ranks": any(
            count % side.tp and side.tp % count for count in heads for side in (source, reader)
        ),
        "heads replicated at a source of more ranks": split
        and source.tp > reader.tp
        and any(source.tp > count for count in heads),
        "pages of the reader must be a multiple of the source's": theirs > ours or ours % theirs > 0,
        "pages that differ, in a hybrid or at a source of more ranks": ours != theirs
        and (hybrid or source.tp > reader.tp),
        "the layout must be one and the same": split and layouts[0] != layouts[1],
        "other ranks need heads before tokens": split and source.tp != reader.tp and not heads_first,
    }
    return next((reason for reason, refused in rules.items() if refused), "")


def run(count: int, seed: int, ranks: Sequence[Rank], only: int | None = None) -> list[dict[str, object]]:
    """Transfers pairs one after another. Returns one row with the result for each pair."""
    rows: list[dict[str, object]] = []
    for number in range(count) if only is None else [only]:
        family, pair = draw(number, seed)
        begin = time.monotonic()
        problem = ""
        source = EngineUnderTest(ranks[: pair.source.tp * pair.source.pp], pair.groups, pair.source, f"p{number}")
        there = len(source.ranks)
        reader = EngineUnderTest(
            ranks[there : there + pair.reader.tp * pair.reader.pp], pair.groups, pair.reader, f"d{number}"
        )
        try:
            transfer(pair, source, reader)
            found = [
                f"rank {rank}: {text}" for rank, texts in enumerate(reader.call("compare", pair)) for text in texts
            ]
            problem = "; ".join([*reader.failed.values(), *found][:3])
        except (AssertionError, RuntimeError) as error:
            problem = repr(error)
        stats = reader.call("stats")
        rows.append(
            {
                "number": number,
                "family": family,
                "problem": problem,
                "vllm": vllm_refusal(pair),
                "bytes": sum(one.num_bytes for one in stats),
                "runs": sum(one.num_runs for one in stats),
                "seconds": round(time.monotonic() - begin, 2),
                "pair": repr(pair),
            }
        )
        source.close()
        reader.close()
        if problem:
            sys.stderr.write(f"{number} {family}: {problem}\n  {pair}\n")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.transfer.pairs", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begin = time.monotonic()
    ranks = children(2 * MOST_RANKS)
    try:
        rows = run(options.count, options.seed, ranks, options.only)
    finally:
        for rank in ranks:
            rank.stop()
    failed = sum(bool(row["problem"]) for row in rows)
    refused = Counter(str(row["vllm"]) for row in rows)
    lines = [f"{len(rows)} pairs in {time.monotonic() - begin:.0f} s: {len(rows) - failed} equal, {failed} not"]
    lines.append(f"vLLM 0.33 takes {refused.pop('', 0)}, refuses {sum(refused.values())}:")
    lines += [f"  {count:4} {reason}" for reason, count in refused.most_common()]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
