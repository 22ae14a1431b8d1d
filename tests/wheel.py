"""Tries the wheel as a user gets it: `python -m tests.wheel dist/*.whl`, or `make test-wheel`.

First the wheel is compared with the tree: its files, the compiled module, its requirements and its commands. This is
needed because no program notices a missing requirement that another package also installs. Then the wheel is installed
into an empty environment in a temporary folder. Every program runs there, outside the tree. Each extra is installed
before the first program that needs it. Every step prints its seconds, and the first one that fails ends the run with
its output.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from configparser import ConfigParser
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from hatch_build import BUILT
from tests.test_docs import PROGRAMS

ROOT = Path(__file__).parents[1]

_LIMIT_S = 300
# Variables that are removed, so that no program can import the source tree by accident.
_REMOVED = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS", "VIRTUAL_ENV")


class Failed(Exception):  # noqa: N818 - the end of a run, as a word
    """A step has failed."""


@contextmanager
def step(what: str) -> Iterator[None]:
    """Prints the name of a step, and the seconds that it took."""
    began = time.monotonic()
    print(f"{what} ...", flush=True)  # noqa: T201 - a script of the Makefile
    yield
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)  # noqa: T201 - a script of the Makefile


class Environment:
    """An empty environment, and an empty folder in which its programs run."""

    def __init__(self, folder: Path, constraints: Sequence[str]) -> None:
        self.folder, self._constraints = folder / "elsewhere", constraints
        self.folder.mkdir()
        self._home = folder / "environment"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self._home], check=True)
        self.python = self._home / "bin" / "python"
        self._variables = {name: value for name, value in os.environ.items() if name not in _REMOVED}

    def pip(self, *arguments: str) -> None:
        """Runs this interpreter's pip on the environment, which has no own pip."""
        self.run(sys.executable, "-m", "pip", "--python", str(self.python), "--quiet", *arguments)

    def install(self, *what: str, options: Sequence[str] = ()) -> None:
        """Installs requirements and wheels."""
        self.pip("install", "--no-compile", *self._constraints, *options, *what)

    def run(self, *command: str, status: int = 0) -> str:
        """Runs a command and returns its output. Raises `Failed` if the command ends with another exit status than
        `status`.
        """
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if done.returncode != status:
            raise Failed(f"{' '.join(command)}: exit status {done.returncode}, expected {status}\n{done.stdout}")
        return done.stdout

    def program(self, name: str) -> None:
        """Runs a program that is printed on a page. Raises `Failed` if its output differs from the output that the page
        prints.
        """
        code, printed = PROGRAMS[name]
        (self.folder / "program.py").write_text(code)
        found = self.run(str(self.python), "-W", "error", "program.py").split()
        expect(found == printed, f"{name}: printed {found}, not {printed}")


def expect(holds: bool, otherwise: str) -> None:
    """Raises `Failed` if a condition does not hold."""
    if not holds:
        raise Failed(otherwise)


def declared() -> dict[str, Any]:
    """Returns the contents of `pyproject.toml`."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packaged() -> set[str]:
    """Returns the files of the tree that a wheel must have."""
    packages = [ROOT / name for name in declared()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
    files = [file for package in packages for file in package.rglob("*") if file.is_file()]
    left_out = {".c", ".pyc", ".so"}
    return {str(file.relative_to(ROOT)) for file in files if file.suffix not in left_out} | {str(BUILT)}


def required() -> set[str]:
    """Returns the requirements of the project and of each extra, in the form in which metadata lists them. Our own
    extras are expanded.
    """
    project = declared()["project"]

    def of(extra: str) -> set[str]:
        found: set[str] = set()
        for one in project["optional-dependencies"][extra]:
            inner = Requirement(one)
            found |= set().union(*map(of, inner.extras)) if inner.name == project["name"] else {one}
        return found

    extras = {f"{one}; extra == '{extra}'" for extra in project["optional-dependencies"] for one in of(extra)}
    return {str(Requirement(one)) for one in (*project["dependencies"], *extras)}


def commands() -> dict[str, dict[str, str]]:
    """Returns the entry points, by group."""
    project = declared()["project"]
    return {"console_scripts": project["scripts"], **project["entry-points"]}


def contents(wheel: Path) -> None:
    """Compares the wheel with the tree."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = {name.partition(".dist-info/")[2]: name for name in names if ".dist-info/" in name}
        expect({"METADATA", "entry_points.txt", "RECORD"} <= info.keys(), f"the wheel has no more than {sorted(info)}")
        metadata = message_from_bytes(archive.read(info["METADATA"]))
        points = ConfigParser()
        points.read_string(archive.read(info["entry_points.txt"]).decode())
        recorded = {line.split(",")[0] for line in archive.read(info["RECORD"]).decode().splitlines()}
    there = {
        "files": (names - {*info.values()}, packaged()),
        "recorded files": (recorded, names),
        "requirements": ({str(Requirement(one)) for one in metadata.get_all("Requires-Dist", [])}, required()),
    }
    for what, (found, wanted) in there.items():
        expect(not (lacking := wanted - found), f"the wheel lacks {what}: {', '.join(sorted(lacking))}")
        expect(not (more := found - wanted), f"the wheel has {what} that it should not: {', '.join(sorted(more))}")
    found = {group: dict(points[group]) for group in points.sections()}
    expect(found == commands(), f"the wheel has the entry points {found}, not {commands()}")


def manager(here: Environment, wheel: Path) -> None:
    """Tests the manager alone: the version, the path of the installation, the doctor, and programs without NIXL."""
    version = wheel.name.split("-")[1]
    command = str(here.python.with_name("pagewire"))
    expect(here.run(command, "--version") == f"pagewire {version}\n", "pagewire --version")
    where = here.run(str(here.python), "-c", "import pagewire, kvcache; print(pagewire.__file__, kvcache.__file__)")
    expect(all("site-packages" in file for file in where.split()), f"imported from {where}")
    told = here.run(str(here.python), "-m", "pagewire", "doctor")
    expect("NIXL is not installed" in told and "pagewire[transfer]" in told, told)
    expect("sha256 by hashlib" not in told, f"the compiled part of the wheel was not loaded:\n{told}")
    here.program("README.md-1")
    here.program("docs/index.md-1")
    told = here.run(command, "demo", status=2)
    expect(told.count("\n") == 1 and "pip install 'pagewire[serve]'" in told, told)


def transfer(here: Environment, _: Path) -> None:
    """Runs a hand-over between two processes."""
    here.program("README.md-2")


def serve(here: Environment, _: Path) -> None:
    """Runs the demo. Its status is 0 only if every output is the model's own and no page is held at the end."""
    here.run(str(here.python.with_name("pagewire")), "demo", "--requests", "4", "--max-new-tokens", "8")


STAGES: tuple[tuple[str, Callable[[Environment, Path], None]], ...] = (
    ("", manager),
    ("transfer", transfer),
    ("serve", serve),
)


def shadowed(here: Environment, wheel: Path) -> None:
    """Installs a distribution with a package of the same name, like PyPI's `transfer` 0.40, and checks the error and
    its advice.
    """
    here.install(str(stranger(here.folder)), options=["--no-deps"])
    imported = (str(here.python), "-c", "import pagewire")
    told = here.run(*imported, status=1).strip().splitlines()[-1]
    expect("ShadowedPackageError" in told and "(transfer)" in told and "transfer/__init__.py" in told, told)
    here.pip("uninstall", "--yes", "transfer")
    expect("ShadowedPackageError" in here.run(*imported, status=1), "uninstalling it took our file along")
    here.install(str(wheel), options=["--force-reinstall", "--no-deps"])
    here.run(*imported)


def stranger(folder: Path) -> Path:
    """Makes the wheel of a distribution named `transfer`, which has only a package of this name."""
    info = "transfer-0.40.dist-info"
    files = {
        "transfer/__init__.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: transfer\nVersion: 0.40\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{name},sha256={_digest(text)},{len(text)}" for name, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    return zipped(folder / "transfer-0.40-py3-none-any.whl", files)


def zipped(wheel: Path, files: Mapping[str, str]) -> Path:
    """Writes a wheel of these files, whose names are the names in the wheel."""
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def _digest(text: str) -> str:
    return urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def main() -> int:
    """Runs every stage. Returns the exit status 1 if a stage failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.wheel", description=__doc__)
    parser.add_argument("wheel", type=Path, help="what is tried")
    parser.add_argument("--torch", default="torch", metavar="REQUIREMENT", help="installed before it")
    parser.add_argument("--constraint", type=Path, metavar="FILE", help="for pip, each time")
    chosen = parser.parse_args()
    wheel: Path = chosen.wheel.resolve()
    constraints = ["--constraint", str(chosen.constraint.resolve())] if chosen.constraint else []
    with tempfile.TemporaryDirectory(prefix="pagewire-wheel-", ignore_cleanup_errors=True) as made:
        try:
            with step("comparing the wheel with the tree"):
                contents(wheel)
            with step(f"an empty environment with {chosen.torch}"):
                here = Environment(Path(made), constraints)
                here.install(chosen.torch)
            for extra, tried in STAGES:
                with step(f"installing pagewire{f'[{extra}]' if extra else ''}"):
                    here.install(f"{wheel}[{extra}]" if extra else str(wheel))
                with step(f"trying {tried.__name__}"):
                    tried(here, wheel)
            with step("another distribution's `transfer` beside it"):
                shadowed(here, wheel)
        except Failed as error:
            print(f"FAILED: {error}", file=sys.stderr)  # noqa: T201 - a script of the Makefile
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
