"""Runs a check in a fork of this process, which has one thread: nobody else opens or closes files meanwhile."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.orphans import die_with_parent


def open_files() -> set[str]:
    """Returns the numbers of the open files of this process, and of the one that lists them."""
    return {one.name for one in Path("/proc/self/fd").iterdir()}


def alone(check: Callable[[], object]) -> None:
    """Runs `check` in a fork of this process, and fails with its traceback if it raises."""
    read, write = os.pipe()
    if not (child := os.fork()):
        said = "the check has not ended"
        try:
            die_with_parent()
            os.close(read)
            check()
            said = ""
        except BaseException:  # noqa: BLE001 - nothing of a test may go on in the child
            said = traceback.format_exc()
        finally:
            os.write(write, said.encode()[-32_000:])
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    assert os.waitpid(child, 0)[1] == 0
    assert not said, said
