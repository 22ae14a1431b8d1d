import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from scheduler_adapters.errors import ServiceError
from scheduler_adapters.service import fleet
from scheduler_adapters.service.fleet import PREFIX, RunFolder, memory_root

HOLDER = """
import sys, time
from scheduler_adapters.service.fleet import RunFolder
folder = RunFolder()
(folder.path / "prefill.keys").write_text("secret")
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_run_folder_is_private_and_is_removed_at_the_end_of_the_run(root: Path) -> None:
    folder = RunFolder()
    assert folder.path.parent == root
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "sub").mkdir()
    (folder.path / "sub" / "file").write_text("x")
    folder.close()
    folder.close()
    assert not list(root.iterdir())


def test_the_next_run_removes_what_a_killed_one_left_and_nothing_else(root: Path) -> None:
    (root / "pagewire-notes").mkdir()
    (root / f"{PREFIX}file").write_text("no folder")
    (root / "elsewhere").mkdir()
    (root / f"{PREFIX}link").symlink_to(root / "elsewhere")
    others = set(root.iterdir())
    running = RunFolder()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(root)}
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout is not None
        killed = Path(holder.stdout.readline().strip())
        RunFolder().close()
        assert (killed / "prefill.keys").exists()  # it still runs
        holder.send_signal(signal.SIGKILL)
    assert (killed / "prefill.keys").exists()
    RunFolder().close()
    assert set(root.iterdir()) == others | {running.path}
    running.close()


def test_a_folder_of_another_user_is_left_alone(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = root / f"{PREFIX}theirs"
    theirs.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    RunFolder().close()
    assert theirs.exists()


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = tempfile.mkdtemp, list[str]()

    def make_and_lose(*arguments: str, **options: str) -> str:
        made.append(make(*arguments, **options))
        if len(made) == 1:
            Path(made[0]).rmdir()
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    folder = RunFolder()
    assert [str(folder.path)] == made[1:]
    folder.close()
    assert not list(root.iterdir())


def test_a_folder_that_is_replaced_while_it_is_locked_is_not_taken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, locked = fleet.fcntl.flock, list[int]()

    def replace(lock: int, flags: int) -> None:
        flock(lock, flags)
        locked.append(lock)
        if len(locked) == 1:
            (path,) = root.iterdir()
            path.rmdir()

    monkeypatch.setattr(fleet.fcntl, "flock", replace)
    folder = RunFolder()
    assert folder.path.is_dir()
    assert len(locked) == 2
    folder.close()
    assert not list(root.iterdir())


def test_runs_that_start_at_once_never_take_each_other_s(root: Path) -> None:
    lost = []

    def work() -> None:
        for _ in range(60):
            folder = RunFolder()
            (folder.path / "file").write_text("x")
            if not (folder.path / "file").exists():
                lost.append(folder.path)
            folder.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lost
    assert not list(root.iterdir())


def test_a_socket_whose_path_is_too_long_is_refused_before_it_is_bound() -> None:
    with closing(RunFolder()) as folder, zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        longest = "x" * (zmq.IPC_PATH_MAX_LEN - len(f"{folder.path}/"))
        socket.bind(folder.endpoint(longest))
        with pytest.raises(zmq.ZMQError):
            socket.bind(f"ipc://{folder.path}/{longest}x")
        with pytest.raises(ServiceError, match=r"may have 107 bytes, and '.*/x+' has 108: set TMPDIR"):
            folder.endpoint(f"{longest}x")


def test_shared_memory_is_made_where_ucx_would_make_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "memory").mkdir()
    monkeypatch.setenv("UCX_POSIX_DIR", str(root / "memory"))
    assert memory_root() == root / "memory"
    monkeypatch.setenv("UCX_POSIX_DIR", str(root / "none"))
    assert memory_root() == root
    monkeypatch.delenv("UCX_POSIX_DIR")
    assert memory_root() == Path("/dev/shm")  # noqa: S108  (UCX's default)


@pytest.mark.parametrize("reason", ["no place", "no locks"])
def test_if_no_folder_can_be_made_an_error_says_so(root: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    if reason == "no locks":
        monkeypatch.setattr(fleet.fcntl, "flock", refuse)
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(root / "none"))
    with pytest.raises(ServiceError, match="no folder for the run can be"):
        RunFolder()
    assert not list(root.iterdir())
