"""Open exchanges, workers and engines do not change how a process ends. The exit status and the output are those of the
program, whether it ends normally, by an error, by `sys.exit` or by Ctrl-C. Each process is a fork of a process that has
imported all modules, and is finalized by the interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.transfer import exits


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("what", exits.OPENED)
@pytest.mark.parametrize("how", exits.STATUS)
def test_open_objects_change_neither_the_exit_status_nor_the_output(
    tmp_path: Path, what: str, how: str, times: int
) -> None:
    running: list[tuple[Any, Path]] = []
    for number in range(times):
        path = tmp_path / f"{number}.log"
        process, conn = forked.start(exits.ends, what, how, str(path), number * 0.3e-3)
        conn.close()
        running.append((process, path))
        if number >= 4:
            running[number - 4][0].join(60)
    for process, path in running:
        process.join(60)
        said = path.read_text()
        assert process.exitcode == exits.STATUS[how], said
        assert "terminate called" not in said
        assert ("ValueError: " + exits.OWN in said) == (how == "error")
        assert ("KeyboardInterrupt" in said) == (how == "interrupt")
        assert said.count("Traceback") == (how in ("error", "interrupt")), said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status"),
    [("raise", 1), pytest.param("exit", 3, marks=pytest.mark.ci), pytest.param("end", 0, marks=pytest.mark.ci)],
)
def test_a_separate_program_that_closes_nothing_ends_with_its_own_status(how: str, status: int) -> None:
    """The program runs without a fork. The interpreter itself handles the error."""
    ending = {"raise": f"raise ValueError({exits.OWN!r})", "exit": "import sys; sys.exit(3)", "end": ""}[how]
    program = f"from tests.transfer import exits; exits.open_exchange(); {ending}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == status, done.stderr
    assert (exits.OWN in done.stderr) == (how == "raise")
