"""A mutant is tried in a loaded session if this is possible. If not, it is tried in a separate process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mutants.session import Session
from tests.mutants.tree import Tree

SOURCE = '''"""A file among the packages, whose tests are these."""

MOST = 3


def limited(count):
    return min(count, MOST)


def spin(count):
    while count > 0:
        count -= 1


def traced():
    return 1


def no_test_gets_here():
    return 1
'''
TESTS = """
import os
import subprocess
import sys

import pytest
from kvcache.tried import limited, spin, traced


def test_few():
    assert limited(2) == 2


def test_spin():
    spin(3)


def test_that_traces():
    before = sys.gettrace()
    called = []
    sys.settrace(lambda frame, *_: called.append(frame.f_code.co_name))
    try:
        found = traced()
    finally:
        sys.settrace(before)
    assert (found, called[0]) == (1, "traced")


def test_in_a_process():
    code = "import runpy; print(runpy.run_path('kvcache/tried.py')['limited'](9))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "3\\n"


def test_that_fails_anyway():
    assert False
"""
FILE, TEST = Path("kvcache/tried.py"), "tests/test_tried.py"
pytestmark = pytest.mark.ci  # The forking process loads torch and transformers, which takes long.


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Session]]:
    """Returns a function that returns the session. If the session was closed, the function returns a new session."""
    tree = Tree(tmp_path_factory.mktemp("tree"))
    (tree.folder / FILE).write_text(SOURCE)
    (tree.folder / TEST).write_text(TESTS)
    begun: list[Session] = []

    def session() -> Session:
        if not begun or begun[-1].is_over:
            begun.append(Session(tree, [TEST]))
        return begun[-1]

    yield session
    session().close()
    tree.close()


@pytest.fixture
def session(sessions: Callable[[], Session]) -> Session:
    return sessions()


def test_a_loaded_function_is_changed_in_place_and_the_quickest_test_notices(session: Session) -> None:
    run = session.run(FILE, "limited", SOURCE, SOURCE.replace("min(count, MOST)", "0"))
    assert (run.outcome, run.by) == ("failed", f"{TEST}::test_few")


def test_code_that_runs_in_a_process_of_a_test_is_changed_too(session: Session) -> None:
    run = session.run(FILE, "limited", SOURCE, SOURCE.replace("min(count, MOST)", "count"))
    assert (run.outcome, run.by) == ("failed", f"{TEST}::test_in_a_process")


def test_a_change_that_no_test_notices_passes_and_the_file_is_as_before(session: Session) -> None:
    run = session.run(FILE, "spin", SOURCE, SOURCE.replace("count > 0", "count >= 0"))
    assert (run.outcome, run.by) == ("passed", "")
    assert (session.tree.folder / FILE).read_text() == SOURCE


def test_code_that_a_tracing_test_calls_is_changed_too(session: Session) -> None:
    run = session.run(FILE, "traced", SOURCE, SOURCE.replace("return 1", "return 2", 1))
    assert (run.outcome, run.by) == ("failed", f"{TEST}::test_that_traces")


def test_a_loop_that_does_not_end_is_noticed(session: Session) -> None:
    run = session.run(FILE, "spin", SOURCE, SOURCE.replace("count -= 1", "pass"))
    assert run.outcome in {"timed out", "crashed"}


def test_for_code_that_no_test_reaches_nothing_is_run(session: Session) -> None:
    # Only the test that starts a process might reach the function, so only that test runs.
    assert session.tests_of(FILE, "no_test_gets_here") == [f"{TEST}::test_in_a_process"]


def test_a_test_that_fails_without_a_change_notices_nothing(session: Session) -> None:
    assert session.failed == [f"{TEST}::test_that_fails_anyway"]
    assert not set(session.failed) & set(session.tests_of(FILE, "limited"))


def test_a_constant_is_changed_in_a_new_process(session: Session) -> None:
    changed = SOURCE.replace("MOST = 3", "MOST = 1")
    assert session.run(FILE, "MOST", SOURCE, changed).outcome == "cold"
    session.close()
    run = session.run_cold(FILE, "MOST", changed)
    assert (run.outcome, run.by) == ("failed", f"{TEST}::test_few")


def test_files_that_cannot_be_collected_are_named(session: Session) -> None:
    session.close()
    (session.tree.folder / "tests/test_broken.py").write_text("import no_such_package\n")
    with pytest.raises(RuntimeError, match="tests/test_broken.py"):
        Session(session.tree, ["tests/test_broken.py"])
