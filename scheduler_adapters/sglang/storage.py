"""`PagewireFiles`: SGLang's pages in files that outlive the server, as its storage below HiCache's host memory.

SGLang imports it by its module path:

    sglang serve --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic
      --hicache-storage-backend-extra-config '{"backend_name": "pagewire", "class_name": "PagewireFiles",
        "module_path": "scheduler_adapters.sglang.storage", "file_tier_dir": "/var/kv", "file_tier_max_gb": 200,
        "file_tier_key": "MODEL and its weights"}'

SGLang names a page by a hash, which covers its tokens, the tokens before it, salt and `extra_key`. Files belong to a
namespace: the key, the checkpoint, SGLang's version, the rank, and the pool's class, layout, dtype and sizes. If one of
these differs, nothing is found. In contrast to SGLang's own files, each page has a checksum.

When SGLang changes its weights, the files are closed, because host memory still has pages of the weights before. They
are opened again when SGLang has flushed its cache, in the namespace of the new checkpoint. Weights from memory
have no namespace, because their name may mean other weights after a restart. So the files stay closed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvcache.tiers.file_tier import FILE_BYTES, NO_ENTRY, FileIndex
from kvcache.tiers.page_files import FileFormat, FileRefusal, FileRefusals, SystemIO, read_pages
from kvcache.tiers.page_folder import PageFolder, namespace_of
from scheduler_adapters.checkpoints import digest_of_checkpoint
from scheduler_adapters.sglang.weights import served_weights
from transfer.errors import InvalidEngineError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

_GB = 2**30
_DIGEST_WORDS = 4
_RESCAN_S = 5.0
_PAUSE_S = 10.0
_DAMAGE = {FileRefusal.CUT, FileRefusal.FOREIGN, FileRefusal.CORRUPTED}

logger = logging.getLogger("pagewire.sglang")


class StorageOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options in `--hicache-storage-backend-extra-config`. Other keys are SGLang's.

    Attributes:
        file_tier_dir: folder of this server's user.
        file_tier_max_gb: the most bytes of files of one rank, in units of 2**30.
        file_tier_key: names the model and its weights.
    """

    file_tier_dir: Annotated[str, Meta(min_length=1)]
    file_tier_max_gb: Annotated[float, Meta(gt=0)]
    file_tier_key: Annotated[str, Meta(min_length=1)]


def read_storage_options(extra: Mapping[str, Any]) -> StorageOptions:
    """Returns the options. Raises `InvalidEngineError` if they do not fit; the message names the option."""
    given = {name: extra[name] for name in StorageOptions.__struct_fields__ if name in extra}
    try:
        options = msgspec.convert(given, StorageOptions, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidEngineError(f"--hicache-storage-backend-extra-config: {error}") from error
    if strange := [name for name in extra if name.startswith("file_tier") and name not in given]:
        raise InvalidEngineError(
            f"--hicache-storage-backend-extra-config: there is no option {', '.join(map(repr, strange))}; the options "
            f"are {', '.join(StorageOptions.__struct_fields__)}"
        )
    if extra.get("interface_v1"):
        raise InvalidEngineError("interface_v1 is not supported: pages are handed over one by one; remove it")
    return options


class PagewireFiles(HiCacheStorage):
    """The files of one rank. SGLang calls it from two threads: one reads, and one writes.

    Raises:
        InvalidEngineError: (a ValueError) an option does not fit, or the model has other pools than that of its pages.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _: Mapping[str, Any] | None = None) -> None:
        self._config = storage_config
        self._options = read_storage_options(storage_config.extra_config or {})
        self._lock = threading.Lock()  # guards the index; files are read and written outside it
        self._io = SystemIO()
        self._paused_until = 0.0
        self._is_open = False
        self._weights = served_weights()
        self.written = self.read = 0  # pages so far
        self.refusals = FileRefusals()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Opens the folder for the pages of a pool."""
        super().register_mem_pool_host(mem_pool_host)
        self._open(mem_pool_host)
        self._weights.tell(self)
        clear = mem_pool_host.clear

        @functools.wraps(clear)
        def run() -> None:  # SGLang calls it when it flushes its cache, after its storage threads have ended
            clear()
            self._on_flush()

        mem_pool_host.clear = run

    def on_weights(self, before: str, *, changed: bool) -> None:  # noqa: ARG002
        """Called when SGLang has other weights, or another name for them (`weights.py`)."""
        self._is_open = self._is_open and not changed

    def _on_flush(self) -> None:
        """Opens the files of the current weights, now that host memory has no page of the weights before."""
        if self._is_open:
            return
        if self._weights.files == "":
            logger.warning(
                "files: the weights (%s) were not loaded from a checkpoint, so nothing is written or read",
                self._weights.text,
            )
        else:
            self._open(self.mem_pool_host)

    def _open(self, mem_pool_host: Any) -> None:
        page: torch.Tensor = mem_pool_host.get_dummy_flat_data_page()
        namespace = namespace_of("sglang", self._options.file_tier_key, self._described(mem_pool_host, page))
        self._layout = FileFormat(namespace, page.nbytes, 8 * _DIGEST_WORDS)
        self._folder = PageFolder(Path(self._options.file_tier_dir), self._layout)
        most = int(self._options.file_tier_max_gb * _GB)
        if not self._layout.most_in(most):
            raise InvalidEngineError(f"file_tier_max_gb is {self._options.file_tier_max_gb}: less than one page")
        self._most = most
        self._index = FileIndex(most, page.nbytes, _DIGEST_WORDS)
        self._scan(first=True)
        self._is_open = self._weights.files != ""

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuses pools of windows, recurrent states and drafts, whose pages are handed over in another way."""
        if str(host_pool_name) != "kv":
            raise InvalidEngineError(f"PagewireFiles: the pool {str(host_pool_name)!r} is not supported, only KV pages")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def _described(self, pool: Any, page: torch.Tensor) -> str:
        """Returns text that differs if a page of this rank means something else."""
        config, model = self._config, str(self._config.model_name)
        # Ranks of a model with latents have the same pages.
        ranks = [] if config.is_mla_model else [config.tp_rank, config.tp_size]
        ranks += [
            config.pp_rank,
            config.pp_size,
            config.attn_cp_rank,
            config.attn_cp_size,
            config.dcp_rank,
            config.dcp_size,
        ]
        sizes = ("layout", "page_size", "layer_num", "head_num", "head_dim", "kv_lora_rank", "qk_rope_head_dim")
        described = {
            "sglang": version("sglang"),
            "model": [model, self._weights.files or digest_of_checkpoint(model), _config_of(model)],
            "ranks": ranks,
            "pool": [type(pool).__name__, str(pool.dtype), str(page.dtype), list(page.shape)],
            "sizes": {name: str(getattr(pool, name, None)) for name in (*sizes, "start_layer", "end_layer")},
        }
        return json.dumps(described, sort_keys=True)

    # ---- SGLang's interface

    def exists(self, key: str) -> bool:
        """Whether a file has the page."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Returns how many pages are in files, from the first one on, without a gap."""
        del extra_info
        if not self._is_open:
            return 0
        self._rescan()
        with self._lock:
            found = self._index.find(_digests(keys))
        return len(keys) if found.all() else int((found == NO_ENTRY).argmax())

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Reads a page. Returns None if no file has it, or its file is damaged."""
        del target_sizes
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Reads pages into flat tensors. Returns None for each page that no file has, or whose file is damaged."""
        del target_sizes
        targets = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        found: list[torch.Tensor | None] = [None] * len(keys)
        if not self._is_open:
            return found
        digests = _digests(keys)
        with self._lock:
            entries = self._index.find(digests)
            at = np.flatnonzero(entries != NO_ENTRY)
            self._index.use(entries[at])
            runs = [(name, first, at[run]) for name, first, run in self._index.whereabouts(entries[at])]
        for name, first, run in runs:
            path, parts = self._folder.path / name, [[_bytes_of(targets[one])] for one in run]
            refusals = read_pages(path, self._layout, first, digests[run], parts, self._io)
            with contextlib.suppress(OSError):
                os.utime(path, follow_symlinks=False)
            for one, refusal in zip(run.tolist(), refusals, strict=True):
                found[one] = None if refusal else targets[one]
            self._take_read(name, entries[run], digests[run], refusals)
        return found

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Writes a page. Returns whether a file has it now."""
        del target_location, target_sizes
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Writes the pages that no file has. Returns whether files have all of them now.

        After a failure, say of a full disk, nothing is written for a while.
        """
        del target_locations, target_sizes
        if not self._is_open or time.monotonic() < self._paused_until:
            return False
        digests = _digests(keys)
        with self._lock:
            entries = self._index.find(digests)
            self._index.use(entries[entries != NO_ENTRY])
        new = np.unique(digests, axis=0, return_index=True)[1]
        new = np.sort(new[entries[new] == NO_ENTRY])
        most = max(1, min(FILE_BYTES // self._layout.page_bytes, self._layout.most_in(self._most)))
        try:
            for part in np.split(new, range(most, len(new), most)) if len(new) else ():
                self._write(digests[part], [[_bytes_of(values[one])] for one in part])
        except OSError as error:
            logger.warning("files: a write failed; nothing more is written for %.0f s: %s", _PAUSE_S, error)
            self._paused_until = time.monotonic() + _PAUSE_S
            return False
        return True

    def clear(self) -> None:
        """Forgets every page. Servers that start later find none of them either."""
        with self._lock:
            self._index.clear()
            before = self._folder.renew()
        self._folder.remove(before)

    def close(self) -> None:
        """Does nothing: no file stays open, and no thread runs."""

    # ---- inside

    def _write(self, digests: Any, pages: list[list[Any]]) -> None:
        with self._lock:
            names = self._index.room_for(self._layout.size_of(len(digests)))
        self._remove(names)
        name, size = self._folder.write(digests, pages, self._io)
        with self._lock:
            self._add(name, size, digests)
        self.written += len(digests)

    def _add(self, name: str, size: int, digests: Any) -> None:
        self._remove(self._index.room_for(size))
        self._index.add(name, size, *self._layout.digests_and_tables(digests))

    def _take_read(self, name: str, entries: Any, digests: Any, refusals: Sequence[FileRefusal | None]) -> None:
        """Forgets pages that were refused, and the whole file if it has wrong bytes."""
        right = np.array([refusal is None for refusal in refusals], np.bool_)
        self.read += int(right.sum())
        self.refusals.update(filter(None, refusals))
        if right.all():
            return
        with self._lock:
            self._index.drop(entries[~right & (self._index.find(digests) == entries)])
            if not _DAMAGE.isdisjoint(refusals):
                self._index.forget(name)
        if not _DAMAGE.isdisjoint(refusals):
            self._remove([name])

    def _rescan(self) -> None:
        """Takes note of files that other servers have written or removed."""
        if time.monotonic() - self._scanned > _RESCAN_S:
            self._scan()

    def _scan(self, *, first: bool = False) -> None:
        self._scanned = time.monotonic()
        scan = self._folder.scan(self._index.names, first=first)
        with self._lock:
            for name in scan.gone:
                self._index.forget(name)
            for name, size, digests in scan.found:
                if name not in self._index and size <= self._most:
                    self._add(name, size, digests)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                (self._folder.path / name).unlink()


def _config_of(model: str) -> str:
    try:
        return hashlib.sha256((Path(model) / "config.json").read_bytes()).hexdigest()
    except OSError:
        return ""


def _digests(keys: Iterator[str] | Sequence[str]) -> Any:
    """Returns the digests of pages, uint64 `[pages, 4]`."""
    joined = b"".join(hashlib.sha256(key.encode()).digest() for key in keys)
    return np.frombuffer(joined, np.uint64).reshape(-1, _DIGEST_WORDS)


def _bytes_of(page: torch.Tensor) -> Any:
    """Returns a view of a flat page as bytes."""
    return page.view(torch.uint8).numpy()
