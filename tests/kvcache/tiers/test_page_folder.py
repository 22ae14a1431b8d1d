"""The folder of a namespace while others reset it at the worst moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcache.tiers import page_folder as module
from kvcache.tiers.page_files import FileFormat
from kvcache.tiers.page_folder import PageFolder, namespace_of

NAMESPACE = namespace_of("model")
LAYOUT = FileFormat(NAMESPACE, 96, 16)


@pytest.mark.parametrize("after", ["list_folder", "_read_epoch"])
def test_a_folder_that_another_begins_while_old_ones_are_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """The other resets the cache between two looks of ours, whichever of them comes first."""
    PageFolder(tmp_path, NAMESPACE).renew()
    abandoned = PageFolder(tmp_path, NAMESPACE)
    old = abandoned.path
    assert abandoned.renew() == old
    mine, other = PageFolder(tmp_path, NAMESPACE), PageFolder(tmp_path, NAMESPACE)
    resets: list[Path] = []

    def then_resets(looks: Callable[..., Any]) -> Callable[..., Any]:
        def look(*given: Any) -> Any:
            found = looks(*given)
            if not resets:
                resets.append(other.path)  # so that the reset's own looks reset nothing
                other.renew()
                (other.path / "content").write_text("is somebody's")
            return found

        return look

    where: Any = module if after == "list_folder" else PageFolder
    monkeypatch.setattr(where, after, then_resets(getattr(where, after)))
    mine.scan(LAYOUT, frozenset(), first=True)
    assert resets
    assert other.path not in resets
    assert (other.path / "content").exists()
    assert mine.path.exists()
    assert not old.exists()
