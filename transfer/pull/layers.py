"""Which layers of a pull have arrived: a READ may bring a part of some layers, and other READs the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from transfer.pull.pull_state import Part

OnLayers: TypeAlias = Callable[[range], None]
"""Called, in the thread that polls, with layers of the model whose pages have arrived. Not yet fenced."""


def counted(parts: Sequence[Part], layers: range, on_layers: OnLayers) -> None:
    """Has `on_layers` called once all of `parts`, which together bring `layers`, have arrived and been moved home."""
    left = sum(len(part.local) > 0 for part in parts)
    if not left:
        on_layers(layers)
        return

    def one_less() -> None:
        nonlocal left
        left -= 1
        if not left:
            on_layers(layers)

    for part in parts:
        if len(part.local):
            part.arrived = _then(part.arrived, one_less)


def _then(arrived: Callable[[], Part | None] | None, one_less: Callable[[], None]) -> Callable[[], Part | None]:
    def both() -> Part | None:
        further = None if arrived is None else arrived()
        if further is None:
            one_less()
        else:
            further.arrived = _then(further.arrived, one_less)
        return further

    return both
