"""Counters of the manager, read as one frozen value."""

import msgspec


class KVCacheMetrics(msgspec.Struct, frozen=True):
    """Counts of what a manager did since it was made or since `reset_metrics`, over all replicas."""

    input_tokens: int = 0  # prompt tokens that ran, each counted once, without decode steps and refused reservations
    cache_tokens: int = 0  # prompt tokens that need not run, because their pages were cached
    h2d_blocks_copied: int = 0  # pages copied from the host tier
    d2h_blocks_copied: int = 0  # pages copied to the host tier
    evictions: int = 0  # published pages that were evicted
    d2d_blocks_copied: int = 0  # pages copied from one replica to another
    file_blocks_written: int = 0  # pages written to the file tier
    file_blocks_read: int = 0  # pages read from the file tier into the host tier
    file_blocks_refused: int = 0  # pages of the file tier that were not read, for one of these reasons:
    file_blocks_gone: int = 0  # their file was deleted
    file_blocks_unreadable: int = 0  # a link or folder has the file's name, or the system fails to read it
    file_blocks_cut: int = 0  # the size of their file has changed
    file_blocks_foreign: int = 0  # the file has other pages in their place
    file_blocks_corrupted: int = 0  # their checksums do not match
    object_blocks_written: int = 0  # pages written to the object store
    object_blocks_read: int = 0  # pages read from the object store into the host tier
    object_blocks_refused: int = 0  # pages of objects that were not accepted: damaged, cut short or gone
    object_store_failures: int = 0  # calls of the object store that failed or timed out
    h2d_states_copied: int = 0  # recurrent states copied from the host tier
    d2h_states_copied: int = 0  # recurrent states copied to the host tier
    d2d_states_copied: int = 0  # recurrent states copied from one replica to another
    file_states_written: int = 0  # recurrent states written to the file tier
    file_states_read: int = 0  # recurrent states read from the file tier into the host tier
    file_states_refused: int = 0  # recurrent states of the file tier that were not read, for one of the same reasons
    object_states_written: int = 0  # recurrent states written to the object store
    object_states_read: int = 0  # recurrent states read from the object store into the host tier
    object_states_refused: int = 0  # recurrent states of objects that were not accepted: wrong, cut short or gone
    state_hits: int = 0  # requests that resumed from a cached recurrent state
    state_evictions: int = 0  # cached recurrent states that were evicted from the device
    files_refused: int = 0  # files in the file tier's folder that were not accepted: broken, or of another kind

    @property
    def prompt_tokens(self) -> int:
        """All prompt tokens."""
        return self.input_tokens + self.cache_tokens

    @property
    def cache_hit_rate(self) -> float:
        """The share of the prompt tokens that were cached, 0.0 to 1.0."""
        return self.cache_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: "KVCacheMetrics") -> "KVCacheMetrics":
        return KVCacheMetrics(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))

    def __sub__(self, other: "KVCacheMetrics") -> "KVCacheMetrics":
        return KVCacheMetrics(*(getattr(self, name) - getattr(other, name) for name in self.__struct_fields__))
