"""What concerns all tests."""

import importlib.util
import signal

import pytest

# Each needs an environment of its own, and collects nothing elsewhere.
ENGINES = {"sglang": "tests/sglang_engine (make test-sglang)", "vllm": "tests/vllm_engine (make test-vllm)"}


def pytest_configure() -> None:
    """Undo what a shell does to a command in the background: it ignores SIGINT, and under nohup SIGHUP, and so would
    every process that a test starts and interrupts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says which tests were left out, as none of them counts as skipped."""
    left_out = [where for package, where in ENGINES.items() if importlib.util.find_spec(package) is None]
    if left_out:
        terminalreporter.write_line(f"not run here, as they need environments of their own: {', '.join(left_out)}")
    if not terminalreporter.config.getoption("markexpr").startswith("long"):
        terminalreporter.write_line("not run here, as they take minutes: tests marked long (make long)")
