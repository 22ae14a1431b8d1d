"""Every view of `pagewire top`, without a terminal, over real watches of real managers. Textual's pilot drives it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static

from kvcache import PagedKVCacheManager, TextContext
from kvcache.endpoints.watch import ManagerWatch
from kvcache.errors import WatchError
from kvcache.watch.messages import Beside, LeaseRow, PageState, PullRow
from kvcache.watch.names import tenant_name
from pagewire.top import panels
from pagewire.top.app import TopApp
from pagewire.top.pagemap import DARK, LIGHT, Palette
from pagewire.top.sources import LiveSource, PlayedSource
from pagewire.top.view import Filter
from pagewire.viewer import PROGRAM
from tests.kvcache.build import manager_of

pytestmark = pytest.mark.slow

LEASE = LeaseRow(request_id="kept", pool="0", age_s=1.5, left_s=8.5, heard="1 of 2")
PULL = PullRow(key="far#1", pool="0", source="p/0", stage="reading", num_bytes=4096, age_s=0.2, left_s=3.0)


def serve(manager: PagedKVCacheManager, name: str, tokens: list[int], salt: str | None = None) -> TextContext:
    context = TextContext(tokens, 256, name, cache_salt=salt)
    manager.external_claim(name, 0)
    assert manager.maybe_reserve(context)
    manager.fetch([context])
    context.update(1)
    manager.step([context])
    return context


def busy_manager(pages: int = 64) -> PagedKVCacheManager:
    """Returns a manager with two running requests of two tenants, a lease of a request that was released, idle pages,
    and an order of eviction.
    """
    manager = manager_of(pages, rows=8, dp=1)
    serve(manager, "chat-1", list(range(20)), "acme")
    serve(manager, "chat-2", list(range(100, 140)))
    serve(manager, "kept", list(range(200, 217)))
    manager.lease("kept")
    serve(manager, "gone", list(range(300, 333)))
    for name in ("kept", "gone"):
        manager.release(name)
    return manager


@pytest.fixture
def watched() -> Iterator[tuple[PagedKVCacheManager, ManagerWatch]]:
    manager = busy_manager()
    beside = Beside(leases=(LEASE,), pulls=(PULL,), figures={"bytes_pulled": 1e9})
    watch = ManagerWatch(manager, name="decode", beside=lambda: beside, clear_names=True)
    yield manager, watch
    watch.close()


async def until(pilot: Pilot[None], ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline, what
        await pilot.pause(0.02)


def live(*watches: ManagerWatch, record: Path | None = None) -> TopApp:
    return TopApp(LiveSource([watch.address for watch in watches], 20.0, record))


def rows_of(app: TopApp, name: str) -> list[list[str]]:
    table = app._tables[name]
    return [[str(cell) for cell in table.get_row_at(at)] for at in range(table.row_count)]


def screen_of(app: TopApp) -> list[str]:
    return [app.map.render_line(y).text for y in range(app.map.size.height)]


def drive(app: TopApp, play: Callable[[Pilot[None]], object], size: tuple[int, int] = (120, 44)) -> None:
    """Runs the app without a terminal, and calls `play` once something is drawn."""

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: bool(app.map._areas), "nothing is drawn")
            await play(pilot)  # pyright: ignore[reportGeneralTypeIssues]

    asyncio.run(run())


def test_the_map_shows_each_page_of_a_small_pool_with_a_sign_of_its_state(
    watched: tuple[PagedKVCacheManager, ManagerWatch],
) -> None:
    app = live(watched[1])

    async def play(pilot: Pilot[None]) -> None:
        screen = screen_of(app)
        assert "decode/0  64 pages, shown 1–64, a page each" in screen[0]
        text = "".join(screen[1:])
        # The two requests have 5 and 10 pages, the lease has 5 pages, and 8 pages are idle.
        assert [text.count(sign) // 2 for sign in "█◆░·"] == [15, 5, 8, 36]
        legend = app.query_one("#legend", Static).render()
        assert all(state.name.lower() in str(legend) for state in PageState)
        await pilot.pause()

    drive(app, play)


def test_panels_show_requests_transfers_the_tree_evictions_rates_and_processes(
    watched: tuple[PagedKVCacheManager, ManagerWatch],
) -> None:
    manager, watch = watched
    app = live(watch)

    async def play(pilot: Pilot[None]) -> None:
        assert [row[:5] for row in rows_of(app, "requests")] == [
            ["chat-2", "", "decoding", "decode/0", "10"],
            ["chat-1", tenant_name("acme"), "decoding", "decode/0", "5"],
            ["kept", "", "leased", "decode/0", "5"],
        ]
        await pilot.press("2")
        assert rows_of(app, "transfers") == [
            ["pull", "far#1", "decode/0", "reading from p/0", "0.2", "3.0", "4,096"],
            ["lease", "kept", "decode/0", "1 of 2", "1.5", "8.5", f"{5 * 4 * 16:,}"],
        ]
        await pilot.press("3")
        await until(pilot, lambda: len(rows_of(app, "tree")) == 2, "the tree of the two rows")
        serve(manager, "chat-3", [*range(100, 116), 7, 7, 7, 7, 7])
        await until(pilot, lambda: len(rows_of(app, "tree")) > 2, "a branch")
        found = rows_of(app, "tree")
        assert sorted(row[2] for row in found if "└" in row[0]) == ["1", "6"]
        assert any(row[5] == "1" for row in found), "a hit"
        await pilot.press("4")
        for number in range(5):
            serve(manager, f"x{number}", list(range(1000 * number + 1000, 1000 * number + 1041)))
            manager.release(f"x{number}")
        await until(pilot, lambda: any(row[2] == "LRU" for row in rows_of(app, "evictions")), "evictions")
        assert rows_of(app, "evictions")[0][:3] == ["all", "decode", "LRU"]
        await pilot.press("5")
        await until(pilot, lambda: bool(rows_of(app, "rates")), "rates")
        named = {row[1]: row for row in rows_of(app, "rates")}
        assert named["pulled GB/s"][3] == "1.000 GB"
        assert named["hit rate"][3].endswith("in all")
        await pilot.press("6")
        assert rows_of(app, "processes")[0][1] == "there"
        await pilot.press("c")

        def recounted() -> bool:
            watch.attend()
            return "all counts agree" in rows_of(app, "processes")[0][5]

        await until(pilot, recounted, "a recount")

    drive(app, play)


def test_a_filter_highlights_only_the_pages_of_a_request_or_a_tenant(
    watched: tuple[PagedKVCacheManager, ManagerWatch],
) -> None:
    app = live(watched[1])

    def bright() -> int:
        area = app.map._areas[0]
        held = list(DARK.states[PageState.HELD])
        return sum(colour == held for colour in area.colours.tolist())

    async def play(pilot: Pilot[None]) -> None:
        assert bright() == 15
        acme = tenant_name("acme")[1:]
        await pilot.press("slash", *f"tenant={acme}", "enter")
        assert app.view.filter == Filter(tenant=acme)
        assert bright() == 5
        assert [row[0] for row in rows_of(app, "requests")] == ["chat-1"]
        assert f"filter tenant={acme}" in str(app.query_one("#phases", Static).render())
        await pilot.press("escape")
        assert bright() == 15
        await pilot.press("slash")
        app.query_one("#filter", Input).value = "colour=red"
        await pilot.press("enter")
        assert app.view.filter == Filter(), "an unknown name must be reported, and must change nothing"
        await pilot.press("escape")
        app._tables["requests"].focus()
        await pilot.press("enter")
        assert app.view.filter == Filter(request="chat-2")
        assert bright() == 10
        await pilot.press("escape", "slash", *"replica=7", "enter")
        assert app.map._areas == []

    drive(app, play)


def test_zoom_pan_pools_and_the_mouse(watched: tuple[PagedKVCacheManager, ManagerWatch]) -> None:
    other = manager_of(40_000, dp=2)
    serve(other, "chat-9", list(range(240)))
    second = ManagerWatch(other, name="prefill", clear_names=True)
    app = live(watched[1], second)

    async def play(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: len(app.map._areas) == 3, "three pools")
        titles = [line for line in screen_of(app) if "pages, shown" in line]
        assert [title.split("  ")[0] for title in titles] == ["decode/0", "prefill/0", "prefill/1"]
        assert "40,000 pages, shown 1–40,000" in titles[1]
        assert "a page each" not in titles[1]
        await pilot.press("p", "p")
        assert [area.key for area in app.map._areas] == [f"{second.address}/0"]
        whole = app.map._areas[0].span
        await pilot.press("+", "+")
        closer = app.map._areas[0].span
        assert closer.pages == 10_000
        assert closer.per_square < whole.per_square
        assert closer.first == 15_001
        await pilot.press("left")
        assert app.map._areas[0].span.first == 10_001
        for _ in range(9):
            await pilot.press("left")
        assert app.map._areas[0].span.first == 1
        await pilot.press(*["+"] * 6)
        assert app.map._areas[0].wide
        app.view.centre = 0.0
        await pilot.press("left")
        assert "█" in screen_of(app)[1]
        await pilot.click(app.map, offset=(0, 1))
        told = str(app.query_one("#told", Static).render())
        assert "page 1: 1 held, of chat-9" in told
        await pilot.press(*["-"] * 8, "p", "p")
        assert app.view.pool == ""
        await pilot.click(app.map, offset=(3, app.map._areas[1].top + 1), times=2)
        assert (app.view.pool, app.view.zoom) == (f"{second.address}/0", 1)

    drive(app, play)
    second.close()


def test_four_million_pages_are_summed_up() -> None:
    manager = manager_of(4_000_000, page_size=1, rows=4, max_seq_len=2_000_000, checks=False, head_dim=1)
    context = TextContext(list(range(1_000_000)), 2_000_000, "long")
    manager.external_claim("long")
    assert manager.maybe_reserve(context)
    watch = ManagerWatch(manager, name="large")
    app = live(watch)

    async def play(_: Pilot[None]) -> None:
        area = app.map._areas[0]
        assert area.span.squares <= 2 * 120 * (area.lines - 1)
        held, free = list(DARK.states[PageState.HELD]), list(DARK.states[PageState.FREE])
        colours = area.colours.tolist()
        quarter = len(colours) // 4
        assert all(colour == held for colour in colours[: quarter - 2])
        assert all(colour == free for colour in colours[quarter + 2 :])
        assert len([*app.map.render_line(1)]) == 1, "all places of the line look the same, so it must be one segment"
        assert "1,000,000" in "".join(rows_of(app, "requests")[0])

    drive(app, play)
    watch.close()


def test_totals_are_shown_above_and_long_ids_are_shortened(
    watched: tuple[PagedKVCacheManager, ManagerWatch],
) -> None:
    manager, watch = watched
    long = [f"cmpl-a2001fcd11a797fd-0-83fbb12{end}" for end in "23"]
    alike = [f"cmpl-a2001f{middle}d11a797fd-0-83fbb124" for middle in "ce"]
    for number, name in enumerate((long[0], alike[0])):
        serve(manager, name, list(range(500 * (number + 1), 500 * (number + 1) + 48)))
    app = live(watch)

    async def play(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: len(rows_of(app, "requests")) == 5, "all requests")
        counts = app.view.shown()[0][2].counts
        told = str(app.query_one("#totals", Static).render())
        held = sum(counts[PageState.HELD :])
        assert f"held {held} of 64 pages ({held / 64:.1%})" in told
        found = manager.metrics
        assert f"hit rate {found.cache_tokens / found.prompt_tokens:.1%}" in told
        assert "pulls 0.000 GB/s" in told
        assert "waiting 0" in told
        shown = [row[0] for row in rows_of(app, "requests")]
        assert "cmpl-a2001f…83fbb122" in shown
        app._tables["requests"].focus()
        await pilot.press("enter")
        assert app.view.filter.request in (*long, *alike), (
            "the filter must have the whole id, and not the shortened one"
        )

    drive(app, play)
    assert panels.short_ids([*long, *alike, "chat-1"]) == [
        "cmpl-a2001f…83fbb122",
        "cmpl-a2001f…83fbb123",
        *alike,
        "chat-1",
    ]
    assert panels.short_ids(["x" * 20, "x" * 20]) == ["x" * 20] * 2


@pytest.mark.parametrize("size", [(60, 24), (120, 44), (240, 70)])
def test_the_panes_fill_the_screen_and_no_cell_is_cut(
    size: tuple[int, int], watched: tuple[PagedKVCacheManager, ManagerWatch]
) -> None:
    app = live(watched[1])

    async def play(pilot: Pilot[None]) -> None:
        table = app._tables["requests"]
        needed = app.map.lines_needed(size[0])
        await until(pilot, lambda: app.map.size.height == needed, "the map has the lines that it needs")
        others = sum(widget.outer_size.height for widget in app.screen.children if widget.display)
        assert others == size[1], "no line is left over"
        await until(pilot, lambda: bool(rows_of(app, "requests")), "rows")
        columns = [column.get_render_width(table) for column in table.ordered_columns]
        assert sum(columns) >= size[0] - 4, "the columns are as wide as the screen"
        for at, column in enumerate(table.ordered_columns):
            assert all(len(row[at]) <= column.width for row in rows_of(app, "requests"))

    drive(app, play, size)


def test_a_light_theme_has_colours_of_its_own(watched: tuple[PagedKVCacheManager, ManagerWatch]) -> None:
    app = live(watched[1])

    def held(palette: Palette) -> int:
        return app.map._areas[0].colours.tolist().count(list(palette.states[PageState.HELD]))

    async def play(pilot: Pilot[None]) -> None:
        assert (held(DARK), held(LIGHT), app.theme) == (15, 0, "textual-dark")
        await pilot.press("t")
        assert (held(DARK), held(LIGHT), app.theme) == (0, 15, "textual-light")
        assert "paler: goes first" in str(app.query_one("#legend", Static).render())
        await pilot.press("t")
        assert held(DARK) == 15

    drive(app, play)


def test_a_pause_freezes_the_picture(watched: tuple[PagedKVCacheManager, ManagerWatch]) -> None:
    manager, watch = watched
    app = live(watch)

    async def play(pilot: Pilot[None]) -> None:
        await pilot.press("space")
        assert "PAUSED" in str(app.query_one("#phases", Static).render())
        held = app.view.processes[watch.address].followed.look
        manager.release("chat-2")
        await pilot.pause(0.4)
        assert app.view.processes[watch.address].followed.look is held
        await pilot.press("space")
        await until(pilot, lambda: len(rows_of(app, "requests")) == 2, "it goes on")

    drive(app, play)


def test_a_recording_plays_back_to_and_fro(watched: tuple[PagedKVCacheManager, ManagerWatch], tmp_path: Path) -> None:
    manager, watch = watched
    path = tmp_path / "incident"
    app, titles = live(watch, record=path), list[str]()

    async def record(pilot: Pilot[None]) -> None:
        # The last frame of an app that has ended may have no screen, so the title is read here.
        titles.append(app.map._areas[0].title)
        manager.release("chat-2")
        await until(pilot, lambda: len(rows_of(app, "requests")) == 2, "the release")
        # The next snapshot is the one that is cut off. The size therefore includes the snapshot with the release.
        recorded = path.stat().st_size
        await until(pilot, lambda: path.stat().st_size > recorded, "one more look")

    drive(app, record)
    path.write_bytes(path.read_bytes()[:-3])  # A killed recording process leaves such a file.
    source = PlayedSource(path)
    assert source.length > 0
    source.paused = True
    played = TopApp(source)

    async def play(pilot: Pilot[None]) -> None:
        assert [row[0] for row in rows_of(played, "requests")] == ["chat-2", "chat-1", "kept"]
        assert [played.map._areas[0].title] == titles
        await pilot.press("right_square_bracket")
        assert [row[0] for row in rows_of(played, "requests")] == ["chat-1", "kept"]
        assert "playing" in str(played.query_one("#phases", Static).render())
        await pilot.press("left_square_bracket")
        await until(pilot, lambda: len(rows_of(played, "requests")) == 3, "back")
        played.source.paused = False  # pyright: ignore[reportAttributeAccessIssue]
        await until(pilot, lambda: len(rows_of(played, "requests")) == 2, "it plays by itself")

    drive(played, play)


def test_invalid_recordings_are_refused(tmp_path: Path) -> None:
    for content, what in ((b"", "not a recording"), (b"pagewire recording 1\n", "no snapshot")):
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(WatchError, match=what):
            PlayedSource(tmp_path / "f")
    (tmp_path / "f").write_bytes(b"pagewire recording 1\n\0\0\0\3abc")
    with pytest.raises(WatchError, match="damaged at byte 21"):
        PlayedSource(tmp_path / "f")
    (tmp_path / "f").write_bytes(b"pagewire recording 1\n\xff\xff\xff\xffabc")
    with pytest.raises(WatchError, match="damaged at byte 21: a snapshot of 4,294,967,295 bytes"):
        PlayedSource(tmp_path / "f")
    bomb = zlib.compress(bytes((1 << 28) + 1), 1)
    (tmp_path / "f").write_bytes(b"pagewire recording 1\n" + len(bomb).to_bytes(4, "big") + bomb)
    with pytest.raises(WatchError, match="damaged at byte 21: no end within 268,435,456 bytes"):
        PlayedSource(tmp_path / "f")
    with pytest.raises(WatchError, match="cannot be written"):
        LiveSource(["tcp://127.0.0.1:1"], 2.0, tmp_path / "none" / "f")


SERVED = """
import sys, time
from kvcache.endpoints.watch import ManagerWatch
from tests.pagewire.top.test_app import busy_manager
manager = busy_manager()
watch = ManagerWatch(manager, sys.argv[1], name="child")
print(watch.address, flush=True)
time.sleep(600)
"""


def test_the_program_of_a_browser_ends_with_its_server_even_if_the_server_is_killed() -> None:
    with closing(busy_manager()) as manager, closing(ManagerWatch(manager)) as watch:
        child = subprocess.Popen(
            [*PROGRAM, watch.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver"},
        )
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == b"__GANGLION__\n", "it runs"
            child.stdin.close()
            child.stdout.close()
            assert child.wait(20) == 0
        finally:
            child.kill()
            child.wait()


def started(endpoint: str) -> tuple[subprocess.Popen[str], str]:
    child = subprocess.Popen([sys.executable, "-c", SERVED, endpoint], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.communicate()


def test_a_process_that_dies_while_it_is_watched_is_shown_as_gone_and_found_again(
    watched: tuple[PagedKVCacheManager, ManagerWatch],
) -> None:
    child, address = started("tcp://127.0.0.1:0")
    app = TopApp(LiveSource([watched[1].address, address], 10.0))

    async def play(pilot: Pilot[None]) -> None:
        nonlocal child
        await until(pilot, lambda: len(app.map._areas) == 2, "both")
        end(child)
        await until(pilot, lambda: any("GONE" in line for line in screen_of(app)), "it is gone")
        titles = [area.title for area in app.map._areas]
        assert ["GONE" in title for title in titles] == [False, True], (
            "the last picture of the dead process stays, and the other process continues"
        )
        await pilot.press("6")
        assert "GONE" in rows_of(app, "processes")[1][1]
        child, again = started(address)
        assert again == address
        await until(pilot, lambda: not any("GONE" in line for line in screen_of(app)), "it is there again")

    try:
        drive(app, play)
    finally:
        end(child)


def test_an_address_without_a_process_shows_that_the_app_waits() -> None:
    app = TopApp(LiveSource(["ipc:///tmp/pagewire-nobody"], 10.0))

    async def run() -> None:
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause(0.3)
            assert "waiting for the first snapshot" in screen_of(app)[0]
            await pilot.press("6")
            assert rows_of(app, "processes")[0][1] == "never heard"
            await pilot.press("plus", "left", "p", "c", "left_square_bracket")

    asyncio.run(run())
    assert set(panels.HEADINGS) == {"requests", "transfers", "tree", "evictions", "rates", "processes"}
