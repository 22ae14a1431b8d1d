"""The processes that tests start can be ended, and the timeouts of tests work, however the tests are started."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from hypothesis import settings

import kvcache
from tests.isolation import surroundings_stay

TESTS = """
import signal, subprocess, sys, time
import pytest

@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_process_can_be_ended(number):
    command = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, restore_signals=False) as process:
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(20)

@pytest.mark.each_value
@pytest.mark.parametrize("one", range(3))
@pytest.mark.parametrize("other", "ab")
def test_of_six_cases(one, other):
    print(f"{one}{other} runs")

@pytest.mark.few(2)
@pytest.mark.parametrize("one", "cdef")
def test_of_four_cases(one):
    print(f"{one} is one of few")

@pytest.mark.timeout(1)
def test_that_is_too_slow():
    time.sleep(60)
"""


def ignore_and_block() -> None:
    """Ignores and blocks signals, as if the process had inherited this state from its parent."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


def test_signals_that_are_blocked_are_not_in_a_test_and_only_chosen_cases_run(tmp_path: Path) -> None:
    (tmp_path / "test_any.py").write_text(TESTS)
    command = f"{sys.executable} -m pytest -p tests.conftest"
    done = subprocess.run(
        [*command.split(), "-p", "no:cacheprovider", "-p", "no:randomly", "-s", "-m", "not ci", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTEST_ADDOPTS": ""},  # The reruns of .ci/run must not apply to this run.
        stdin=subprocess.DEVNULL,
        preexec_fn=ignore_and_block,
        check=False,
    )
    assert "1 failed, 8 passed, 5 deselected" in done.stdout, done.stdout + done.stderr
    ran = re.findall(r"([0-2])([ab]) runs", done.stdout)
    assert {one for one, _ in ran} == {*"012"}
    assert {other for _, other in ran} == {*"ab"}
    assert re.findall("([c-f]) is one of few", done.stdout) == ["c", "d"]
    assert "Timeout (>1.0s)" in done.stdout


def test_torch_has_one_thread_also_where_a_folder_imports_it_before_pytest_is_configured() -> None:
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    code = "import os, tests.conftest; print(os.environ['OMP_NUM_THREADS'])"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=own, check=True)
    assert done.stdout == "1\n"


def test_a_socket_of_the_product_that_lingers_without_end_is_found_and_one_of_a_test_is_given_a_time(
    tmp_path: Path,
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as ours, context.socket(zmq.DEALER) as theirs:
        ours.connect(f"ipc://{tmp_path}/s")
        assert ours.getsockopt(zmq.LINGER) == 0
        theirs.setsockopt(zmq.LINGER, -1)
        product = compile("socket.connect(address)", str(Path(kvcache.__file__).parent / "some.py"), "exec")
        with pytest.raises(AssertionError, match=r"kvcache/some\.py: a socket at ipc:.* lingers without end"):
            exec(product, {"socket": theirs, "address": f"ipc://{tmp_path}/s"})  # noqa: S102
        theirs.setsockopt(zmq.LINGER, 0)


def test_a_file_that_is_left_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pytest.fail.Exception, match="entries"), surroundings_stay():
        Path("left").touch()
    with surroundings_stay():
        Path("left").write_text("again")


def test_no_property_fails_because_the_machine_is_busy() -> None:
    assert settings.default is not None
    assert settings.default.deadline is None
