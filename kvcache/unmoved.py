"""`Unmoved`: tensors that must stay where they are, because NIXL, numpy views or graphs know their addresses."""

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from kvcache.errors import MovedMemoryError

_MOVES = ("_share_fd_cpu_", "_share_filename_cpu_", "resize_")
"""The methods with which torch moves a storage. The first two are those of its two sharing strategies."""
_COUNT = "_pagewire_unmoved"


class Unmoved:
    """Keeps tensors at their addresses as long as this object exists.

    torch moves the whole storage of a CPU tensor to another address when any view of it is sent through
    `torch.multiprocessing`, or when `share_memory_` or the storage's `resize_` is called. It frees the old memory and
    reports nothing. For these tensors, such calls raise `MovedMemoryError` instead. torch keeps the address of a
    storage that was already shared before, so such a storage may still be sent.

    `check` notices what cannot be refused: `set_` and `resize_` of a tensor, and a shared storage that is sent after
    torch's sharing strategy was changed. It compares one address for each tensor.

    >>> pool = torch.zeros(8)
    >>> unmoved = Unmoved({"pages": pool})
    >>> pool[:2].share_memory_()
    Traceback (most recent call last):
    kvcache.errors.MovedMemoryError: pages: torch cannot move this memory: ...
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._addresses = [(name, tensor, tensor.data_ptr()) for name, tensor in tensors.items()]
        storages: dict[int, Any] = {}
        for name, tensor in tensors.items():
            storage: Any = tensor.untyped_storage()
            # True of all storages on GPUs, too. torch shares them where they are.
            if storage.data_ptr() not in storages and not storage.is_shared():
                storages[storage.data_ptr()] = storage
                _hold(storage, name)
        weakref.finalize(self, _let_go, [*storages.values()]).atexit = False

    @property
    def moved(self) -> str:
        """Says which tensor is no longer at its address, and why that may be. Empty if none has moved."""
        for name, tensor, address in self._addresses:
            if tensor.data_ptr() != address:
                return (
                    f"{name}: this memory was moved from {address:#x} to {tensor.data_ptr():#x} by torch (`set_`, "
                    "`resize_`, or a tensor sent to another process); what knows the old address cannot be used"
                )
        return ""

    def check(self) -> None:
        """Raise `MovedMemoryError` if a tensor is no longer at its address."""
        if moved := self.moved:
            raise MovedMemoryError(moved)


def _hold(storage: Any, name: str) -> None:
    # torch has one Python object for each storage as long as the storage exists, so these attributes stay with it.
    setattr(storage, _COUNT, getattr(storage, _COUNT, 0) + 1)
    for method in _MOVES:
        setattr(storage, method, partial(_refuse, name))


def _let_go(storages: Sequence[Any]) -> None:
    for storage in storages:
        if left := getattr(storage, _COUNT) - 1:
            setattr(storage, _COUNT, left)
            continue
        for name in (_COUNT, *_MOVES):
            delattr(storage, name)


def _refuse(name: str, *_: object, **__: object) -> NoReturn:
    raise MovedMemoryError(
        f"{name}: torch cannot move this memory: `share_memory_`, `resize_`, and sending a tensor to another process "
        "would move all of it, but its present address is known to block tables and transfers; send a copy "
        "(`tensor.clone()`)"
    )
