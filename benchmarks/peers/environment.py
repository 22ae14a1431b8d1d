"""Creates a virtual environment for each peer, and finds the peers' scripts, which are not part of this project."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.frame import progress

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venvs"
SCRIPTS = ROOT.parent / "shared" / "peers"
SCRIPTS_VARIABLE = "PAGEWIRE_PEER_SCRIPTS"


class PeerError(Exception):
    """Raised if a peer cannot be run. The message says what is missing."""


def scripts_folder(given: Path | None) -> Path:
    """The folder of the peers' scripts: as given, from an environment variable, or beside the repository.

    Raises:
        PeerError: there is no such folder.
    """
    folder = given or Path(os.environ.get(SCRIPTS_VARIABLE, SCRIPTS))
    if not folder.is_dir():
        raise PeerError(
            f"no folder {folder}: the peers' scripts are not part of this project; name the folder that has them "
            f"(bench_*.py, requirements-*.txt) with --scripts or {SCRIPTS_VARIABLE}"
        )
    return folder.resolve()


def needed(folder: Path, name: str) -> Path:
    """A file of the scripts' folder.

    Raises:
        PeerError: the file does not exist.
    """
    if not (folder / name).is_file():
        raise PeerError(f"no {name} in {folder}")
    return folder / name


def python_of(name: str, pip_arguments: list[str], requirements: bytes) -> Path:
    """The interpreter of the peer's environment.

    The environment is created if it is missing or `requirements` have changed.

    Raises:
        PeerError: pip failed; the message has its last lines.
    """
    folder = ENVIRONMENTS / name
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = hashlib.sha256(requirements).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    progress(f"{name}: setting up {folder.relative_to(ROOT)} (once)")
    ENVIRONMENTS.mkdir(exist_ok=True)
    (ENVIRONMENTS / ".gitignore").write_text("*\n")
    if not python.exists():
        _run(name, [sys.executable, "-m", "venv", str(folder)])
    _run(name, [str(python), "-m", "pip", "install", "--quiet", *pip_arguments])
    stamp.write_text(wanted)
    return python


def _run(name: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - pip and venv
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise PeerError(f"{name}: {' '.join(command[1:4])} failed:\n{last}")
