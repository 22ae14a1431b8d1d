"""`WeightsSwitch`: other weights for a process that serves, loaded beside its own and used when no request is open.

No request sees two versions of the weights: the process refuses new requests from the order to switch until it has
switched, and finishes the others with their own version. Cached pages of the earlier version stay, under its name.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from scheduler_adapters.errors import ModelLoadError
from scheduler_adapters.service import messages as msg

if TYPE_CHECKING:
    from kvcache.manager import PagedKVCacheManager
    from scheduler_adapters.hf.weights import ModelWeights, SpareWeights


class Switching(Protocol):
    """The scheduler of a process, as far as a switch needs it."""

    @property
    def is_at_rest(self) -> bool:
        """Whether no request is open, and no step runs."""
        ...

    def pause(self) -> None:
        """Refuses each new request from now on, until `resume`."""
        ...

    def resume(self, weights: str) -> None:
        """Accepts requests again, with the weights of this name."""
        ...


class WeightsSwitch:
    """Loads weights in a thread, and puts them in place. Only the thread of the main loop may call it.

    Args:
        name: name of the process.
        weights: the weights of its model.
        manager: the manager of its pages, which are named by the weights.
        scheduler: its scheduler.
    """

    def __init__(self, name: str, weights: ModelWeights, manager: PagedKVCacheManager, scheduler: Switching) -> None:
        self._name, self._weights, self._manager, self._scheduler = name, weights, manager, scheduler
        self._thread = ThreadPoolExecutor(1, "weights")
        self._loading: tuple[str, Future[SpareWeights]] | None = None
        self._spare: SpareWeights | None = None
        self._wanted = ""  # the weights to which the process switches when it is at rest
        self._refused: msg.Loaded | None = None  # the answer to a load that came meanwhile

    @property
    def name(self) -> str:
        """The name of the weights in use."""
        return self._weights.name

    def load(self, model: str) -> None:
        """Begins to load the weights of a directory. Weights that were loaded before are dropped.

        If the process is about to use these, it refuses instead.
        """
        if self._wanted:
            told = f"the process is about to change its weights to {self._wanted}"
            self._refused = msg.Loaded(name=self._name, model=model, error=told) if model else None
            return
        self._spare = None
        self._loading = (model, self._thread.submit(self._weights.load, model)) if model else None

    def switch(self, weights: str) -> None:
        """Uses the loaded weights as soon as the process is at rest. Does nothing if no such weights are loaded."""
        if self._spare is not None and self._spare.name == weights:
            self._wanted = weights
            self._scheduler.pause()

    def take_loaded(self) -> msg.Loaded | None:
        """Returns the outcome of a load that has ended, or was refused, since the last call."""
        if self._refused is not None:
            refused, self._refused = self._refused, None
            return refused
        if self._loading is None or not self._loading[1].done():
            return None
        (model, loading), self._loading = self._loading, None
        try:
            self._spare = loading.result()
        except ModelLoadError as error:
            return msg.Loaded(name=self._name, model=model, error=msg.clipped(str(error)))
        except (MemoryError, RuntimeError, OSError) as error:
            told = f"model directory {model!r} cannot be loaded: {type(error).__name__}: {error}"
            return msg.Loaded(name=self._name, model=model, error=msg.clipped(told))
        return msg.Loaded(name=self._name, model=model, weights=self._spare.name)

    def attend(self) -> bool:
        """Switches if that was asked for and the process is at rest. Returns whether it has switched."""
        spare = self._spare
        if not self._wanted or spare is None or not self._scheduler.is_at_rest:
            return False
        self._weights.put(spare)
        self._manager.set_weights(bytes.fromhex(spare.name))
        self._spare, self._wanted = None, ""
        self._scheduler.resume(spare.name)
        return True

    def close(self) -> None:
        """Waits for a load that runs. Safe to call twice."""
        self._thread.shutdown(cancel_futures=True)
