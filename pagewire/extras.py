"""The extras of the distribution that a command may need, and the error line if one is missing.

This module imports no heavy packages, because the line is printed before torch is imported.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from pagewire.distribution import DISTRIBUTION, PACKAGES

_SERVED = ("transformers", "nixl")
EXTRAS: dict[str, tuple[str, ...]] = {
    "transfer": ("nixl",),
    "vllm": ("nixl",),
    "sglang": ("nixl",),
    "serve": ("rich", *_SERVED, "prometheus_client", "starlette", "uvicorn"),
    "fleet": ("dynamo",),
    "plan": ("rich", "transformers"),
    "replay": ("rich",),
    "top": ("rich", "textual", "textual_serve", "aiohttp"),
    "bench": ("rich", "matplotlib"),
    "observe": ("prometheus_client", "opentelemetry"),
    "blake3": ("blake3",),
}
"""For each extra, the import names of the packages that it installs."""
ENGINES = ("vllm", "sglang")
"""Extras for an environment that has the engine of the same name. They do not install it."""


class NotInstalledError(ImportError):
    """A package that a command needs is not installed. The message is one line with the pip command."""


class Need(NamedTuple):
    """A requirement of a command or option: packages, and the name of the extra that installs them."""

    who: str
    extra: str
    packages: tuple[str, ...]


def installed(package: str) -> bool:
    """Returns whether a package is installed. Does not import it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def missing_packages() -> dict[str, list[str]]:
    """Returns the packages of each extra that are not installed. The extra of an engine is of no use without it."""
    needed = EXTRAS | {engine: (*EXTRAS[engine], engine) for engine in ENGINES}
    return {extra: [one for one in packages if not installed(one)] for extra, packages in needed.items()}


def require(needs: list[Need]) -> None:
    """Raises `NotInstalledError` for the first requirement that is not met."""
    for who, extra, packages in needs:
        missing = [one for one in packages if not installed(one)]
        if missing:
            names = ", ".join(map(repr, missing))
            raise NotInstalledError(
                f"{who} needs {names}; install with: pip install '{DISTRIBUTION}[{extra}]'", name=missing[0]
            )


def needs_of(command: str, options: object) -> list[Need]:
    """Returns the requirements of a command with these options."""
    extra, packages = {
        "demo": ("serve", ("rich", *_SERVED)),
        "serve": ("serve", EXTRAS["serve"][1:]),
    }.get(command, (command, EXTRAS.get(command, ())))
    needs = [Need(command, extra, packages)]
    by_option = (
        ("trace", True, "observe", ("opentelemetry",)),
        ("placement", "dynamo", "fleet", ("dynamo",)),
        ("plot", None, "bench", ("matplotlib",)),
        ("plots", None, "bench", ("matplotlib",)),
        ("top", None, "top", EXTRAS["top"]),
    )
    for name, value, one, those in by_option:
        given = getattr(options, name, None)
        if given is not None and (value is None or given == value):
            needs.append(Need(f"--{name}", one, those))
    return needs


def missing_line(error: ImportError) -> str:
    """Returns the error line for a package that cannot be imported. Raises `error` again if the package is ours."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "pagewire", *PACKAGES):
        raise error  # the missing module is a bug in this distribution
    extra = next((extra for extra, brought in EXTRAS.items() if package in brought), "")
    needed = f"'{DISTRIBUTION}[{extra}]'" if extra else DISTRIBUTION
    return f"this needs the package {package!r} (pip install {needed}): {error}"
