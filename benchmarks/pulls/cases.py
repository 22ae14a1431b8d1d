"""The cases of pulls: pairs of engines, numbers of pages, and where the pages lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.pulls.engines import HEAD_MAJOR, TOKENS, Spec
from transfer.plan.shapes import PACKED_HND

KIB = 1 << 10
HEAD_BYTES = 4 * KIB
"""The bytes of one layer of a page of 16 tokens."""

ACROSS_NHD = "layer,side,token,head,dim"
ACROSS_HND = "layer,side,head,token,dim"
ORDERS = {"head-major": HEAD_MAJOR, "HND": ACROSS_HND, "NHD": ACROSS_NHD, "a tensor a layer": PACKED_HND}
TOPOLOGIES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "equal": ({}, {}),
    "TP 2→1": ({"tp": 2}, {}),
    "TP 1→2": ({}, {"tp": 2}),
    "TP 1→4": ({}, {"tp": 4}),
    "PP 2→1": ({"pp": 2}, {}),
    "PP 1→2": ({}, {"pp": 2}),
    "pages 16→64": ({}, {"page_size": 64}),
    "pages 64→16": ({"page_size": 64}, {}),
}
"""For each topology, how source and reader differ from a plain engine."""

_POOL_BYTES = 512 << 20
_FINE_BYTES = 16 << 20


class Case(NamedTuple):
    """One pair of engines and one kind of pull.

    Attributes:
        topology: key of `TOPOLOGIES`.
        order: key of `ORDERS`, the same on both sides.
        page_bytes: bytes of a page of 16 tokens of the whole model.
        pages: number of such pages that a pull reads.
        scattered: whether the pages lie at random positions in both pools instead of side by side.
        huge: whether both pools lie in huge pages.
        heads: KV heads of the model.
    """

    topology: str
    order: str
    page_bytes: int
    pages: int
    scattered: bool = True
    huge: bool = True
    heads: int = 4

    @property
    def num_bytes(self) -> int:
        """Bytes of one pull, over all ranks."""
        return self.page_bytes * self.pages

    def specs(self) -> tuple[Spec, Spec]:
        """The engines of the source and of the reader."""
        pages = max(2 * self.pages, _POOL_BYTES // self.page_bytes)
        made: list[Spec] = []
        for name, differs in zip(("source", "reader"), TOPOLOGIES[self.topology], strict=True):
            fields: dict[str, Any] = {
                "name": name,
                "layers": self.page_bytes // (HEAD_BYTES * self.heads),
                "heads": self.heads,
                "pages": pages * TOKENS // differs.get("page_size", TOKENS),
                "order": ORDERS[self.order],
                "huge": self.huge,
            }
            made.append(Spec(**fields | differs))
        return made[0], made[1]


def equal(*, quick: bool) -> Iterator[Case]:
    """Equal layouts with several page sizes and numbers of pages, in order and scattered."""
    sizes = (64 * KIB,) if quick else (16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
    for page_bytes in sizes:
        for pages in (1, 256) if quick else (1, 16, 256, 2048):
            if page_bytes * pages <= 512 << 20:
                for scattered in (True, False) if pages > 1 else (True,):
                    yield Case("equal", "head-major", page_bytes, pages, scattered)


def topologies(*, quick: bool) -> Iterator[Case]:
    """Yields cases in which the sides split the model differently, and cases with other page orders.

    The sizes are chosen so that head-major runs with TP have 64 and 256 KiB.
    """
    parts = {"TP 2→1": 2, "TP 1→2": 2, "TP 1→4": 4}
    for run in (64 * KIB,) if quick else (64 * KIB, 256 * KIB):
        for topology, share in parts.items():
            yield Case(topology, "head-major", run * share, (256 if quick else 1024) * 64 * KIB // run // share)
    if quick:
        return
    for topology in ("PP 2→1", "PP 1→2"):
        yield Case(topology, "head-major", 1024 * KIB, 128)
    for topology in ("pages 16→64", "pages 64→16"):
        yield Case(topology, "head-major", 64 * KIB, _FINE_BYTES // (64 * KIB))
    for order in ("HND", "NHD", "a tensor a layer"):
        for topology in ("equal", "TP 1→2", "TP 2→1"):
            fine = order == "NHD" and topology != "equal"
            yield Case(topology, order, 256 * KIB, (_FINE_BYTES if fine else 128 << 20) // (256 * KIB))


def shares(*, quick: bool) -> Iterator[Case]:
    """Measures the gain of head-major pages and of huge pages, with TP 1 to 2 and pages of 256 KiB."""
    for huge in (False, True):
        for order in ("HND", "head-major"):
            yield Case("TP 1→2", order, 256 * KIB, 64 if quick else 512, huge=huge)


VLLM_BLOCKS = ((4, 4, 2048), (16, 4, 512), (64, 1, 2048))
"""Layers, heads and blocks of the pulls of vLLM's connector. Our pulls use the same layout, with one tensor for each
layer.
"""
QUICK_VLLM_BLOCKS = ((4, 4, 256),)


def as_vllm(*, quick: bool) -> Iterator[Case]:
    """The cases that vLLM's connector also runs, in 4 KiB pages (torch's default) and in huge pages."""
    for layers, heads, blocks in QUICK_VLLM_BLOCKS if quick else VLLM_BLOCKS:
        for huge in (False, True):
            yield Case("equal", "a tensor a layer", layers * heads * HEAD_BYTES, blocks, huge=huge, heads=heads)
