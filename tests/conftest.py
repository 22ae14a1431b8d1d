"""What concerns all tests."""

import importlib.util
import signal
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

import pytest

from tests.orphans import adopt, children, end_children

# Each needs an environment of its own, and collects nothing elsewhere.
ENGINES = {"sglang": "tests/sglang_engine (make test-sglang)", "vllm": "tests/vllm_engine (make test-vllm)"}


def pytest_configure() -> None:
    """Undo what a shell does to a command in the background, so that each process that a test starts can be ended.

    Such a command ignores SIGINT, under nohup SIGHUP, and hands that on. A handler is not handed on. What is blocked
    is handed on too, and would hold up the alarm by which tests run out of time.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    adopt()


def _file_or_session(fixture_name: str, config: pytest.Config) -> str:  # noqa: ARG001  (as pytest calls it)
    """The engines' tests share processes between files."""
    return "session" if any(map(importlib.util.find_spec, ENGINES)) else "module"


@pytest.fixture(autouse=True, scope=_file_or_session)
def _no_process_is_left() -> Iterator[None]:
    """No test file leaves a process behind, whether its tests pass or fail, and whoever its parent was."""
    before = set(children())
    yield
    # Python's own servants live as long as this process does, and end with it.
    servants = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}
    left = end_children(but=before | servants, grace_s=10.0)
    assert not left, f"processes that tests have left behind, now killed: {left}"


@pytest.fixture(scope="module")
def forked_fleets() -> Iterator[None]:
    """The processes of fleets that are started here are forks of one that has imported everything."""
    from tests import forked

    with forked.fleets():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which tests were left out, as none of them counts as skipped."""
    left_out = [where for package, where in ENGINES.items() if importlib.util.find_spec(package) is None]
    if left_out:
        terminalreporter.write_line(f"not run here, as they need environments of their own: {', '.join(left_out)}")
    if not terminalreporter.config.getoption("markexpr").startswith("long"):
        terminalreporter.write_line("not run here, as they take minutes: tests marked long (make long)")
