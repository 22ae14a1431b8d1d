"""Finds the processes, files and shared memory that a command leaves behind, and runs commands that tests end."""

import hashlib
import os
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.orphans import die_with_parent

MARK = "PAGEWIRE_TEST_RUN"
COMMAND = (sys.executable, "-m", "pagewire")
STAGES = {"start": "starting ", "serving": "serving ", "checking": "checking "}
"""Maps each stage of the demo to the beginning of the line that the demo prints when the stage begins."""

KILLED_IN_SHARED_MEMORY = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
"""
"""The beginning of a program. The kernel kills the program while UCX fills the first file of its shared memory, because
the file exceeds 64 KiB.
"""


class Run:
    """A command with a folder of its own for temporary files. All of its descendants carry a mark in their environment.

    Args:
        folder: folder of its temporary files; made if it does not exist.
        arguments: arguments of `pagewire`.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._mark = secrets.token_hex(8)
        self.memory = memory_beside(folder)
        self.memory.mkdir(mode=0o700, exist_ok=True)
        self._seen = 0
        self.lines: list[str] = []
        self._shared: set[str] = set()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "torch"),  # torch makes this folder when it is imported.
            "UCX_POSIX_DIR": str(self.memory),
            MARK: self._mark,
        }
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  (one call of the kernel: it takes no lock)
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def wait_for(self, beginning: str, timeout_s: float = 100) -> None:
        """Waits until the command has printed a line with this beginning."""
        deadline = time.monotonic() + timeout_s
        while not any(line.startswith(beginning) for line in self.lines):
            assert self.process.poll() is None, (self.lines, self.stderr())
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.002)

    def stderr(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def end(self, *numbers: int, every_s: float = 0.05) -> tuple[int, str]:
        """Sends these signals, one after another. Returns the exit status and the standard error."""
        self.descendants()
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(every_s)
        with self.process:
            try:
                return self.process.wait(60), self.stderr()
            finally:
                self.process.kill()  # A process that does not end fails its own test, but must not delay other tests.

    def descendants(self) -> dict[int, str]:
        """Returns the processes whose environment has the run's mark: a command line for each process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"{MARK}={self._mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:  # The process has ended.
                continue
        self._shared |= set(map(str, found))
        return found

    def leftovers(self, *, files: bool = True) -> list[str]:
        """Returns the processes, the files, and the unmapped shared memory that the command has left behind."""
        left = [f"process {pid}: {line}" for pid, line in self.descendants().items()]
        left += [f"file {path}" for root in (self.folder, self.memory) for path in root.rglob("*") if files]
        for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
            if line.split()[4] in self._shared:  # The fifth field is the id of the process that made the shared memory.
                left.append(f"shared memory: {line}")
        return left

    def assert_nothing_left(self, *, files: bool = True, within_s: float = 5.0) -> None:
        deadline = time.monotonic() + within_s
        while left := self.leftovers(files=files):
            assert time.monotonic() < deadline, left
            time.sleep(0.02)
        if files:
            self.memory.rmdir()


def memory_beside(folder: Path) -> Path:
    """Returns the folder for shared memory of all runs that have this folder for their temporary files."""
    name = hashlib.sha256(bytes(folder)).hexdigest()[:16]
    return Path("/dev/shm", f"test-{name}")  # noqa: S108  (UCX wants a file system in memory)


def wait_for_work(pid: int, seconds: float) -> None:
    """Waits until a process has used this much more processor time. The load of the machine does not change the
    processor time.
    """

    def used() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    begin, deadline = used(), time.monotonic() + 90
    while used() < begin + seconds:
        assert time.monotonic() < deadline, f"process {pid} does nothing"
        time.sleep(0.02)
