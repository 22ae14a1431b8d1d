import os
import threading
from pathlib import Path

import pytest

from tests.alone import alone, open_files


def test_a_check_in_a_fork_fails_here_with_its_own_words() -> None:
    def fails() -> None:
        raise ValueError("said in the fork")

    with pytest.raises(AssertionError, match="ValueError: said in the fork"):
        alone(fails)


def test_a_fork_that_ends_before_its_check_fails_too() -> None:
    with pytest.raises(AssertionError):
        alone(lambda: os._exit(3))


def test_a_fork_has_one_thread_and_sees_each_file_that_it_opens(tmp_path: Path) -> None:
    def opens() -> None:
        before = open_files()
        assert threading.active_count() == 1
        with (tmp_path / "file").open("w"):
            assert len(open_files() - before) == 1
        assert open_files() == before

    alone(opens)
    assert (tmp_path / "file").exists()
