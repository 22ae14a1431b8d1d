"""Installs and runs the peers that `versions.toml` lists, and parses their output."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.peers.environment import PeerError, needed, python_of
from benchmarks.peers.parse import Figures, Parser, rows_of_kind, rows_of_vllm

HERE = Path(__file__).resolve().parent
ASIDE = str(HERE / "aside.py")
_VERSION = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `versions.toml`. That file says what each field means."""

    title: str
    package: str
    version: str
    script: str = ""
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    requirements: str = ""
    packages: tuple[str, ...] = ()
    environment: str = ""
    kinds: dict[str, str] = {}

    @property
    def parsers(self) -> dict[str, Parser]:
        """The parsers of the peer's output. The keys are the names under which their figures appear."""
        if self.kinds:
            return {name: partial(rows_of_kind, kind=kind) for name, kind in self.kinds.items()}
        return {self.package: rows_of_vllm}


PEERS = msgspec.convert(tomllib.loads((HERE / "versions.toml").read_text()), dict[str, Peer])


class Program(NamedTuple):
    """A command that prints figures.

    Attributes:
        name: name of the peer.
        command: the command to run.
        parsers: the parsers of its output. The keys are the names under which their figures appear.
    """

    name: str
    command: list[str]
    parsers: dict[str, Callable[[str], Figures]]


def interpreter(name: str, folder: Path) -> Path:
    """The interpreter of a peer's environment, with the version in `versions.toml`. Creates the environment if needed.

    Raises:
        PeerError: pip failed, or another version is installed.
    """
    peer = PEERS[name]
    if peer.requirements:
        path = needed(folder, peer.requirements)
        wanted = ["--no-deps", "--requirement", str(path), *peer.packages]
        python = python_of(peer.environment or name, wanted, path.read_bytes() + " ".join(peer.packages).encode())
    elif peer.packages:
        wanted = [f"{peer.package}=={peer.version}", *peer.packages]
        python = python_of(name, wanted, " ".join(wanted).encode())
    else:
        python = Path(sys.executable)
    found = _version(python, peer.package)
    if found != peer.version:
        raise PeerError(f"{name}: {peer.package} in its environment is {found or 'missing'}, expected {peer.version}")
    return python


def program(name: str, folder: Path, clock: str, *, quick: bool = False) -> Program:
    """Returns the program that runs a peer. Raises the errors of `interpreter`."""
    peer = PEERS[name]
    script = needed(folder, peer.script) if peer.script else None
    python = str(interpreter(name, folder))
    if script is None:
        return Program(name, [python, "-m", "benchmarks.peers.raw_nixl"], peer.parsers)
    command = [python, ASIDE, clock, str(script), *peer.arguments, *(peer.quick if quick else ())]
    return Program(name, command, peer.parsers)


def _version(python: Path, package: str) -> str:
    if str(python) == sys.executable:
        return importlib.metadata.version(package)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(  # noqa: S603 - an interpreter that we made
        [str(python), "-c", _VERSION, package], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
