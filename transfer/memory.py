"""The kinds of memory that hold pages."""

from __future__ import annotations

from enum import Enum


class MemoryType(Enum):
    """The kind of memory of a tensor. The values are NIXL's names."""

    DRAM = "DRAM"
    VRAM = "VRAM"
