"""Whether `kvcache`, `transfer` and `scheduler_adapters` are those of this distribution.

Their names are common: PyPI's `transfer` installs a package of the same name. Imported in our place, it would fail much
later, with the name of something that it does not have.
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
"""The packages of this distribution below `pagewire`."""
_ROOT = Path(__file__).resolve().parents[1]


class ShadowedPackageError(ImportError):
    """Another distribution's package is imported in place of one of ours."""


def check_packages(root: Path = _ROOT) -> None:
    """Raise `ShadowedPackageError`, with the file that is imported, unless all three packages are ours.

    They lie beside `pagewire`, and where a wheel was installed, its RECORD has the digest of their `__init__.py`: pip
    lets a later distribution write over it.
    """
    recorded = _recorded(root)
    for name in PACKAGES:
        ours, found = root / name / "__init__.py", _file_of(name)
        if found is None:
            raise ShadowedPackageError(
                f"pagewire needs its package {name!r}, and {ours} is gone: pip install --force-reinstall --no-deps "
                "pagewire",
                name=name,
            )
        if found != ours:
            raise ShadowedPackageError(
                f"pagewire needs its own package {name!r} ({ours}), but Python imports {found}: uninstall what "
                f"installed that file{_installed_by(name)}, or move its folder behind {root} in sys.path",
                name=name,
                path=str(found),
            )
        digest = recorded.get(f"{name}/__init__.py")
        if digest is not None and digest != _digest(ours):
            raise ShadowedPackageError(
                f"pagewire needs its own package {name!r}, but another distribution{_installed_by(name)} has written "
                f"over {ours}: uninstall that one, then pip install --force-reinstall --no-deps pagewire",
                name=name,
                path=str(ours),
            )


def _file_of(name: str) -> Path | None:
    """The file that `import name` runs, or has run; nothing for a folder without one, or no folder."""
    loaded = sys.modules.get(name)
    spec: ModuleSpec | None = loaded.__spec__ if loaded is not None else find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()


def _recorded(root: Path) -> dict[str, str]:
    """Digests of the files of an installed wheel, as its RECORD spells them; none for a source tree."""
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
    """The distributions beside ours that say they installed the package, for a message."""
    from importlib.metadata import packages_distributions  # noqa: PLC0415 - reads every distribution, for a message

    others = sorted(set(packages_distributions().get(name, ())) - {"pagewire"})
    return f" ({', '.join(others)})" if others else ""
