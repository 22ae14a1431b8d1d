"""Only its owner may read a draft, and opening files leaves no file descriptor open."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvcache.tiers.page_files import list_folder, open_draft, opened, opened_folder
from tests.alone import alone, open_files


@pytest.fixture(params=[0o000, 0o077, 0o277])
def mask(request: pytest.FixtureRequest) -> int:
    return request.param


def test_only_its_owner_may_read_a_draft_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with open_draft(tmp_path / "draft"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "draft").stat().st_mode) == 0o600


def test_a_draft_with_an_existing_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "draft").touch()
    with pytest.raises(FileExistsError), open_draft(tmp_path / "draft"):
        pass


def test_opening_files_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def opens_files() -> None:
        before = open_files()
        with pytest.raises(RuntimeError, match="inside"), opened_folder(tmp_path):
            raise RuntimeError("inside")
        with pytest.raises(RuntimeError, match="inside"), opened(tmp_path / "file"):
            raise RuntimeError("inside")
        with pytest.raises(FileNotFoundError), opened(tmp_path / "gone"):
            pass
        with open_draft(tmp_path / "draft"):
            pass
        assert sorted(list_folder(tmp_path)) == ["draft", "file"]
        assert open_files() == before

    alone(opens_files)
