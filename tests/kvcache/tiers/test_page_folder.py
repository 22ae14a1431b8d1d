"""The folder of a namespace, while another process resets it at the worst moment."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcache.tiers import page_folder as module
from kvcache.tiers.page_files import FileFormat
from kvcache.tiers.page_folder import PageFolder, namespace_of

LAYOUT = FileFormat(namespace_of("model"), 96, 16)


@pytest.mark.parametrize("after", ["list_folder", "_read_epoch"])
def test_a_folder_that_another_process_begins_during_a_reset_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """A process looks at the folder twice. The other process resets the cache between the two looks."""
    PageFolder(tmp_path, LAYOUT).renew()
    abandoned = PageFolder(tmp_path, LAYOUT)
    old = abandoned.path
    assert abandoned.renew() == old
    mine, other = PageFolder(tmp_path, LAYOUT), PageFolder(tmp_path, LAYOUT)
    resets: list[Path] = []

    def then_resets(looks: Callable[..., Any]) -> Callable[..., Any]:
        def look(*given: Any) -> Any:
            found = looks(*given)
            if not resets:
                resets.append(other.path)  # The reset below also calls `look`. This call triggers no further reset.
                other.renew()
                (other.path / "content").write_text("is somebody's")
            return found

        return look

    where: Any = module if after == "list_folder" else PageFolder
    monkeypatch.setattr(where, after, then_resets(getattr(where, after)))
    mine.scan(frozenset(), first=True)
    assert resets
    assert other.path not in resets
    assert (other.path / "content").exists()
    assert mine.path.exists()
    assert not old.exists()


def test_after_a_reset_that_cannot_name_a_new_folder_no_later_start_uses_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = PageFolder(tmp_path, LAYOUT)
    old = folder.path
    (old / "content").write_text("of before the reset")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(PageFolder, "_name_epoch", full)
        assert folder.renew() == old
    assert "a reset could not record the name of its new folder: [Errno 28] No space left on device" in caplog.text
    assert folder.path != old
    later = PageFolder(tmp_path, LAYOUT)
    assert later.path not in {old, folder.path}
    assert not (later.path / "content").exists()


def test_a_reset_names_a_new_folder_or_joins_the_one_of_another_reset(tmp_path: Path) -> None:
    mine, other = PageFolder(tmp_path, LAYOUT), PageFolder(tmp_path, LAYOUT)
    first = mine.path
    assert other.path == first
    assert mine.renew() == first
    assert mine.path != first
    assert mine.path.is_dir()
    assert other.renew() == first
    assert other.path == mine.path
    assert PageFolder(tmp_path, LAYOUT).path == mine.path
