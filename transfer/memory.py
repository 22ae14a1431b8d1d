"""The kinds of memory that hold pages."""

from __future__ import annotations

from enum import Enum


class MemoryType(Enum):
    """Where the bytes of a tensor live. The values are NIXL's names."""

    DRAM = "DRAM"
    VRAM = "VRAM"
