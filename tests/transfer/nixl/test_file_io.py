"""With NIXL's POSIX plugin, the file tier has the same pages and misses as with preadv and pwritev."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from kvcache.tiers.page_files import FileFormat, SystemIO, read_pages, read_rows, write_pages
from tests.kvcache.served import Served
from transfer.errors import AgentError
from transfer.nixl.file_io import NixlFileIO

PAGES, PAGE_BYTES = 12, 4096


@pytest.fixture(scope="module")
def memory() -> torch.Tensor:
    return torch.randint(0, 256, (2 * PAGES, PAGE_BYTES), dtype=torch.uint8)


@pytest.fixture(scope="module", params=[None, "aio", "uring"])
def io(memory: torch.Tensor, request: pytest.FixtureRequest) -> NixlFileIO:
    return NixlFileIO([memory], request.param)


def test_a_file_of_pages_is_the_same_by_either(io: NixlFileIO, memory: torch.Tensor, tmp_path: Path) -> None:
    layout = FileFormat(bytes(16), PAGE_BYTES, 16)
    digests = np.arange(2 * PAGES, dtype=np.uint64).reshape(PAGES, 2)
    rows = memory.numpy()
    given, taken = rows[:PAGES], rows[PAGES:]
    # Each row has two parts. The order of the parts differs from their order in memory.
    pages = [[row[:1000], row[1000:]] for row in given[::-1]]
    name, size = write_pages(tmp_path, "0-0.tmp", layout, digests, pages, io)
    by_nixl = (tmp_path / name).read_bytes()
    assert len(by_nixl) == size
    assert write_pages(tmp_path, "0-1.tmp", layout, digests, pages, SystemIO()) == (name, size)
    assert (tmp_path / name).read_bytes() == by_nixl
    assert np.array_equal(read_rows(tmp_path / name, layout), digests)
    taken[:] = 0
    wanted = [[row[:500], row[500:]] for row in taken[3:]]
    assert read_pages(tmp_path / name, layout, 3, digests[3:], wanted, io) == [None] * (PAGES - 3)
    assert (taken[3:] == given[::-1][3:]).all()
    assert not taken[:3].any()


def test_a_refusal_of_the_system_is_an_os_error(io: NixlFileIO, memory: torch.Tensor, tmp_path: Path) -> None:
    path, rows = tmp_path / "file", memory.numpy()
    path.write_bytes(bytes(100))
    with path.open("rb") as file:
        with pytest.raises(OSError, match="READ of 1 parts"):
            io.read(file.fileno(), [rows[0]], 0)  # The file has fewer bytes than the rows.
        with pytest.raises(OSError, match="WRITE of 1 parts"):
            io.write(file.fileno(), [rows[0]], 0)  # the file is open only for reading
        io.read(file.fileno(), [rows[0][:100]], 0)  # the plugin still works
    elsewhere = np.zeros(64, np.uint8)
    file = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(OSError, match="READ of 1 parts"):
            io.read(file, [elsewhere], 0)  # The memory of `elsewhere` was not registered.
    finally:
        os.close(file)


def test_an_unknown_queue_is_refused(memory: torch.Tensor) -> None:
    with pytest.raises((AgentError, OSError), match="READ of 1 parts"):
        NixlFileIO([memory], "nothing").read(0, [memory.numpy()[0]], 0)


def test_a_managers_pages_outlive_it_through_nixl(tmp_path: Path) -> None:
    files = {
        "file_tier_dir": str(tmp_path),
        "file_tier_max_gb": 1e-3,
        "file_tier_key": "model",
        "file_tier_io": NixlFileIO,
    }
    for start in range(2):
        it = Served(8, 40, params=files, tp=2, heads=2)
        assert it.serve(range(17)) == (16 if start else 0)
        it.manager.check()
        it.manager.close()
    assert it.kv.compared == 32
