"""What concerns all tests."""

import importlib.util
import signal

import pytest

# Each needs an environment of its own, and collects nothing elsewhere.
ENGINES = {"sglang": "tests/sglang_engine (make test-sglang)", "vllm": "tests/vllm_engine (make test-vllm)"}


def pytest_configure() -> None:
    """Undo what a shell does to a command in the background, so that each process that a test starts can be ended.

    Such a command ignores SIGINT, under nohup SIGHUP, and hands that on. A handler is not handed on.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which tests were left out, as none of them counts as skipped."""
    left_out = [where for package, where in ENGINES.items() if importlib.util.find_spec(package) is None]
    if left_out:
        terminalreporter.write_line(f"not run here, as they need environments of their own: {', '.join(left_out)}")
    if not terminalreporter.config.getoption("markexpr").startswith("long"):
        terminalreporter.write_line("not run here, as they take minutes: tests marked long (make long)")
