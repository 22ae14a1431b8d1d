"""A pytest session that has already imported and collected its tests, and forks for each run.

A run replaces the code of one loaded function by the changed code. The replacement takes milliseconds, and a new
process takes seconds. Changes outside of a function's code cannot be made in this way: constants, defaults, and code
that ran during imports. The session reports such a change, and the run takes place in a new process.
"""

import contextlib
import gc
import json
import os
import resource
import select
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import hypothesis
import pytest

from tests.orphans import adopt, end_children

# The memory in bytes that a run may use in addition to the session. Without a limit, a mutant could use up the memory
# of the machine.
_MEMORY_BYTES = 6 << 30
_settrace = sys.settrace
_SPAWNS = {"Popen.__init__", "BaseProcess.start"}
Request = dict[str, Any]


class NoSwapError(Exception):
    """The change affects more than the code of one function."""


class Reach:
    """Records which functions of the packages each test calls, and how long it takes.

    Args:
        packages: folders; only functions in files below them count.
    """

    def __init__(self, packages: Sequence[Path]) -> None:
        self._packages = tuple(f"{package}{os.sep}" for package in packages)
        self._codes: dict[int, CodeType] = {}
        self._spawned = False
        self.of_tests: dict[str, list[str]] = {}
        self.seconds: dict[str, float] = {}
        self.processor: dict[str, float] = {}  # For each test, the seconds of processor time of this process alone.
        self.failed: list[str] = []
        self.spawning: set[str] = set()

    def begin(self) -> None:
        """Records every call in every thread, from now on."""
        self._codes = {}
        threading.settrace(self._trace)
        sys.settrace = self._trace_also
        _settrace(self._trace)

    def end(self) -> list[str]:
        """Stops recording. Returns the functions called since `begin`."""
        sys.settrace = _settrace
        _settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        called = [code for code in list(self._codes.values()) if code.co_filename.startswith(self._packages)]
        return sorted({name_of(code) for code in called})

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:  # noqa: ARG002
        self._codes[id(frame.f_code)] = frame.f_code

    def _trace_also(self, trace: Any) -> None:
        """Replaces `sys.settrace` in tests. If a test sets its own trace function, the calls of the test are still
        recorded.
        """

        def both(frame: FrameType, event: str, argument: object) -> Any:
            self._trace(frame, event, argument)
            return trace(frame, event, argument)

        _settrace(trace if trace in {None, self._trace} else both)

    def _has_spawned(self) -> bool:
        return any(code.co_qualname in _SPAWNS for code in list(self._codes.values()))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.begin()
        start, used = time.monotonic(), time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.monotonic() - start
            self.processor[item.nodeid] = time.process_time() - used
            if self._has_spawned():
                self.spawning.add(item.nodeid)
            self.of_tests[item.nodeid] = self.end()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """If a fixture's process serves a whole file, its calls are not recorded. All tests of the file may therefore
        depend on these functions.
        """
        before = self._has_spawned()
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function" and self._has_spawned() and not before:
                names = [item.nodeid for item in request.session.items]
                self.spawning |= {name for name in names if name.startswith(str(fixturedef.baseid))}

    def found(self) -> dict[str, object]:
        """Returns the result in the form that is sent to the other process."""
        return {
            "seconds": self.seconds,
            "processor": self.processor,
            "reach": self.of_tests,
            "failed": self.failed,
            "spawning": sorted(self.spawning),
        }


def name_of(code: CodeType) -> str:
    """Returns the file of a code object, and the name of the function or method to which it belongs."""
    return f"{code.co_filename}:{code.co_qualname.partition('.<locals>')[0]}"


class First:
    """Records the first test that fails."""

    def __init__(self) -> None:
        self.by = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.by:
            self.by = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.by:
            self.by = report.nodeid

    def found(self) -> dict[str, object]:
        """Returns the result in the form that is sent to the other process."""
        return {"by": self.by}


class Warm:
    """The plugin of a session that runs its tests in forks, at the request of another process.

    Args:
        packages: folders of the packages that are changed.
        asked: returns the next request, None at the end.
        answer: called with the answer to each request.

    """

    def __init__(
        self,
        packages: Sequence[Path],
        asked: Callable[[], Request | None],
        answer: Callable[[Request], None],
    ) -> None:
        self._packages = packages
        self._asked = asked
        self._answer = answer
        self._imports = Reach(packages)
        self._imports.begin()
        self._result: Any = None
        # Any failing example is enough, so it need not be shrunk.
        settings = hypothesis.settings(phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
        hypothesis.settings.register_profile("mutants", settings, print_blob=False)
        hypothesis.settings.load_profile("mutants")
        self._swaps: dict[str, dict[str, list[FunctionType]]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Serves requests. Each request runs in a fork, which continues from here as a session of its own."""
        imported = self._imports.end()
        if session.testsfailed or not session.items:
            return None  # The session ends here. Its output is the answer.
        adopt()
        self._answer({"tests": [item.nodeid for item in session.items], "imported": imported, "threads": _threads()})
        gc.unfreeze()  # tests/conftest.py has frozen objects. Without this call, the collector would not find them.
        functions = [one for one in gc.get_objects() if type(one) is FunctionType]
        for function in functions:
            name = function.__code__.co_qualname
            self._swaps.setdefault(function.__code__.co_filename, {}).setdefault(name, []).append(function)
        gc.collect()
        gc.freeze()
        while (request := self._asked()) is not None:
            self._result = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the run)
            child = os.fork()
            if child == 0:
                self._become(session, request)
                return None
            self._answer(self._ended(child, request["limit_s"]))
        return True

    def _become(self, session: pytest.Session, request: Request) -> None:
        os.setsid()
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + _MEMORY_BYTES, mapped + _MEMORY_BYTES))
        if request["processor_s"]:
            resource.setrlimit(resource.RLIMIT_CPU, (request["processor_s"], request["processor_s"] + 1))
        by_name = {item.nodeid: item for item in session.items}
        session.items = [by_name[name] for name in request["tests"]] if request["tests"] else session.items
        session.testscollected = len(session.items)
        plugin = Reach(self._packages) if request["reach"] else First()
        session.config.pluginmanager.register(plugin, "result")
        session.config.option.maxfail = 0 if request["reach"] else 1
        session.config.add_cleanup(lambda: self._tell(plugin.found()))
        if request["path"]:
            try:
                self._swap(request["path"], request["before"], request["after"], request["function"])
            except NoSwapError as error:
                self._tell({"no_swap": str(error)})
                os._exit(0)

    def _tell(self, found: object) -> None:
        self._result.write(json.dumps(found).encode())
        self._result.flush()

    def _ended(self, child: int, limit_s: float) -> Request:
        ready = os.pidfd_open(child)
        in_time = bool(select.select([ready], [], [], limit_s)[0])
        os.close(ready)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if in_time else None
        end_children()
        _bury()
        self._result.seek(0)
        told = self._result.read()
        self._result.close()
        return {"status": status, **(json.loads(told) if told else {})}

    def _swap(self, path: str, before: str, after: str, function: str) -> None:
        """Replaces the code of a loaded function by the changed code.

        Raises:
            NoSwapError: something else has changed, or the function is not loaded.
        """
        old, new = codes_of(before, path), codes_of(after, path)
        mine = {name for name in old if name == function or name.startswith(f"{function}.<locals>")}
        others = (old.keys() | new.keys()) - mine
        if any([*map(_content, old.get(name, ()))] != [*map(_content, new.get(name, ()))] for name in others):
            raise NoSwapError("other code changes, too")
        loaded = self._swaps.get(path, {})
        swapped = 0
        for name in mine:
            lines = [code.co_firstlineno for code in old[name]]
            for one in loaded.get(name, []):
                # The lines of two functions with the same name distinguish the functions.
                if len(old[name]) != len(new.get(name, [])) or lines.count(one.__code__.co_firstlineno) != 1:
                    raise NoSwapError("the loaded functions of this name differ from the source")
                try:
                    one.__code__ = new[name][lines.index(one.__code__.co_firstlineno)]
                except ValueError as error:
                    raise NoSwapError(str(error)) from error
                swapped += 1
        if not swapped:
            raise NoSwapError("no such function is loaded")


def _content(code: CodeType) -> tuple[object, ...]:
    """Returns the content of a code object. Line numbers and nested code objects are left out."""
    constants = [(type(one), repr(one)) for one in code.co_consts if not isinstance(one, CodeType)]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars


def codes_of(source: str, path: str) -> dict[str, list[CodeType]]:
    """Returns the code objects of a source by qualified function name, in the order of the file. The name "" stands for
    the module.
    """
    found: dict[str, list[CodeType]] = defaultdict(list)

    def of(code: CodeType) -> None:
        found[code.co_qualname if code.co_name != "<module>" else ""].append(code)
        for one in code.co_consts:
            if isinstance(one, CodeType):
                of(one)

    of(compile(source, path, "exec", dont_inherit=True))
    return found


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _bury() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
