"""Which prefill process computes a prompt: in turns, or as Dynamo's selection core says, by our KV events."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from scheduler_adapters.errors import MissingExtraError
from scheduler_adapters.service.messages import Ready

log = logging.getLogger("pagewire.front")

_MODEL = "pagewire"  # one name for all: a front serves one model


class InTurns:
    """Sends each request to the next process, whatever the processes have cached."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    async def place(self, request_id: str, prompt: Sequence[int], prefills: Collection[str]) -> str:  # noqa: ARG002
        """The next of these processes."""
        names = sorted(prefills)
        return names[next(self._turns) % len(names)] if names else ""

    async def prefilled(self, request_id: str) -> None:
        """A no-op: this placement makes no reservations."""

    async def over(self, request_id: str) -> None:
        """A no-op: this placement makes no reservations."""

    async def follow(self, members: Sequence[Ready]) -> None:
        """They are told with each request."""


class Selected:
    """Placement by `dynamo.llm.SelectionService` in this process: prefixes from KV events, load from reservations.

    A reservation lasts from the choice until the prompt's pages have left the process that computed them, or until
    that process is gone. A refusal by the service fails no request: if it names no process, decode chooses one.

    Raises:
        MissingExtraError: the extra 'fleet' is not installed.
    """

    def __init__(self) -> None:
        os.environ.setdefault("DYN_LOG", "error")  # one line a request otherwise
        try:
            from dynamo.llm import SelectionService  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
            from dynamo.llm.exceptions import SelectionServiceError  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            told = f"--placement dynamo needs the extra 'fleet' (pip install 'pagewire[fleet]'): {error}"
            raise MissingExtraError(told) from error
        # Without types; what it takes and gives are dictionaries.
        self._service: Any = SelectionService(indexer_threads=1)
        self._refusal: type[Exception] = SelectionServiceError
        self._numbers = itertools.count(1)
        self._workers: dict[str, tuple[int, Ready]] = {}
        self._reserved: set[str] = set()

    async def place(self, request_id: str, prompt: Sequence[int], prefills: Collection[str]) -> str:
        """The process that is to compute it; empty if none is known whose events are followed."""
        allowed = {number: name for name, (number, _) in self._workers.items() if name in prefills}
        if not allowed or request_id in self._reserved:
            return ""
        self._reserved.add(request_id)
        try:
            chosen = await self._service.select_and_reserve(
                {
                    "model_name": _MODEL,
                    "token_ids": list(prompt),
                    "selection_id": request_id,
                    "allowed_worker_ids": sorted(allowed),
                }
            )
        except self._refusal as error:  # a process that has just gone, say
            log.warning("request %r: Dynamo's selection names no prefill process: %s", request_id, error)
            self._reserved.discard(request_id)
            return ""
        return allowed[chosen["worker_id"]]

    async def prefilled(self, request_id: str) -> None:
        """The prompt has run; its pages are still there."""
        if request_id in self._reserved:
            with suppress(self._refusal):  # its process is gone, and all its reservations with it
                await self._service.prefill_complete(request_id)

    async def over(self, request_id: str) -> None:
        """Free the request's reservation. Calling it twice is safe."""
        if request_id in self._reserved:
            self._reserved.discard(request_id)
            with suppress(self._refusal):
                await self._service.free_reservation(request_id)

    async def follow(self, members: Sequence[Ready]) -> None:
        """Listen to those that are new, to one that was started anew as well, and forget those that have gone."""
        there = {one.name: one for one in members if one.kv_events}
        for name, (number, known) in list(self._workers.items()):
            if name not in there or there[name].incarnation != known.incarnation:
                del self._workers[name]
                await self._service.delete_worker(number)
        for name, ready in there.items():
            if name not in self._workers:
                number = next(self._numbers)
                await self._service.upsert_worker(
                    {
                        "worker_id": number,
                        "model_name": _MODEL,
                        "endpoint": f"http://{name}",  # only a label: nobody is asked there
                        "block_size": ready.page_size,
                        "kv_events_endpoint": ready.kv_events,
                        "replay_endpoint": ready.kv_replay,
                    }
                )
                self._workers[name] = number, ready
