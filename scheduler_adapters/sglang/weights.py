"""Identifies the weights that a scheduler of SGLang serves with, from SGLang's own calls.

SGLang changes weights in these calls: `update_weights_from_disk` and `_from_ipc`, `update_weights_from_tensor` and
`_from_distributed` between `begin_weight_update` and `end_weight_update`, and `release_memory_occupation`. These calls
and `update_weight_version` may name the weights. SGLang tells neither its prefix cache nor a transfer backend. The
methods that do the work are therefore wrapped, once in a process. The wrappers only keep this record.

    as at the start ──update──► being changed ──► checkpoint 3f2a…            a load from disk
                                      │           version 'step 7'            the call has a new name
                                      └─────────► …, then update 2            any other change, even a failed one
"""

from __future__ import annotations

import functools
import importlib
import secrets
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

_RUNNERS = "sglang.srt.model_executor.model_runner_components.weight_updater"
_SCHEDULER = "sglang.srt.managers.scheduler"
_RELEASES = "sglang.srt.managers.scheduler_components.weight_updater"
UNNAMED = "default"
"""SGLang's `weight_version` if the user gives none."""


class WeightsTold(Protocol):
    """An object that is told when the weights change. It is referenced weakly."""

    def on_weights(self, before: str, *, changed: bool) -> None:
        """Called on the scheduler's thread when `ServedWeights.text` has changed.

        `before` is the earlier text. `changed` is False if the same weights have only got another name.
        """
        ...


class ServedWeights:
    """Identifies the weights of this process. Only the scheduler's thread may change it.

    Attributes:
        text: what identifies the weights, in words that an error can quote. Empty at the start, unless the server was
            started with `--weight-version`. Servers with equal texts have equal weights if weights of the same name
            are the same, and updates without a name came in the same order.
        files: digest of the checkpoint that the weights were loaded from; empty if they came from elsewhere; None if
            they are those of the start.

    Examples:
        >>> weights = ServedWeights("default")
        >>> weights.begin("runner")
        >>> weights.text.startswith("being changed")
        True
        >>> weights.end("runner")
        >>> weights.text
        'as at the start, then update 1'
        >>> weights.named("step 7")
        >>> weights.text
        "version 'step 7'"
    """

    def __init__(self, name: str) -> None:
        self.files: str | None = None
        self._name, self._loaded = name, "" if name == UNNAMED else f"version {name!r}"
        self._is_updated, self._updates = False, 0  # all updates of the process count: others may follow the same load
        self._next_name: str | None = None
        self._open: set[object] = set()  # the model runners whose update has begun and not ended
        self._told: weakref.WeakSet[WeightsTold] = weakref.WeakSet()
        self.text = self._loaded

    def tell(self, told: WeightsTold) -> None:
        """Tells an object about every later change."""
        self._told.add(told)

    def begin(self, runner: object) -> None:
        """Records that an update begins. Until it ends, no two moments have the same text."""
        self._open.add(runner)
        self.touch()

    def touch(self) -> None:
        """Records that a part of the weights is about to change, or has changed, in an update that goes on."""
        self.files = ""
        self._set(f"being changed ({secrets.token_hex(8)})", changed=True)

    def end(self, runner: object, checkpoint: str = "") -> None:
        """Records that an update has ended.

        Args:
            runner: the argument of `begin`.
            checkpoint: the files or the name of the model that all weights were loaded from; empty if they came from
                memory, or the update has failed.
        """
        self._open.discard(runner)
        if self._open:
            self.touch()
            return
        self._updates += 1
        self.files = _digest_of(checkpoint) if checkpoint else ""
        if self.files:
            self._loaded = f"checkpoint {self.files}"
        self._is_updated = not self.files
        self._settle(changed=True)
        name, self._next_name = self._next_name, None
        self.named(name)

    def named(self, name: str | None) -> None:
        """Records the name that a call has given to the weights; None for no name.

        A name that was current before the weights changed says nothing new, so the text goes on counting the changes.
        A name that is given during an update counts from its end.
        """
        if self._open:
            self._next_name = self._next_name if name is None else name
        elif name is not None and name != self._name:
            self._name, self._loaded, self._is_updated = name, f"version {name!r}", False
            self._settle(changed=False)

    def _settle(self, *, changed: bool) -> None:
        updates = f", then update {self._updates}" if self._is_updated else ""
        self._set((self._loaded or "as at the start") + updates, changed=changed)

    def _set(self, text: str, *, changed: bool) -> None:
        before, self.text = self.text, text
        for told in list(self._told):
            told.on_weights(before, changed=changed)


def _digest_of(checkpoint: str) -> str:
    # SGLang imports this module in every process, so it imports little.
    from scheduler_adapters.checkpoints import digest_of_checkpoint  # noqa: PLC0415

    return digest_of_checkpoint(checkpoint)


class UnflushedTree:
    """Whether SGLang's own prefix cache may hold KV of earlier weights.

    SGLang flushes its cache at an update only if the call says so, and only while no request runs.

    Attributes:
        is_stale: True if the model has run since the cache was last empty, and the weights have changed after that.
    """

    def __init__(self, scheduler: Any) -> None:
        self.is_stale = False
        self._scheduler = scheduler
        self._emptied = 0  # the number of forward passes when the cache was last empty
        reset = scheduler.tree_cache.reset

        @functools.wraps(reset)
        def run() -> None:
            reset()
            self.is_stale, self._emptied = False, scheduler.forward_ct

        scheduler.tree_cache.reset = run

    def on_change(self) -> None:
        """Called when the weights have changed."""
        self.is_stale = self.is_stale or self._scheduler.forward_ct > self._emptied


_served: list[ServedWeights] = []


def served_weights() -> ServedWeights:
    """Returns the record of this process.

    Raises:
        InvalidEngineError: this version of SGLang lacks a method that changes weights; the message names all of them.
    """
    missing = follow_updates(imports=True)
    if missing:
        from transfer.errors import InvalidEngineError  # noqa: PLC0415  (as below)

        raise InvalidEngineError(
            f"this version of SGLang lacks {', '.join(missing)}, so changes of the weights would go unnoticed"
        )
    return _record()


def _record() -> ServedWeights:
    # Created before the first change of the name, so the name is that of the start.
    if not _served:
        from sglang.srt.runtime_context import get_serving  # noqa: PLC0415  (only processes with a scheduler need it)

        try:
            name = get_serving().weight_version
        except ValueError:  # no server has been set up in this process
            name = UNNAMED
        _served.append(ServedWeights(name))
    return _served[0]


def follow_updates(*, imports: bool = False) -> list[str]:
    """Wraps the methods of SGLang that change or name weights. Returns those that do not exist. Safe to call again.

    Args:
        imports: whether to import the modules of SGLang. Otherwise, methods of modules that are not imported yet are
            left as they are, and are not returned.
    """
    wrappers: dict[tuple[str, str, str], Callable[[Callable[..., Any]], Callable[..., Any]]] = {
        (_RUNNERS, "WeightUpdater", "begin_weight_update"): _begins,
        (_RUNNERS, "WeightUpdater", "update_weights_from_tensor"): _updates,
        (_RUNNERS, "WeightUpdater", "load_weights_from_distributed"): _updates,
        (_RUNNERS, "WeightUpdater", "end_weight_update"): _ends,
        (_RUNNERS, "WeightUpdater", "update_weights_from_disk"): _loads,
        (_RUNNERS, "WeightUpdater", "update_weights_from_ipc"): _updates,
        (_SCHEDULER, "Scheduler", "record_weight_version_change"): _names,
        (_RELEASES, "", "_export_static_state"): _releases,
    }
    missing: list[str] = []
    for (module, owner, name), wrap in wrappers.items():
        if imports:
            importlib.import_module(module)
        found: Any = sys.modules.get(module)
        if found is None:
            continue
        found = getattr(found, owner, None) if owner else found
        method = getattr(found, name, None)
        if method is None:
            missing.append(f"{module}.{owner}.{name}".replace("..", "."))
        elif not hasattr(method, "follows_weights"):
            made: Any = functools.wraps(method)(wrap(method))
            made.follows_weights = True
            setattr(found, name, made)
    return missing


def _begins(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(runner: Any, *args: Any, **options: Any) -> Any:
        _record().begin(id(runner))
        return method(runner, *args, **options)

    return run


def _ends(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(runner: Any, *args: Any, **options: Any) -> Any:
        try:
            return method(runner, *args, **options)
        finally:
            _record().end(id(runner))

    return run


def _updates(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method that changes weights within an open update, or is an update of its own."""

    def run(runner: Any, *args: Any, **options: Any) -> Any:
        key, record = ("call", id(runner)), _record()  # not the key of `_begins`: the end of the call is not its end
        record.begin(key)
        try:
            return method(runner, *args, **options)
        finally:
            record.end(key)

    return run


def _loads(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        runner: Any, model_path: str, load_format: str, weight_name_filter: Any = None, *args: Any, **options: Any
    ) -> Any:
        key, record, checkpoint = ("call", id(runner)), _record(), ""
        record.begin(key)
        try:
            found = method(runner, model_path, load_format, weight_name_filter, *args, **options)
            checkpoint = model_path if found[0] and weight_name_filter is None else ""
            return found
        finally:
            record.end(key, checkpoint)

    return run


def _names(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(scheduler: Any, new_version: str | None, *args: Any, **options: Any) -> Any:
        record = _record()
        found = method(scheduler, new_version, *args, **options)
        record.named(new_version)
        return found

    return run


def _releases(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function that saves a model's buffers before its weights lose their memory.

    With `--enable-weights-cpu-backup`, the same weights come back. Otherwise an update must bring weights, and what is
    in the memory before it identifies nothing.
    """

    def run(*args: Any, **options: Any) -> Any:
        from sglang.srt.runtime_context import get_exec  # noqa: PLC0415  (as above)

        if not get_exec().features.enable_weights_cpu_backup:
            record = _record()
            record.begin("release")
            record.end("release")
        return method(*args, **options)

    return run
