"""Fixtures and options of all tests."""

import gc
import importlib.util
import os
import signal
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

from tests import orphans
from tests.isolation import QUIET, seed_torch, sockets_are_checked, surroundings_stay
from tests.orphans import adopt, children, end_children

# Each of these folders needs its own environment. In other environments its tests are not collected.
ENGINES = {"sglang": "tests/sglang_engine (make test-sglang)", "vllm": "tests/vllm_engine (make test-vllm)"}


@cache
def _among_engines() -> bool:
    """Returns whether this is the environment of an engine. An engine sets variables and signal handlers when it is
    imported.
    """
    return any(map(importlib.util.find_spec, ENGINES))


# The variables are set at import, because the conftest.py of a folder may import torch, which reads its number of
# threads only once. On few cores, a second thread mostly waits for the first thread and uses as much processor time.
if not _among_engines():
    os.environ.update(QUIET)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure() -> None:
    """Makes every test start from the same process state, however it is run.

    A shell starts a background command with SIGINT ignored (under nohup also SIGHUP), and children inherit ignored and
    blocked signals. Here both are undone, so that each process that a test starts can be ended. A blocked alarm would
    also delay the timeout of tests. Handlers need not be undone, because children do not inherit them.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    if importlib.util.find_spec("hypothesis"):  # environments of engines lack it
        from hypothesis import settings

        # On a busy machine, a case may take longer than hypothesis allows by default.
        settings.register_profile("busy", deadline=None)
        settings.load_profile("busy")
    adopt()
    if not _among_engines():
        sockets_are_checked()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Chooses the cases of each test before tests are selected by mark, and then sorts the selected tests.

    The files with slow tests come first, so that at the end no worker runs a slow file alone.
    """
    deal_out(items)
    yield  # After this, other plugins select tests, and order them by the seed.
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


def deal_out(items: Sequence[pytest.Item]) -> None:
    """Chooses some cases of a test by its marks `few` and `each_value`. Only CI runs the other cases.

    `few(count)` chooses the first `count` cases. `each_value` chooses cases until each value of each parameter occurs.
    """
    functions: defaultdict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and marks & {"each_value", "few"} and not marks & {"ci", "long"}:
            functions[item.path, item.originalname].append(item)
    for cases in functions.values():
        few = cases[0].get_closest_marker("few")
        here = _of_each_value(cases) if few is None else {case.nodeid for case in cases[: few.args[0]]}
        for case in cases:
            if case.nodeid not in here:
                case.add_marker(pytest.mark.ci)


def _of_each_value(cases: Sequence[pytest.Function]) -> set[str]:
    in_order = sorted(cases, key=lambda case: case.nodeid)
    left = {case.nodeid: {(name, repr(value)) for name, value in case.callspec.params.items()} for case in in_order}
    here = set[str]()
    while any(left.values()):
        chosen = max(left, key=lambda nodeid: len(left[nodeid]))
        here.add(chosen)
        left = {nodeid: values - left[chosen] for nodeid, values in left.items()}
    return here


def pytest_collection_finish() -> None:
    """Exempts modules and collected tests from garbage collection, because they live as long as this process."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seeds torch, so that fixtures draw the same numbers whatever ran before."""
    seed_torch(item)


def pytest_runtest_call(item: pytest.Item) -> None:
    """Seeds torch again just before the test. The test then draws the same numbers, whatever its fixtures have
    drawn.
    """
    seed_torch(item)


def _file_or_session(fixture_name: str, config: pytest.Config) -> str:  # noqa: ARG001  (as pytest calls it)
    """Returns the scope of fixtures with processes. The tests of engines share these processes between files."""
    return "session" if _among_engines() else "module"


@pytest.fixture(autouse=True, scope=_file_or_session)  # pyright: ignore[reportArgumentType]
def _no_process_is_left() -> Iterator[None]:
    """Fails a test file that leaves a process behind, even if its tests pass and even if the process has another
    parent.
    """
    before = set(children())
    with nullcontext() if _among_engines() else surroundings_stay():
        yield
    # Python's own helper processes live as long as this process does, and end with it.
    servants = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}  # pyright: ignore[reportAttributeAccessIssue]
    left = end_children(but=before | servants, grace_s=orphans.GRACE_S)
    assert not left, f"processes that tests have left behind, now killed: {left}"


@pytest.fixture(autouse=True)
def _surroundings_stay() -> Iterator[None]:
    with nullcontext() if _among_engines() else surroundings_stay():
        yield


@pytest.fixture(scope="module")
def forked_fleets() -> Iterator[None]:
    """Starts the processes of fleets as forks of a process that has already imported all modules."""
    from tests import forked

    with forked.fleets():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Reports the tests that were left out, because pytest does not count them as skipped."""
    left_out = [where for package, where in ENGINES.items() if importlib.util.find_spec(package) is None]
    if left_out:
        terminalreporter.write_line(f"not run here, as they need environments of their own: {', '.join(left_out)}")
    if terminalreporter.config.getoption("markexpr") == "not long and not ci and not hosts":
        terminalreporter.write_line(
            "not run here: tests marked ci (make test-ci), hosts (make test-hosts), long (make long)"
        )
    again = {report.nodeid for report in terminalreporter.stats.get("rerun", ())}
    passed = sorted(again & {report.nodeid for report in terminalreporter.stats.get("passed", ())})
    for nodeid in passed:
        terminalreporter.write_line(f"DEFECT: passed only when it was tried again: {nodeid}", red=True)
