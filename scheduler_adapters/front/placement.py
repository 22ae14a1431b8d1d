"""Chooses the prefill process that computes a prompt: round robin, or by Dynamo's selection core and our KV events."""

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

_MODEL = "pagewire"  # the model name that is passed to the service; any name works, because a frontend serves one model


class InTurns:
    """Round robin: sends each request to the next process, whatever the processes have cached."""

    def __init__(self) -> None:
        self._turns = itertools.count()

    async def place(self, request_id: str, prompt: Sequence[int], prefills: Collection[str]) -> str:  # noqa: ARG002
        """Returns the next of the processes in `prefills`."""
        names = sorted(prefills)
        return names[next(self._turns) % len(names)] if names else ""

    async def prefilled(self, request_id: str) -> None:
        """A no-op: this placement makes no reservations."""

    async def over(self, request_id: str) -> None:
        """A no-op: this placement makes no reservations."""

    async def follow(self, members: Sequence[Ready]) -> None:
        """A no-op, because `place` gets the processes with each call."""


class Selected:
    """Lets Dynamo's `dynamo.llm.SelectionService`, which runs in this process, choose the prefill process.

    The service weighs cached prefixes against load. It learns the prefixes from KV events, and the load from
    reservations.

    A reservation begins when a process is chosen. It ends when the prompt's pages have left that process, or when the
    process is gone. If the service refuses to choose, decode chooses instead, and the request does not fail.

    Raises:
        MissingExtraError: the extra 'fleet' is not installed.
    """

    def __init__(self) -> None:
        os.environ.setdefault("DYN_LOG", "error")  # by default, Dynamo logs one line for each request
        try:
            from dynamo.llm import SelectionService  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
            from dynamo.llm.exceptions import SelectionServiceError  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            told = f"--placement dynamo needs the extra 'fleet' (pip install 'pagewire[fleet]'): {error}"
            raise MissingExtraError(told) from error
        # The service has no type information; it takes and returns dictionaries.
        self._service: Any = SelectionService(indexer_threads=1)
        self._refusal: type[Exception] = SelectionServiceError
        self._numbers = itertools.count(1)
        self._workers: dict[str, tuple[int, Ready]] = {}
        self._reserved: set[str] = set()

    async def place(self, request_id: str, prompt: Sequence[int], prefills: Collection[str]) -> str:
        """Returns the process that is to compute the prompt.

        Returns "" if no allowed process publishes events, or if the service refuses to choose.
        """
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
        except self._refusal as error:  # for example because the chosen process has just exited
            log.warning("request %r: Dynamo's choice of a prefill process cannot be used: %s", request_id, error)
            self._reserved.discard(request_id)
            return ""
        return allowed[chosen["worker_id"]]

    async def prefilled(self, request_id: str) -> None:
        """Reports that the prompt has been computed. The process still holds the prompt's pages."""
        if request_id in self._reserved:
            with suppress(self._refusal):  # if the process is gone, so are its reservations
                await self._service.prefill_complete(request_id)

    async def over(self, request_id: str) -> None:
        """Frees the request's reservation. Safe to call twice."""
        if request_id in self._reserved:
            self._reserved.discard(request_id)
            with suppress(self._refusal):
                await self._service.free_reservation(request_id)

    async def follow(self, members: Sequence[Ready]) -> None:
        """Tells the service which processes are new, restarted or gone."""
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
                        "endpoint": f"http://{name}",  # only a label: nothing connects to it
                        "block_size": ready.page_size,
                        "kv_events_endpoint": ready.kv_events,
                        "replay_endpoint": ready.kv_replay,
                    }
                )
                self._workers[name] = number, ready
