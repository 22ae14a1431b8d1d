"""Processes that start at once: forks of one that has torch and nixl imported."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tests.orphans import die_with_parent

QUIET = {"UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
_PRELOAD = ["tests.transfer.pair_ranks", "tests.transfer.worker", "nixl._api"]


def start(
    serve: Callable[..., Any], *arguments: object, settings: Mapping[str, str] | None = None
) -> tuple[BaseProcess, Connection]:
    """A process that serves its end of a pipe, and our end. It dies with this process, whatever happens to that.

    Args:
        serve: a function of a module; it takes the end of the pipe, and the arguments.
        arguments: what it takes beside that.
        settings: of UCX and NIXL, as environment variables, in place of this process's own.
    """
    os.environ.update(QUIET)  # NIXL reads it when it is imported
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(serve, theirs, arguments, dict(settings or {})), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(
    serve: Callable[..., Any], conn: Connection, arguments: tuple[object, ...], settings: dict[str, str]
) -> None:
    die_with_parent()  # that is the forkserver, which ends with the process that started it
    for key in [key for key in os.environ if key.startswith(("UCX_", "NIXL_"))]:
        del os.environ[key]
    os.environ.update(QUIET | settings)  # UCX reads it when the first agent is made
    serve(conn, *arguments)
