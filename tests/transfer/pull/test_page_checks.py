"""Tests checksums of pages: the pages that have a checksum, and the number of times that a differing page is read
again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.pulls.layouts import per_layer
from kvcache.layout import PageLayout
from kvcache.replica.block_table import PageCopy
from tests.transfer.wire.test_messages import rank
from transfer.errors import HandshakeError, InvalidEngineError, InvalidTransferError, PullFailedError
from transfer.memory import MemoryType
from transfer.nixl.agent import WORD_BYTES
from transfer.plan.boxes import Box, Group, ShardLayout, check, sub_box
from transfer.plan.plan import plan
from transfer.plan.shapes import BLOCKS_FIRST_NHD, PACKED_NHD, dense
from transfer.pull.page_checks import ATTEMPTS, PageChecks, Verifier, same_pages
from transfer.pull.parts import Part
from transfer.wire.messages import RankMetadata

PAGES = 5
SIZES = PageLayout("bfloat16", 2, 2, 2, 0, 4, 16, 8, "head,layer,side,token,dim")
LAYOUT = dense(SIZES, PAGES)


@pytest.fixture
def pool() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (PAGES, LAYOUT.region_bytes[0] // PAGES)).astype(np.uint8)


def checks_of(pool: np.ndarray) -> PageChecks:
    return PageChecks(LAYOUT, [pool.ctypes.data])


def test_changed_pages_are_named_by_their_places(pool: np.ndarray) -> None:
    checks = checks_of(pool)
    checks.record(0, [4, 1, 2])
    expected = checks.words[0][[1, 2, 4]].copy()
    assert checks.bad(0, [1, 2, 4], expected).tolist() == []
    pool[2, 0] ^= 1
    pool[4, -1] ^= 1
    assert checks.bad(0, [1, 2, 4], expected).tolist() == [1, 2]


@pytest.mark.parametrize("pages", [[PAGES], [0, -1], [1, 1 << 40]])
def test_pages_that_the_pool_does_not_have_are_refused(pool: np.ndarray, pages: list[int]) -> None:
    with pytest.raises(
        InvalidTransferError, match=f"group 0: pages {min(pages)} to {max(pages)} are not within its {PAGES} pages"
    ):
        checks_of(pool).record(0, pages)


def test_a_page_that_stays_wrong_is_read_three_times() -> None:
    pool = np.ones(LAYOUT.region_bytes[0], np.uint8)
    checks = PageChecks(LAYOUT, [pool.ctypes.data])
    mine = rank(layout=LAYOUT, bases=(pool.ctypes.data,))
    there = msgspec.structs.replace(mine, checks_addrs=(checks.words[0].ctypes.data,))
    agent: Any = SimpleNamespace(register=lambda *_: None)
    verifier = Verifier(checks, mine, there, 1.0, agent)
    planned = plan(LAYOUT, LAYOUT, (mine.bases, there.bases))
    part = verifier.part("r", planned, [([1], [2], (0, 16))])
    for _ in range(ATTEMPTS - 1):
        assert part is not None
        assert part.arrived is not None
        part = part.arrived()
    assert verifier.repeated == ATTEMPTS - 1
    assert part is not None
    assert part.arrived is not None
    with pytest.raises(PullFailedError, match="1 pages still differ from their source after 3 reads, group 0 page 2"):
        part.arrived()


@pytest.mark.parametrize(
    ("span", "verified"), [((0, 16), 1), ((0, 17), 2), ((0, 31), 2), ((15, 17), 2), ((16, 32), 1), ((31, 33), 2)]
)
def test_every_page_of_a_pull_is_verified_including_the_first_and_the_last(
    pool: np.ndarray, span: tuple[int, int], verified: int
) -> None:
    """Pages have 16 tokens. A page is verified even if only one of its tokens is read. The page after the last token is
    not verified.
    """
    checks = checks_of(pool)
    checks.record(0, [3, 4])
    mine = rank(layout=LAYOUT, bases=(pool.ctypes.data,))
    there = msgspec.structs.replace(mine, checks_addrs=(checks.words[0].ctypes.data,))
    agent: Any = SimpleNamespace(register=lambda *_: None)
    planned = plan(LAYOUT, LAYOUT, (mine.bases, there.bases))
    for wrong in (1, 2):  # The pages 1 and 2 are the targets of the read.
        verifier = Verifier(checks, mine, there, 1.0, agent)
        verifier._words[0][[1, 2]] = checks.words[0][[3, 4]]  # The source's checksums arrive in these words.
        pool[[1, 2]] = pool[[3, 4]]
        pool[wrong, -1] ^= 1
        part = verifier.part("r", planned, [([1, 2], [1, 2], span)])
        assert part is not None
        assert part.arrived is not None
        again = part.arrived()
        assert verifier.repeated == (wrong <= verified)
        assert (again is not None) == (wrong <= verified)


def memory_of(layout: ShardLayout) -> list[np.ndarray]:
    """Returns each region of a shard, filled with random bytes."""
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, num_bytes).astype(np.uint8) for num_bytes in layout.region_bytes]


def checks_in(layout: ShardLayout, memory: list[np.ndarray]) -> PageChecks:
    return PageChecks(layout, [region.ctypes.data for region in memory])


def two_groups() -> ShardLayout:
    """Returns a layout with two groups in one region: a group of tokens, and a group with one state for each
    request.
    """
    (box,) = LAYOUT.groups[0].boxes
    begin = LAYOUT.region_bytes[0]
    state = Box("ssm", "bfloat16", 2, 0, begin + 32, 96, (0, 0, 0, 0), (1, 1, 4, 1, 8), (0, 0, 16, 0, 2))
    groups = (Group(16, PAGES, (box,)), Group(1, PAGES + 2, (state,), state=True))
    return check(ShardLayout(groups, (begin + 32 + 96 * (PAGES + 2),)))


@pytest.mark.parametrize(
    "layout", [LAYOUT, per_layer(SIZES, PAGES, BLOCKS_FIRST_NHD), per_layer(SIZES, PAGES, PACKED_NHD), two_groups()]
)
def test_every_byte_of_a_page_counts_and_no_byte_of_another(layout: ShardLayout) -> None:
    memory = memory_of(layout)
    checks = checks_in(layout, memory)
    for number, group in enumerate(layout.groups):
        pages = [*range(group.num_pages)]
        checks.record(number, pages)
        for box in group.boxes:
            for page in (0, 2, group.num_pages - 1):
                first = box.offset + page * box.page_stride
                for byte in (first, first + box.span - 1):
                    memory[box.region][byte] ^= 1
                    assert checks.bad(number, pages, checks.words[number]).tolist() == [page]
                    memory[box.region][byte] ^= 1
        assert checks.bad(number, pages, checks.words[number]).tolist() == []


def test_recording_a_page_does_not_change_the_checksums_of_other_pages(pool: np.ndarray) -> None:
    checks = checks_of(pool)
    assert checks.bad(0, [], checks.words[0][[]]).tolist() == []
    checks.record(0, [])
    assert not checks.words[0].any()
    checks.record(0, [1, 2])
    pool[1:3] ^= 1
    checks.record(0, [2])
    assert checks.bad(0, [1, 2], checks.words[0][[1, 2]]).tolist() == [0]
    pool[3] = pool[1]
    assert checks.bad(0, [3], checks._sums(0, np.array([1]))).tolist() == [], (
        "a checksum depends only on the bytes of the page"
    )


def test_pages_with_gaps_are_not_checked() -> None:
    (box,) = dense(replaced(SIZES, order="layer,side,token,head,dim"), PAGES).groups[0].boxes
    # The box has two of four heads. Between its tokens there are heads of another shard.
    part = sub_box(box, (0, 0, 1, 0), (2, 2, 3, 8))
    layout = check(ShardLayout((Group(16, PAGES, (part,)),), LAYOUT.region_bytes))
    with pytest.raises(InvalidEngineError, match=r"group 0: .* box 'kv' has 2048 bytes spread over 4064"):
        PageChecks(layout, [0])


def replaced(one: Any, **changes: object) -> Any:
    return msgspec.structs.replace(one, **changes)


def changed(layout: ShardLayout, of_box: dict[str, object] | None = None, **of_group: object) -> ShardLayout:
    """Returns the layout with a change in its last group or its last box."""
    *others, group = layout.groups
    *boxes, box = group.boxes
    group = replaced(group, boxes=(*boxes, replaced(box, **(of_box or {}))), **of_group)
    return replaced(layout, groups=(*others, group))


@pytest.mark.parametrize(
    "other",
    [
        changed(LAYOUT, page_size=8),
        changed(LAYOUT, state=True),
        changed(LAYOUT, {"kind": "ssm"}),
        changed(LAYOUT, {"dtype": "float16"}),
        changed(LAYOUT, {"first": (0, 0, 4, 0)}),  # The box has other heads. Its pages have the same size.
        changed(LAYOUT, {"extent": (2, 2, 4, 8, 16)}),
        # The box has the same elements, but their checksum is computed in another order.
        changed(LAYOUT, {"strides": (1, 2, 3, 4, 2)}),
        changed(two_groups(), {"dtype": "float32"}),
        ShardLayout((*LAYOUT.groups, *LAYOUT.groups), LAYOUT.region_bytes),
        per_layer(SIZES, PAGES, PACKED_NHD),
    ],
)
def test_pages_of_another_shape_or_with_other_elements_are_not_comparable(other: ShardLayout) -> None:
    assert same_pages(other, other)
    for one in (LAYOUT, two_groups()):
        assert not same_pages(one, other)
        assert not same_pages(other, one)


def test_the_address_and_size_of_a_pool_do_not_matter_for_comparing_pages() -> None:
    elsewhere = changed(LAYOUT, {"region": 1, "offset": 64, "page_stride": 1 << 20}, num_pages=9, window=64)
    assert same_pages(LAYOUT, elsewhere)


class Registered:
    """An agent that records the memory that was registered with it."""

    def __init__(self) -> None:
        self.memory: list[tuple[list[tuple[int, int, int]], MemoryType]] = []

    def register(self, regions: list[tuple[int, int, int]], memory_type: MemoryType) -> None:
        self.memory.append((regions, memory_type))


def pair(layout: ShardLayout, **changes: object) -> tuple[PageChecks, RankMetadata, RankMetadata]:
    """Returns the checks of a shard, the shard's metadata, and the metadata of another rank. The checks of the other
    rank are at addresses from 1 TiB on.
    """
    memory = memory_of(layout)
    checks = checks_in(layout, memory)
    mine = rank(layout=layout, bases=tuple(region.ctypes.data for region in memory))
    addresses = tuple((1 + group) << 40 for group in range(len(layout.groups)))
    there = replaced(mine, checks_addrs=addresses, rank=3, engine_id="source", **changes)
    checks.memory = memory  # type: ignore[attr-defined]  # as long as the checks
    return checks, mine, there


@pytest.mark.parametrize(
    ("there", "why"),
    [
        ({"checks_addrs": ()}, "because it keeps no page checks"),
        ({"layout": changed(LAYOUT, {"dtype": "float16"})}, "because its page layout differs from this engine's"),
        ({"memory_type": MemoryType.VRAM}, "only pages in host memory are checked"),
    ],
)
def test_a_source_whose_pages_cannot_be_compared_is_refused(there: dict[str, Any], why: str) -> None:
    checks, mine, source = pair(LAYOUT)
    agent: Any = Registered()
    with pytest.raises(HandshakeError, match=f"^engine 'source' rank 3 cannot be verified, .*{why}"):
        Verifier(checks, mine, replaced(source, **there), 1.0, agent)
    with pytest.raises(HandshakeError, match="only pages in host memory are checked"):
        Verifier(checks, replaced(mine, memory_type=MemoryType.VRAM), source, 1.0, agent)
    assert agent.memory == []


def test_a_pull_also_reads_the_checksums_of_its_pages_for_each_group() -> None:
    """A pull also reads the checksums of the source's pages into registered memory. A group without pages has no
    checksums.
    """
    checks, mine, there = pair(two_groups())
    agent: Any = Registered()
    verifier = Verifier(checks, mine, there, 1.0, agent)
    words = verifier._words
    assert agent.memory == [([(one.ctypes.data, one.nbytes, 0) for one in words], MemoryType.DRAM)]
    assert [len(one) for one in words] == [PAGES, PAGES + 2]
    planned = plan(mine.layout, there.layout, (mine.bases, there.bases), (5, 6), rank=3)

    def read(groups: list[PageCopy]) -> tuple[list[list[int]], list[list[int]]]:
        part = verifier.part("r", planned, groups)
        assert part is not None
        assert part.rank == 3
        runs = sum(len(planned.runs(group, *named)) for group, named in enumerate(groups))
        assert part.num_bytes == sum(planned.runs(group, *named).num_bytes for group, named in enumerate(groups))
        assert (part.local[:runs, 2] == 5).all()
        assert (part.remote[:runs, 2] == 6).all()
        return np.asarray(part.local)[runs:].tolist(), np.asarray(part.remote)[runs:].tolist()

    here = [one.ctypes.data for one in words]
    nothing = PageCopy([], [], (0, 0))
    assert read([([1, 2], [4, 2], (0, 32)), ([3], [5], (0, 40))]) == (
        [[here[0] + 2 * WORD_BYTES, 3 * WORD_BYTES, 0], [here[1] + 5 * WORD_BYTES, WORD_BYTES, 0]],
        [[(1 << 40) + 2 * WORD_BYTES, 3 * WORD_BYTES, 0], [(2 << 40) + 5 * WORD_BYTES, WORD_BYTES, 0]],
    )
    assert read([nothing, ([3], [6], (0, 1))])[1] == [[(2 << 40) + 6 * WORD_BYTES, WORD_BYTES, 0]]
    assert read([([1], [1], (0, 1)), nothing])[1] == [[(1 << 40) + WORD_BYTES, WORD_BYTES, 0]]
    assert verifier.part("r", planned, [nothing, nothing]) is None
    for empty in ((0, 0), (16, 16), (48, 16)):  # If no tokens are read, the named pages do not matter.
        tokens = PageCopy([1, 2, 3, 4], [1, 2, 3, 4], empty)
        assert read([tokens, ([3], [6], (0, 1))])[1] == [[(2 << 40) + 6 * WORD_BYTES, WORD_BYTES, 0]]
        assert read([([1], [1], (0, 1)), ([3], [6], empty)])[1] == [[(1 << 40) + WORD_BYTES, WORD_BYTES, 0]]


def arrived(part: Part | None) -> Part | None:
    assert part is not None
    assert part.arrived is not None
    return part.arrived()


def test_only_pages_that_differ_are_read_again_and_the_pull_continues_once_they_are_right() -> None:
    checks, mine, there = pair(two_groups())
    agent: Any = Registered()
    verifier = Verifier(checks, mine, there, 1.0, agent)
    planned = plan(mine.layout, there.layout, (mine.bases, there.bases))
    # The words have arrived. Pages 1 to 3 are copies of the source's pages 4, 0 and 2.
    tokens, states = verifier._words
    tokens[[4, 0, 2]] = checks._sums(0, np.array([1, 2, 3]))
    states[6] = checks._sums(1, np.array([3]))[0]
    groups = [PageCopy([1, 2, 3], [4, 0, 2], (0, 48)), PageCopy([3, 4], [6, 1], (0, 48))]
    assert arrived(verifier.part("r", planned, groups)) is None
    assert verifier.repeated == 0
    tokens[[4, 2]] ^= np.uint64(1)
    again = arrived(verifier.part("r", planned, groups))
    assert again is not None
    runs = planned.runs(0, [1, 3], [4, 2], (0, 32))
    assert np.asarray(again.remote)[: len(runs), 0].tolist() == runs.remote.tolist()
    assert np.asarray(again.local)[: len(runs), 0].tolist() == runs.local.tolist()
    assert len(again.local) == len(runs) + 1, "one more run reads the checksums of one group"
    assert verifier.repeated == 2
    tokens[4] ^= np.uint64(1)
    again = arrived(again)
    assert again is not None
    assert np.asarray(again.local)[0, 0] == planned.runs(0, [3], [2], (0, 16)).local[0]
    assert verifier.repeated == 3
    tokens[2] ^= np.uint64(1)
    assert arrived(again) is None
    assert verifier.repeated == 3
    states[6] ^= np.uint64(1)
    again = arrived(arrived(verifier.part("r", planned, groups)))
    with pytest.raises(
        PullFailedError,
        match="^request 'r': 1 pages still differ from their source after 3 reads, group 1 page 6 of engine 'source' "
        "rank 0 among them$",
    ):
        arrived(again)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0), (0.25, 1000), (1.0, 4000)])
def test_a_share_of_the_pages_is_compared(share: float, expected: int) -> None:
    layout = dense(SIZES, 4000)
    checks, mine, there = pair(layout)
    agent: Any = Registered()
    verifier = Verifier(checks, mine, there, share, agent)
    planned = plan(layout, layout, (mine.bases, there.bases))
    local = np.arange(4000)
    remote = local[::-1]
    # No checksum has arrived, so all pages differ from their checksums.
    again = arrived(verifier.part("r", planned, [(local, remote, (0, 16 * 4000))]))
    assert abs(verifier.repeated - expected) <= 250 * (0 < share < 1), (
        "the tolerance is nine times the standard deviation of such a draw"
    )
    if again is not None:
        pairs = [
            np.asarray(side)[:-1, 0] - base for side, base in ((again.local, mine.bases), (again.remote, there.bases))
        ]
        assert (pairs[0] + pairs[1] == 3999 * SIZES.page_bytes).all(), (
            "each page must go to the place that was asked for"
        )
