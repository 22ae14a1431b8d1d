"""Checks that the packages `kvcache`, `transfer` and `scheduler_adapters` are those of this distribution.

Their names are common: the distribution `transfer` on PyPI installs a package of the same name. If Python imported such
a package in place of ours, the failure would come much later and name some missing attribute.
"""

from __future__ import annotations

import base64
import hashlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "pagewire"
PACKAGES = ("kvcache", "transfer", "scheduler_adapters")
"""The packages of this distribution besides `pagewire`."""
_ROOT = Path(__file__).resolve().parents[1]


class ShadowedPackageError(ImportError):
    """Another distribution's package is imported in place of one of ours."""


def check_packages(root: Path = _ROOT) -> None:
    """Raises `ShadowedPackageError`, naming the imported file, unless all three packages are ours.

    Each package must lie beside `pagewire`. If a wheel is installed, the package's `__init__.py` must also have the
    digest that the wheel's RECORD lists, because pip lets a later distribution overwrite the file.
    """
    recorded = _recorded(root)
    for name in PACKAGES:
        ours, found = root / name / "__init__.py", _file_of(name)
        if found is None:
            raise ShadowedPackageError(
                f"pagewire needs its package {name!r}, but {ours} does not exist: pip install --force-reinstall "
                "--no-deps pagewire",
                name=name,
            )
        if found != ours:
            raise ShadowedPackageError(
                f"pagewire needs its own package {name!r} ({ours}), but Python imports {found}: uninstall the "
                f"distribution that installed that file{_installed_by(name)}, or move its folder behind {root} in "
                "sys.path",
                name=name,
                path=str(found),
            )
        digest = recorded.get(f"{name}/__init__.py")
        if digest is not None and digest != _digest(ours):
            raise ShadowedPackageError(
                f"pagewire needs its own package {name!r}, but another distribution{_installed_by(name)} has written "
                f"over {ours}: uninstall that distribution, then pip install --force-reinstall --no-deps pagewire",
                name=name,
                path=str(ours),
            )


def _file_of(name: str) -> Path | None:
    """Returns the file that `import name` runs, or has run. Returns None if there is none."""
    loaded = sys.modules.get(name)
    spec: ModuleSpec | None = loaded.__spec__ if loaded is not None else find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()


def _recorded(root: Path) -> dict[str, str]:
    """Returns the digests of the files of an installed wheel, as in its RECORD; empty for a source tree."""
    found: dict[str, str] = {}
    for record in root.glob("pagewire-*.dist-info/RECORD"):
        for line in record.read_text(encoding="utf-8").splitlines():
            path, _, rest = line.partition(",")
            digest = rest.partition(",")[0]
            if digest.startswith("sha256="):
                found[path] = digest.removeprefix("sha256=")
    return found


def _digest(path: Path) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()


def _installed_by(name: str) -> str:
    """Returns a phrase for an error message, which names the other distributions that have installed the package."""
    from importlib.metadata import packages_distributions  # noqa: PLC0415 - needed only for a message

    others = sorted(set(packages_distributions().get(name, ())) - {"pagewire"})
    return f" ({', '.join(others)})" if others else ""
