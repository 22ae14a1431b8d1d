from __future__ import annotations

import ctypes

import pytest

from benchmarks import memory


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="malloc is not glibc's")
def test_freed_memory_that_malloc_keeps_is_not_measured() -> None:
    before = memory.trimmed()
    held = [bytearray(b"x") * (100 << 10) for _ in range(800)]
    # The last array stays allocated, so that malloc does not by itself return the memory of the other arrays to the
    # system.
    del held[:-1]
    kept = memory.resident() - before
    assert kept > 60 << 20
    assert memory.trimmed() - before < 20 << 20
    assert len(held) == 1
