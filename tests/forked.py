"""Starts processes quickly, as forks of a process that has imported torch, nixl and transformers.

Otherwise such a process behaves as if it had imported these packages itself. An import takes seconds, which would be
most of the time of a test with processes.
"""

import gc
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import pytest

from tests.isolation import QUIET, sockets_are_checked
from tests.orphans import die_with_parent

_PRELOAD = [
    "nixl._api",
    "scheduler_adapters.service.server",
    "tests.transfer.pair_ranks",
    "tests.transfer.worker",
    "transformers.models.llama.modeling_llama",  # The module belongs to an optional extra.
]


# The first test that needs the fork server starts it. The server gets these values instead of the values of that test.
_ENVIRONMENT, _FOLDER = dict(os.environ) | QUIET, Path.cwd()


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with pytest.MonkeyPatch.context() as patch:
        for name in set(os.environ) - set(_ENVIRONMENT):
            patch.delenv(name)
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.chdir(_FOLDER)
        forkserver._forkserver.ensure_running()
    return context


def start(
    serve: Callable[..., Any], *arguments: object, settings: Mapping[str, str] | None = None
) -> tuple[BaseProcess, Connection]:
    """Starts a process that serves one end of a pipe. Returns the process and the other end.

    The started process is killed when this process ends, however this process ends.

    Args:
        serve: a function of a module; it takes the end of the pipe, and the arguments.
        arguments: its further arguments.
        settings: environment variables of UCX and NIXL that replace those of this process.
    """
    context = _context()
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(serve, theirs, arguments, dict(settings or {})), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(
    serve: Callable[..., Any], conn: Connection, arguments: tuple[object, ...], settings: dict[str, str]
) -> None:
    gc.freeze()  # Imported modules live as long as the process, so garbage collection need not examine them.
    sockets_are_checked()
    # The parent of this process is the fork server. The fork server ends together with the process for which it was
    # started.
    die_with_parent()
    for key in [key for key in os.environ if key.startswith(("UCX_", "NIXL_"))]:
        del os.environ[key]
    os.environ.update(QUIET | settings)  # UCX reads these settings when the first agent is made
    serve(conn, *arguments)


class ForkedProgram:
    """A substitute for `subprocess.Popen` that runs a Python program in a forked process. It has those methods of
    `Popen` that a fleet uses.

    The servers of fleets that this program starts are forked, too.

    Args:
        command: the interpreter, `-m` and a module or `-c` and a program, and their arguments.
        log: file for standard output, and for standard error if `errors` is not given.
        environment: environment of the process.
        errors: file for standard error.
    """

    def __init__(
        self, command: Sequence[str], log: IO[Any], environment: Mapping[str, str], errors: IO[Any] | None = None
    ) -> None:
        read, write = os.pipe()
        given = (
            Connection(read, writable=False),
            Connection(os.dup(log.fileno())),
            Connection(os.dup((errors or log).fileno())),
        )
        context = _context()
        server = forkserver._forkserver._forkserver_address
        arguments = (given, server, list(command[1:]), dict(environment))
        self._process = context.Process(target=_become, args=arguments, daemon=True)
        self._process.start()
        for one in given:
            one.close()
        self.stdin = os.fdopen(write, "wb")
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Returns the exit status, or None if the process still runs after this time."""
        self._process.join(timeout_s)
        return self._process.exitcode


@contextmanager
def fleets() -> Generator[None]:
    """Returns a context manager. In its block, the processes of fleets are started as forks."""
    from scheduler_adapters.service.fleet import Fleet

    def spawn(fleet: Fleet, log: IO[bytes]) -> ForkedProgram:
        return ForkedProgram(fleet._program, log, fleet._environment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fleet, "_spawn", spawn)
        yield


def _become(given: tuple[Connection, ...], server: str, arguments: list[str], environment: dict[str, str]) -> None:
    gc.freeze()  # as above
    sockets_are_checked()
    os.setsid()
    for number, one in enumerate(given):
        os.dup2(one.fileno(), number)
        one.close()
    os.environ.clear()
    os.environ.update(environment)
    _share(server)
    how, program, *rest = arguments
    sys.stdin, sys.argv = open(0, closefd=False), [program, *rest]  # noqa: SIM115  (as long as the process)
    with fleets():
        if how == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})  # noqa: S102  (that is what -c does)


def _share(server: str) -> None:
    """Makes this process fork its children from its own fork server, so that the children need not import the packages
    again.
    """
    shared: Any = forkserver._forkserver
    shared._forkserver_address, shared.ensure_running = server, lambda: None
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # A daemonic process may not start other processes.
