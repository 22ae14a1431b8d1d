"""Identifies the weights and adapters that an engine has loaded after its start, by the files that they come from.

The handshake compares the model's name when two engines first meet. vLLM can load other weights later, and adapters of
one name can have other weights at the two sides. Each hand-over therefore also compares the digests of these files.
"""

from __future__ import annotations

import functools
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scheduler_adapters.checkpoints import digest_of_checkpoint, digest_of_files, files_in

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_OF_ADAPTER = ("adapter_*", "new_embeddings.*")


def named_adapter(lora: LoRARequest) -> tuple[str, str]:
    """Returns the name of an adapter and what identifies its weights, as a pair for `Prompt.named`.

    The folder may have another path on the other side. It is read once, when the first request names the adapter, as
    vLLM does. If vLLM reloads the adapter in place, its folder is read whenever a file has changed.
    """
    return f"adapter {lora.lora_name!r}", _digest_of_adapter(lora.lora_int_id, lora.lora_path, _changes(lora))


def _changes(lora: LoRARequest) -> tuple[tuple[str, int, int], ...]:
    if not lora.load_inplace:
        return ()
    files = files_in(_folder(lora.lora_path), _OF_ADAPTER)
    return tuple(sorted((file.name, (at := file.stat()).st_mtime_ns, at.st_size) for file in files))


def _folder(path: str) -> Path:
    from vllm.lora.utils import get_adapter_absolute_path  # noqa: PLC0415  (slow, and only engines with adapters need it)

    return Path(get_adapter_absolute_path(path))


@functools.lru_cache(maxsize=4096)
def _digest_of_adapter(lora_int_id: int, path: str, changes: tuple[tuple[str, int, int], ...]) -> str:
    del lora_int_id, changes  # vLLM gives each adapter that it loads a new id
    try:
        found = digest_of_files(files_in(_folder(path), _OF_ADAPTER))
    except OSError:
        found = ""
    return f"files {found}" if found else f"unreadable files of {path}"


class LoadedWeights:
    """Identifies the weights of a worker after vLLM has reloaded or updated them.

    Attributes:
        named: empty until then. All ranks have the same names and values, except while a change goes on.
        checkpoint: the digest of the checkpoint that all weights were read from; empty at the start and for others.
    """

    def __init__(self) -> None:
        self.named: dict[str, str] = {}
        self.checkpoint = ""
        self._loaded, self._is_updated = "as at the start", False
        self._updates = 0  # since the start of the process, because after the same load others may follow

    def changing(self) -> None:
        """Records that a change has begun. Until it has succeeded, the weights are equal to no others."""
        self.checkpoint = ""
        self.named = {"weights": f"of a change that has not ended or has failed ({secrets.token_hex(8)})"}

    def reloaded(self, path: str) -> None:
        """Records that all weights were read from a checkpoint."""
        found = self.checkpoint = digest_of_checkpoint(path)
        self._loaded, self._is_updated = f"checkpoint {found}" if found else f"reloaded from {path}", False
        self._name()

    def versioned(self, name: str) -> None:
        """Records the name that the user has given to the weights. It stands for them, wherever they came from."""
        self._loaded, self._is_updated = f"version {name!r}", False
        self._name()

    def updated(self) -> None:
        """Records that weights came from memory, so that only the number of updates can be compared."""
        self.checkpoint = ""
        self._updates += 1
        self._is_updated = True
        self._name()

    def _name(self) -> None:
        updates = f", then update {self._updates} from memory" if self._is_updated else ""
        self.named = {"weights": self._loaded + updates}


_watching: weakref.WeakSet[WeightsWatch] = weakref.WeakSet()
_wrapped: set[str] = set()  # the methods of vLLM's worker and engine that are wrapped in this process


class WeightsWatch:
    """Calls a function when a worker of this process has reloaded or updated its weights.

    vLLM does not tell its connectors. The methods of its worker are therefore wrapped, once in a process.

    Args:
        changed: gets what identifies the new weights. It runs on the thread of the worker.
    """

    def __init__(self, changed: Callable[[dict[str, str]], object]) -> None:
        self.weights = LoadedWeights()
        self._changed = changed
        _wrap_worker()
        _watching.add(self)

    def on_change(self) -> None:
        """Called before the worker's method, or after the one that only begins an update."""
        self.weights.changing()
        self._changed(self.weights.named)

    def on_reload(self, path: str, *, from_memory: bool) -> None:
        """Called after the worker's method."""
        if from_memory:
            self.weights.updated()
        else:
            self.weights.reloaded(path)
        self._changed(self.weights.named)


_ENDS = ("reload_weights", "finish_weight_update")
_BEGINNINGS = ("start_weight_update", "start_draft_weight_update")
CHANGES = frozenset({*_ENDS, *_BEGINNINGS})
"""The methods of vLLM's worker that change its weights."""


def _wrap_worker() -> None:
    from vllm.v1.worker.gpu_worker import Worker  # noqa: PLC0415  (the workers of all devices inherit it)

    for name in CHANGES - _wrapped:
        if (method := getattr(Worker, name, None)) is not None:
            told = _begun(method) if name in _BEGINNINGS else _told(method, always_from_memory=name != _ENDS[0])
            setattr(Worker, name, told)
            _wrapped.add(name)


def _begun(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(worker: Any, *args: Any, **options: Any) -> Any:
        found = method(worker, *args, **options)  # if it raises, no update has begun
        for watch in list(_watching):
            watch.on_change()
        return found

    return run


def _told(method: Callable[..., Any], *, always_from_memory: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(worker: Any, *args: Any, **options: Any) -> Any:
        for watch in list(_watching) if not always_from_memory else ():
            watch.on_change()  # if it raises, some of the weights may be new
        found = method(worker, *args, **options)
        given = args[0] if args else options.get("weights_iterator")
        from_memory = always_from_memory or given is not None
        for watch in list(_watching):
            watch.on_reload(str(worker.vllm_config.model_config.model), from_memory=from_memory)
        return found

    return run


_versioned: weakref.WeakSet[VersionWatch] = weakref.WeakSet()


class VersionWatch:
    """Calls a function when the user names the weights of an engine of this process.

    vLLM does so in `finish_weight_update(weight_version=)` and `update_weight_version`, and tells its engine but no
    connector. The engine's methods are therefore wrapped, once in a process. Versions before 0.32 may have no names.

    Args:
        named: gets the name. It runs on the engine's thread.
        called: gets the name of each method of the workers that the user has called, after the call.
    """

    def __init__(self, named: Callable[[str], object], called: Callable[[object], object]) -> None:
        self.named, self.called = named, called
        _wrap_engine()
        _versioned.add(self)


def _wrap_engine() -> None:
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415  (imported by every process with an engine anyway)

    for name, tell in (("set_weight_version", _tell_name), ("collective_rpc", _tell_call)):
        method: Any = getattr(EngineCore, name, None)
        if method is not None and name not in _wrapped:
            setattr(EngineCore, name, tell(method))
            _wrapped.add(name)


def _tell_name(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(engine: Any, weight_version: str) -> Any:
        found = method(engine, weight_version)
        for watch in list(_versioned):
            watch.named(weight_version)
        return found

    return run


def _tell_call(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(engine: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(engine, *args, **options)
        finally:
            for watch in list(_versioned):
                watch.called(args[0] if args else options.get("method"))

    return run
