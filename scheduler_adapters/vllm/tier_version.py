"""`TierVersion`: which weights have computed the blocks that an engine stores. Used in the process of vLLM's scheduler.

vLLM's hash of a block does not cover the weights. Our tiers therefore add them to each block's name. A version is known
by the user's name for it, or by the digest of the checkpoint that all weights were read from. Weights that were updated
from memory and not named have a name that never occurs again.

After a change, vLLM's own cache may still have blocks of the weights before, and running requests go on with theirs.
What they store is of no version, until vLLM's cache was empty once.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scheduler_adapters.vllm.resets import is_empty

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from scheduler_adapters.vllm.shared_slots import SharedSlots


class TierVersion:
    """The version of the blocks that are stored and found now.

    Args:
        shared: the shared memory of each rank, in which its worker counts changes of its weights.

    Attributes:
        number: increases whenever blocks that are on their way must not be published any more.
        salt: part of the name of each block. Empty for the weights of the engine's start.
        is_known: whether blocks with this salt may be in files and objects.
    """

    def __init__(self, shared: Sequence[SharedSlots]) -> None:
        self.number, self.salt, self.is_known = 0, b"", True
        self._shared, self._at_start = shared, shared[0].weights
        self._changes: int = 0  # of all ranks together
        self._name: str | None = None  # the user's name for the weights of now
        self._is_clean = True  # whether vLLM's cache has been empty since the last change
        self._manager: KVCacheManager | None = None

    def bind(self, manager: KVCacheManager) -> None:
        """Sets vLLM's block manager. Without it, no version is known after a change."""
        self._manager = manager

    def named(self, name: str) -> bool:
        """Records the user's name for the current weights, which may be all that is told of new ones.

        Returns whether blocks have another name from now on.
        """
        if not self.follow() and name == self._name:
            return False
        self._name, self._is_clean = name, False
        self._rename()
        return True

    def follow(self) -> bool:
        """Notices changes of the weights. Returns whether blocks have another name from now on."""
        changes = sum(rank.changes for rank in self._shared)
        if changes != self._changes:
            self._changes, self._name, self._is_clean = changes, None, False
        elif self._is_clean or not self._is_empty():
            return False
        self._rename()
        return True

    def _is_empty(self) -> bool:
        """Whether vLLM's cache has no block that a request could use."""
        return self._manager is not None and is_empty(self._manager)

    def _rename(self) -> None:
        self._is_clean = self._is_clean or self._is_empty()
        salt = self._salt() if self._is_clean else None
        self.number, self.is_known = self.number + 1, salt is not None
        self.salt = secrets.token_bytes(16) if salt is None else salt

    def _salt(self) -> bytes | None:
        """Returns what stands for the weights of now; None if they are not known."""
        if self._name is not None:
            return b"version " + hashlib.sha256(self._name.encode(errors="surrogatepass")).digest()
        weights = {rank.weights for rank in self._shared}
        if len(weights) > 1 or b"" in weights:
            return None
        return b"" if weights == {self._at_start} else b"checkpoint " + weights.pop()
