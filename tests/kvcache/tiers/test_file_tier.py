"""The file tier: pages outlive the manager, and any fault in the folder leads only to misses."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache import InterruptedCallError, InvalidParamsError, InvariantError, PoolTooSmallError
from kvcache.tiers import file_tier as module
from kvcache.tiers.file_tier import FileTier
from kvcache.tiers.page_files import FileFormat, SystemIO
from kvcache.tiers.page_folder import PageFolder
from tests.kvcache.served import LONGEST_WAIT_S, Served, until

PROMPT = range(17)  # four full pages of 4 tokens, and one more token
Make = Callable[..., Served]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterable[Make]:
    monkeypatch.setattr(module, "_LONGEST_WAIT_S", 30.0)  # On a busy machine a read may take longer than in service.
    made: list[Served] = []

    def make(
        pages: int = 8, host_slots: int = 40, *, gb: float = 1e-3, key: str = "model", io: Any = None, **options: Any
    ) -> Served:
        files = {"file_tier_dir": str(tmp_path), "file_tier_max_gb": gb, "file_tier_key": key, "file_tier_io": io}
        given = {**options.pop("params", {}), **files}
        made.append(Served(pages, host_slots, params=given, **options))
        return made[-1]

    yield make
    for one in made:
        one.manager.check()
        one.manager.close()


def folder_at(root: Path, number: int = 0) -> PageFolder:
    """Returns the folder of the namespace with this number."""
    return PageFolder(root, FileFormat(bytes([number]) * 16, 96, 16))


def files_of(it: Served) -> FileTier:
    assert it.tiers.files is not None
    return it.tiers.files


def written(served: Make) -> None:
    """Serves the prompt with a manager that writes its pages to files, and closes this manager."""
    it = served()
    it.serve(PROMPT)
    it.manager.close()


def page_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.pages"))


def down(it: Served) -> None:
    """Makes the manager write all published pages to files."""
    it.tiers.store_all()
    files_of(it).flush()


def looks_again(it: Served) -> None:
    """Makes the manager scan its folder once more."""
    files = files_of(it)
    files.flush()
    files._scanned = -math.inf
    files.tick()
    assert len(files._writer.jobs) == 1
    files.flush()


def test_a_restart_finds_what_was_written(served: Make) -> None:
    it = served()
    assert it.serve(PROMPT) == 0
    assert it.serve([7, *range(30)]) == 0
    it.manager.close()
    assert it.manager.metrics.file_blocks_written == 11
    again = served()
    assert again.serve(PROMPT) == 16
    assert again.serve([7, *range(30)]) == 28
    assert again.manager.metrics.file_blocks_read == 11
    assert again.kv.compared == 44


def test_reads_leave_half_of_the_free_slots_to_writes(served: Make) -> None:
    it = served(16, 40)
    it.serve(range(61))  # 15 full pages
    it.manager.close()
    again = served(16, 10)
    digests = again.digests(range(61))
    every = np.ones((1, 15), np.bool_)
    assert files_of(again).has_of(digests[None], every, perhaps=False).sum() == 15
    files_of(again).fetch(digests[None], every, wait=True, gain=15)
    assert again.tiers.host.pool.index.published.sum() == again.manager.metrics.file_blocks_read == 5
    held = again.tiers.host.pool.allocate(7)
    files_of(again).fetch(digests[None, 5:], every[:, 5:], wait=True, gain=10)
    assert again.manager.metrics.file_blocks_read == 6  # The read takes one of the three free slots.
    again.tiers.host.pool.release(held)


def test_a_file_that_is_not_full_is_written_late(served: Make) -> None:
    it = served(16, 40)
    now = 100.0
    files_of(it)._clock = lambda: now
    it.serve(PROMPT)
    it.tiers.store_all()
    assert 4 < files_of(it).pages_a_file == 10
    for passed, writes in ((0.0, False), (0.99, False), (1.01, True)):
        now = 100.0 + passed
        files_of(it).tick()
        assert bool(files_of(it)._writer.jobs) == writes
    files_of(it).flush()
    assert it.manager.metrics.file_blocks_written == 4
    now = 200.0
    it.serve([7, *range(48)])
    it.tiers.store_all()
    files_of(it).tick()
    assert files_of(it)._writer.jobs  # The pages fill a whole file, so the tier writes the file at once.
    assert len(files_of(it)._writer.jobs[0].slots) == 10


@pytest.mark.parametrize("other", ["key", "salt", "dim", "algorithm", "page_order"])
def test_pages_of_another_kind_are_not_found(served: Make, other: str) -> None:
    it = served(layers=2, heads=2)
    it.serve(PROMPT, salt="a")
    it.manager.close()
    options: dict[str, dict[str, Any]] = {
        "key": {"key": "another model"},
        "dim": {"head_dim": 4},
        "algorithm": {"params": {"hash_algorithm": "xxh3_128"}},
        "page_order": {"params": {"page_order": "layer,side,head,token,dim"}},
        "salt": {},
    }
    again = served(layers=2, heads=2, **options[other])
    assert again.serve(PROMPT, salt="b" if other == "salt" else "a") == 0
    assert again.manager.metrics.file_blocks_refused == 0


def test_a_file_has_the_pages_of_all_shards_side_by_side(served: Make) -> None:
    it = served(tp=2, heads=4)
    it.serve(PROMPT)
    it.manager.close()
    again = served(tp=2, heads=4, dp=2)
    assert again.serve(PROMPT, replica=1) == 16
    assert again.kv.compared == 32


def damage(it: FileTier, path: Path, how: str, rng: np.random.Generator) -> None:
    content = bytearray(path.read_bytes())
    table = it._layout.count_of(len(content)) * it._layout.page_bytes
    if how in ("gone", "folder", "link"):
        path.rename(path.with_suffix(".moved"))
    if how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to(path.with_suffix(".moved"))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "cut":
        path.write_bytes(content[: int(rng.integers(len(content)))])
    elif how == "longer":
        path.write_bytes(content + b"?" * int(rng.integers(1, it._layout.page_bytes)))
    elif how == "noise":
        path.write_bytes(rng.integers(0, 256, len(content), np.uint8).tobytes())
    elif how != "gone":
        first, last = {"page": (0, table), "row": (table, len(content) - 56), "footer": (len(content) - 56, None)}[how]
        content[int(rng.integers(first, last or len(content)))] ^= int(rng.integers(1, 256))
        path.write_bytes(content)


# For each kind of damage: the reasons for which pages are refused if the damage happens while the tier runs, and the
# reasons for which files are refused if it happens before the tier starts.
DAMAGE: dict[str, tuple[set[str], set[str]]] = {
    "gone": ({"gone"}, set()),
    "folder": ({"unreadable"}, {"unreadable"}),
    "link": ({"unreadable"}, {"unreadable"}),
    "empty": ({"cut"}, {"cut"}),
    "cut": ({"cut"}, {"cut"}),
    "longer": ({"cut"}, {"cut"}),
    "noise": ({"foreign"}, {"foreign"}),
    "page": ({"corrupted"}, set()),  # A starting process reads only the end of a file.
    "row": ({"foreign", "corrupted"}, {"corrupted"}),
    "footer": (set(), {"foreign", "corrupted"}),
}


@pytest.mark.each_value
@pytest.mark.parametrize("when", ["before the start", "while it runs"])
@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_files_are_misses(served: Make, tmp_path: Path, how: str, when: str) -> None:
    rng, pages, files = np.random.default_rng(11), Counter[str](), Counter[str]()
    for round_number in range(3):
        it = served(8, 200, key=f"{round_number}")
        prompts = [[first, *range(int(rng.integers(8, 30)))] for first in range(3)]
        for prompt in prompts:
            it.serve(prompt)
            down(it)
        it.manager.close()
        again = None if when == "before the start" else served(8, 200, key=f"{round_number}")
        for path in page_files(tmp_path):
            damage(it.tiers._counted[0], path, how, rng)
        again = again or served(8, 200, key=f"{round_number}")
        for prompt in prompts * 2:
            again.serve(prompt)  # `serve` compares the KV.
        again.manager.check()
        counted = again.manager.metrics
        assert counted.file_blocks_refused == files_of(again).refusals.total()
        assert {why: getattr(counted, f"file_blocks_{why}") for why in files_of(again).refusals} == files_of(
            again
        ).refusals
        assert counted.files_refused == files_of(again)._folder.refusals.total()
        pages += files_of(again).refusals
        files += files_of(again)._folder.refusals
        down(again)
        again.manager.close()
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
    running, starting = DAMAGE[how]
    if when == "while it runs":
        assert (bool(pages), pages.keys() <= running, files) == (bool(running), True, {})
    else:
        assert (bool(files), files.keys() <= starting) == (bool(starting), True)
        assert pages.keys() == ({"corrupted"} if how == "page" else set())


@pytest.mark.each_value
@pytest.mark.parametrize("when", ["before the start", "while it runs"])
@pytest.mark.parametrize("how", [*DAMAGE, "swapped"])
def test_damaged_files_are_replaced_by_the_next_write_of_their_pages(
    served: Make, tmp_path: Path, how: str, when: str
) -> None:
    rng, prompts = np.random.default_rng(7), [[first, *range(24)] for first in range(6)]
    it = served(8, 200)
    for prompt in prompts:
        it.serve(prompt)
        down(it)
    it.manager.close()
    again = None if when == "before the start" else served(8, 200)
    paths = page_files(tmp_path)
    assert len(paths) == len(prompts)
    if how == "swapped":
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
            path.write_bytes(content)
    else:
        for path in paths:
            damage(it.tiers._counted[0], path, how, rng)
    again = again or served(8, 200)
    # In these cases all pages are still right. A running process does not use the footer, and a starting process does
    # not use the file names.
    unharmed = (how, when) in (("footer", "while it runs"), ("swapped", "before the start"))
    # The first process notices the damage while it runs, or the second process notices it at its start.
    for _ in range(2):
        for prompt in prompts:
            found = again.serve(prompt)  # `serve` compares the KV.
            assert unharmed == (found == 24), prompt
            down(again)
        again.manager.close()
        again = served(8, 200)
        if not (how == "footer" and unharmed):
            break
        unharmed = False
    for prompt in prompts:
        assert again.serve(prompt) == 24
    assert again.manager.metrics.file_blocks_refused == 0


def test_a_page_that_is_found_damaged_is_written_again(served: Make, tmp_path: Path) -> None:
    written(served)
    (path,) = page_files(tmp_path)
    again = served()
    damage(files_of(again), path, "noise", np.random.default_rng(0))
    assert again.serve(PROMPT) == 0
    assert again.manager.metrics.file_blocks_refused == 4
    again.manager.close()
    third = served()
    assert third.serve(PROMPT) == 16


def test_the_good_pages_of_a_damaged_file_are_read(served: Make, tmp_path: Path) -> None:
    written(served)
    again = served()
    (path,) = page_files(tmp_path)
    with path.open("r+b") as file:
        file.seek(2 * files_of(again)._layout.page_bytes + 5)
        file.write(b"!")
    assert again.serve(PROMPT) == 8
    assert (again.manager.metrics.file_blocks_read, again.manager.metrics.file_blocks_refused) == (3, 1)


def test_the_files_stay_within_their_limit(served: Make, tmp_path: Path) -> None:
    it = served(8, 16, gb=4000 / 2**30)
    for _ in range(30):
        it.fill(8)
        down(it)
        files_of(it).check()
    it.manager.close()
    assert 0 < sum(path.stat().st_size for path in page_files(tmp_path)) <= 4000
    smaller = served(8, 16, gb=1500 / 2**30)
    files_of(smaller).check()
    smaller.manager.close()
    assert sum(path.stat().st_size for path in page_files(tmp_path)) <= 1500


def test_the_least_recently_used_file_goes_first(served: Make) -> None:
    it = served(8, 40, gb=2800 / 2**30)  # The folder has room for two files of seven pages, but not for three files.
    for first in (100, 200):
        it.serve([first, *range(28)])
        down(it)
    it.serve([100, *range(28)])  # The pages come from the host, but their file counts as used, too.
    down(it)
    it.serve([300, *range(28)])
    down(it)
    it.manager.close()
    again = served(8, 40, gb=2800 / 2**30)
    assert [again.serve([first, *range(28)]) for first in (100, 200, 300)] == [28, 0, 28]


def test_processes_find_each_others_files(served: Make) -> None:
    one, two = served(), served()
    one.serve(PROMPT)
    down(one)
    looks_again(two)
    assert two.serve(PROMPT) == 16
    for path in page_files(files_of(one)._folder.path):
        path.unlink()
    looks_again(two)
    files_of(two).check()
    assert not files_of(two)._index.names


def test_after_a_reset_no_earlier_page_is_found_even_after_a_restart(served: Make) -> None:
    it, neighbour = served(), served()
    it.serve(PROMPT)
    down(it)
    it.manager.reset_prefix_cache()
    assert it.serve(PROMPT) == 0
    it.manager.reset_prefix_cache()
    # This manager was not reset. It writes pages of the old weights to a folder that no other process reads.
    neighbour.serve(PROMPT)
    down(neighbour)
    it.manager.close()
    again = served()
    assert again.serve(PROMPT) == 0
    again.manager.close()
    assert served().serve(PROMPT) == 16


def test_a_reset_that_joins_a_neighbour_s_folder_finds_none_of_the_files_that_are_in_it(served: Make) -> None:
    it, neighbour = served(), served()
    it.manager.reset_prefix_cache()
    neighbour.manager.reset_prefix_cache()
    it.manager.reset_prefix_cache()  # once more, say because a message was sent twice: the two are out of step now
    it.serve(PROMPT)  # with the weights of now
    down(it)
    neighbour.manager.reset_prefix_cache()  # new weights
    assert files_of(neighbour)._folder.path == files_of(it)._folder.path
    looks_again(neighbour)
    assert not files_of(neighbour)._index.names
    assert neighbour.serve(PROMPT) == 0
    it.serve(range(300, 320))  # what comes later is shared
    down(it)
    looks_again(neighbour)
    assert files_of(neighbour)._index.names


def test_a_neighbour_that_is_reset_too_shares_files_again(served: Make) -> None:
    it, neighbour = served(), served()
    it.manager.reset_prefix_cache()
    neighbour.manager.reset_prefix_cache()
    assert files_of(it)._folder.path == files_of(neighbour)._folder.path


@pytest.mark.parametrize("what", ["root", "namespace", "epoch", "name", "files", "a file instead", "a link instead"])
def test_a_folder_that_disappears_is_made_again(
    served: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """The folder disappears while the tier runs. The pages in the folder become misses. New pages are written, and a
    later process finds them.
    """
    it = served(8, 8)
    it.serve(PROMPT)
    down(it)
    epoch, elsewhere = files_of(it)._folder.path, tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"{'0' * 32}.pages").write_text("somebody's")
    if what in ("root", "namespace", "epoch"):
        shutil.rmtree({"root": tmp_path, "namespace": epoch.parent, "epoch": epoch}[what])
    elif what == "name":
        (epoch.parent / "current").unlink()
    elif what == "files":
        for path in page_files(tmp_path):
            path.unlink()
    else:
        shutil.rmtree(epoch)
        if what == "a file instead":
            epoch.touch(0o600)
        else:
            epoch.symlink_to(elsewhere)
    it.fill(8)
    it.fill(8)  # The host no longer has the prompt.
    down(it)
    assert it.serve(PROMPT) == (16 if what == "name" else 0)
    down(it)
    it.manager.check()
    assert "no page is written" not in caplog.text
    assert modes(tmp_path) <= {(True, 0o700), (False, 0o600)}
    assert [path.read_text() for path in elsewhere.iterdir()] == ["somebody's"]
    it.manager.close()
    assert served(8, 8).serve(PROMPT) == (0 if what == "name" else 16)


@pytest.mark.parametrize("what", ["root", "namespace", "epoch"])
def test_a_folder_deleted_before_a_reset_or_between_two_runs(served: Make, tmp_path: Path, what: str) -> None:
    for deleted_before in ("reset", "start"):
        it = served()
        it.serve(PROMPT)
        down(it)
        epoch = files_of(it)._folder.path
        folder = {"root": tmp_path, "namespace": epoch.parent, "epoch": epoch}[what]
        if deleted_before == "reset":
            shutil.rmtree(folder)
            it.manager.reset_prefix_cache()
        else:
            it.manager.close()
            shutil.rmtree(folder)
            it = served()
        assert it.serve(PROMPT) == 0
        it.manager.close()
        assert served().serve(PROMPT) == 16
        shutil.rmtree(tmp_path, ignore_errors=True)


def modes(folder: Path) -> set[tuple[bool, int]]:
    """Returns two facts about the folder and about each of its entries: whether it is a folder, and its mode."""
    found = [folder, *folder.rglob("*")]
    return {(path.is_dir(), path.lstat().st_mode & 0o7777) for path in found if not path.is_symlink()}


@pytest.fixture
def umask() -> Iterable[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask", [0, 0o022, 0o077, 0o277])
def test_only_their_owner_may_use_files_and_folders(
    served: Make, tmp_path: Path, umask: Callable[[int], int], mask: int
) -> None:
    class Watched(SystemIO):
        def write(self, file: int, parts: Any, offset: int) -> None:
            seen.update(modes(tmp_path))  # temporary files, too
            super().write(file, parts, offset)

    seen: set[tuple[bool, int]] = set()
    shutil.rmtree(tmp_path)
    umask(mask)
    it = served(io=lambda memory: Watched())
    it.serve(PROMPT)
    down(it)
    it.manager.reset_prefix_cache()
    it.serve(PROMPT)
    it.manager.close()
    assert page_files(tmp_path)
    assert seen == modes(tmp_path) == {(True, 0o700), (False, 0o600)}


def test_existing_files_and_folders_lose_wider_rights(served: Make, tmp_path: Path) -> None:
    written(served)
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o666)
    again = served()
    assert again.serve(PROMPT) == 16
    again.manager.reset_prefix_cache()
    again.manager.close()
    assert modes(tmp_path) == {(True, 0o700), (False, 0o600)}


def test_a_root_with_other_things_is_left_as_it_is(served: Make, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("x")
    tmp_path.chmod(0o755)
    assert served().serve(PROMPT) == 0
    assert tmp_path.stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "other").stat().st_mode & 0o077 == 0o044
    tmp_path.chmod(0o1777)  # `/tmp` has this mode.
    assert served(key="b").serve(PROMPT) == 0
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidParamsError, match="other users may rename its files: its mode is 777"):
        served(key="c")


def test_no_link_is_followed(served: Make, tmp_path: Path) -> None:
    """A link replaces one of the tier's folders or files. The tier reads, writes and removes nothing behind
    the link.
    """
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    written(served)
    epoch = files_path = next(path for path in tmp_path.rglob("epoch-*") if path.is_dir())
    home, (file,) = epoch.parent, page_files(files_path)
    shutil.copytree(epoch, elsewhere)
    (elsewhere / f"{'f' * 32}.pages").write_text("somebody's")
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    shutil.move(file, elsewhere / "moved")
    file.symlink_to(elsewhere / "moved")
    assert served().serve(PROMPT) == 0
    shutil.rmtree(epoch)
    epoch.symlink_to(elsewhere)
    assert served().serve(PROMPT) == 0
    (home / "current").unlink()
    (home / "current").symlink_to(elsewhere / "name")
    (elsewhere / "name").write_text("epoch-0123456789abcdef")
    assert served().serve(PROMPT) == 0
    assert not (home / "epoch-0123456789abcdef").exists()
    (elsewhere / "name").unlink()
    (elsewhere / "moved").unlink()
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
    shutil.rmtree(home)
    home.symlink_to(elsewhere)
    with pytest.raises(InvalidParamsError, match="cannot be used"):
        served()
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_a_folder_of_another_user_is_refused(served: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served()
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    assert folder_at(link).path.is_relative_to(tmp_path)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(InvalidParamsError, match=f"cannot be used: .* belongs to user {owner}"):
        served()


def test_a_full_disk_is_no_error(served: Make, caplog: pytest.LogCaptureFixture) -> None:
    tried: list[float] = []

    class Full(SystemIO):
        def write(self, *_: Any) -> None:
            tried.append(now)
            raise OSError(28, "No space left on device")

    now = 100.0
    it = served(io=lambda memory: Full())
    files_of(it)._clock = lambda: now
    assert it.serve(PROMPT) == 0
    down(it)
    assert "No space left" in caplog.text
    for passed in (0.1, 9.8, 0.2):  # For ten seconds after a failure the tier does not try to write.
        now += passed
        assert it.serve(PROMPT) == 16
        down(it)
    assert {round(at, 1) for at in tried} == {100.0, 110.1}
    assert it.manager.metrics.file_blocks_written == 0


class SlowReads(SystemIO):
    """A reader of files whose reads wait until the test lets them run."""

    may = threading.Event()

    def read(self, file: int, parts: Any, offset: int) -> None:
        self.may.wait(LONGEST_WAIT_S)
        super().read(file, parts, offset)


def slow(served: Make) -> Served:
    """Returns a manager that finds the prompt in files and has not read anything yet."""
    written(served)
    again = served(io=lambda memory: SlowReads())
    SlowReads.may.clear()
    return again


def test_prefetch_brings_pages_before_the_request_is_claimed(served: Make) -> None:
    again = slow(served)
    context = again.claim(PROMPT)
    assert again.manager.prefetch(context)
    assert again.manager.prefetch(context)
    SlowReads.may.set()
    until(lambda: not again.manager.prefetch(context))
    assert again.manager.metrics.file_blocks_read == 4
    assert again.manager.maybe_reserve(context)
    assert context.start_idx == 16
    again.run(context)


@pytest.mark.parametrize("call", ["close", "reset_prefix_cache"])
def test_open_reads_are_waited_for_and_a_reset_forgets_their_pages(served: Make, call: str) -> None:
    again = slow(served)
    context = again.claim(PROMPT)
    assert again.manager.prefetch(context)
    later = threading.Timer(0.05, SlowReads.may.set)
    later.start()
    getattr(again.manager, call)()
    later.join()
    assert again.manager.metrics.file_blocks_read == 4, "the read was already open"
    again.manager.check()
    if call == "reset_prefix_cache":
        assert not again.manager.prefetch(context)
        assert again.manager.maybe_reserve(context)
        assert context.start_idx == 0
        again.run(context)


def test_a_damaged_page_does_not_remove_the_page_that_has_taken_its_entry_meanwhile(
    served: Make, tmp_path: Path
) -> None:
    written(served)
    again = served(io=lambda memory: SlowReads())
    files, (path,) = files_of(again), page_files(tmp_path)
    damage(files, path, "page", np.random.default_rng(0))
    SlowReads.may.clear()
    assert again.manager.prefetch(again.claim(PROMPT))
    (job,) = files._reader.jobs
    others = np.arange(16, dtype=np.uint64).reshape(4, 4) + 1
    size = files._layout.size_of(4)
    # The test simulates that the file was removed and that its entries in the index now belong to pages of another
    # file.
    files._index.forget(path.name)
    files._index.add("f" * 32 + ".pages", size, others, np.array(0))
    SlowReads.may.set()
    job.work.result()
    files._take_up(files._reader)
    assert again.manager.metrics.file_blocks_refused == 1
    assert (files._index.find(others) > 0).all()
    assert files._index.bytes == size


def test_a_reservation_does_not_wait_long_for_files_and_a_later_chunk_uses_what_has_arrived(
    served: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LONGEST_WAIT_S", 0.01)
    again = slow(served)
    context = again.claim(PROMPT)
    context.set_token_indices(active_idx=4)
    assert again.manager.maybe_reserve(context)
    assert context.start_idx == 0
    again.run(context)
    SlowReads.may.set()
    files_of(again)._reader.jobs[0].work.result()
    assert again.manager.maybe_reserve(context)
    assert context.start_idx == 16
    again.run(context)
    assert again.kv.compared == 16


def test_prefetch_without_files_does_nothing() -> None:
    it = Served(8, 40)
    assert not it.manager.prefetch(it.claim(PROMPT))


def test_impossible_file_tiers_are_refused(served: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InvalidParamsError, match="file_tier_dir .* cannot be used"):
        Served(8, 8, params={"file_tier_dir": f"{tmp_path}/file", "file_tier_max_gb": 1, "file_tier_key": "k"})
    with pytest.raises(PoolTooSmallError, match="2 bytes are less than one page: at least 232 are needed"):
        served(gb=2 / 2**30)


def test_managers_that_start_at_once_use_one_folder(tmp_path: Path) -> None:
    for number in range(20):
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda _, n=number: folder_at(tmp_path, n).path, range(8)))
        assert len(set(made)) == 1


@pytest.mark.parametrize("content", [b"", b"epoch-", b"../../elsewhere", b"\xff\xfe", b"epoch-0123456789abcdef/.."])
def test_a_broken_name_of_the_epoch_starts_a_new_one(tmp_path: Path, content: bytes) -> None:
    first = folder_at(tmp_path)
    (first.path.parent / "current").write_bytes(content)
    second, third = folder_at(tmp_path), folder_at(tmp_path)
    assert second.path == third.path != first.path
    assert second.path.parent == first.path.parent


def test_at_the_start_abandoned_drafts_are_removed_and_other_files_left_alone(served: Make) -> None:
    it = served()
    it.serve(PROMPT)
    folder = files_of(it)._folder.path
    it.manager.close()
    dead, home, mine = folder / f"{'0' * 16}-1.tmp", folder.parent / f"{'0' * 16}-2.tmp", folder / "README"
    for path in (dead, home, mine):
        path.write_text("x")
    os.mkfifo(folder / f"{'a' * 32}.pages")
    assert served().serve(PROMPT) == 16
    assert (dead.exists(), home.exists(), mine.exists()) == (False, False, True)


def test_check_recounts_the_files(served: Make) -> None:
    it = served(checks=False)
    it.serve(PROMPT)
    down(it)
    index = files_of(it)._index
    for change, message in (
        (lambda: setattr(index, "bytes", index.bytes + 1), "counted"),
        (lambda: index._index_of.__setitem__(1, 7), "wrong positions"),
        (lambda: index._file_of.__setitem__(1, 7), "do not refer to each other"),
        (lambda: index._pool.holders.__setitem__(1, 2), "file tier: page 1 has 2 holders"),
        (lambda: index.reading.__setitem__(1, True), "0 entries are being read"),
        (lambda: it.tiers.host.pool.hold(np.array([1], np.int32)), "host tier: page 1"),
    ):
        index.check()
        saved = (index.bytes, index._index_of.copy(), index._file_of.copy(), index._pool.holders.copy())
        change()
        with pytest.raises(InvariantError, match=message):
            it.manager.check()
        index.bytes, index._index_of, index._file_of, index._pool.holders = saved
        index.reading[:] = False
    it.tiers.host.pool.release(np.array([1], np.int32))


def test_random_prompts_over_three_tiers(served: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two managers on one folder, with small tiers. The KV of every cached token is compared, and `check` runs after
    each move.
    """
    monkeypatch.setattr(module, "_LONGEST_QUEUED_S", 0.0)
    monkeypatch.setattr(module, "_RESCAN_S", 0.02)
    rng = np.random.default_rng(8)
    both = [served(12, 24, gb=9000 / 2**30, checks=False) for _ in range(2)]
    for move in range(400):
        it = both[int(rng.integers(2))]
        prompt = [int(rng.integers(9)), *range(int(rng.integers(1, 36)))]
        it.serve(prompt, salt=[None, "t"][rng.integers(2)])
        it.manager.check()
        if move % 150 == 149:
            it.manager.reset_prefix_cache()
    for it in both:
        assert it.manager.metrics.file_blocks_written > 5
        assert it.manager.metrics.file_blocks_read > 5
        assert it.kv.compared > 300


def test_a_file_takes_a_quarter_of_a_small_host_tier_at_most(served: Make) -> None:
    assert files_of(served(host_slots=12)).pages_a_file == 3
    assert files_of(served(host_slots=3)).pages_a_file == 1


def test_the_layout_of_a_file_knows_its_sizes() -> None:
    layout = FileFormat(bytes(16), 100, 32)
    for count in (1, 2, 500):
        assert layout.count_of(layout.size_of(count)) == count
        assert layout.most_in(layout.size_of(count)) == count
        assert layout.most_in(layout.size_of(count) - 1) == count - 1
        assert layout.count_of(layout.size_of(count) + 1) == 0
    assert layout.count_of(0) == 0
    assert layout.most_in(3) == 0


@pytest.mark.parametrize("when", ["written", "read"])
def test_a_signal_handlers_timeout_is_no_failure_of_the_disk(
    served: Make, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """`TimeoutError` is an `OSError`. If the tier took the timeout of a signal handler for an error of the disk, a
    change could stay incomplete unnoticed.
    """
    it = served()
    it.serve(PROMPT)
    if when == "read":
        down(it)
        it.manager.close()
        it = served()
    tier = files_of(it)
    index = tier._index.pages if when == "written" else it.tiers.host.pool.index
    it.tiers.store_all()

    def interrupted(*_: object) -> None:
        monkeypatch.undo()
        raise TimeoutError("the handler's")

    monkeypatch.setattr(index, "publish", interrupted)
    with pytest.raises(TimeoutError, match="the handler's"):
        it.manager.flush_tiers() if when == "written" else it.serve(PROMPT)
    with pytest.raises(InterruptedCallError):
        it.manager.fetch([])
    it.manager.recover()
    it.manager.check()
