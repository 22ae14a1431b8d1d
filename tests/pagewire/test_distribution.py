"""Another package may hide a package of pagewire. The error then names the file of the other package before its code
runs.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.distribution import PACKAGES, _digest

ROOT = Path(__file__).parents[2]


def imported(folder: Path, *first: Path) -> tuple[int, str]:
    """Imports `pagewire` from a folder in a new process, with other folders before it on the path."""
    path = [str(one) for one in (*first, folder)]
    program = f"import sys; sys.path[:0] = {path!r}; import pagewire; print(pagewire.__file__)"
    # Without site-packages, Python cannot find an editable install of pagewire.
    command = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Returns a site-packages folder as pip makes it, without the distribution's other files."""
    folder = tmp_path / "site-packages"
    info = folder / "pagewire-0.1.0.dist-info"
    info.mkdir(parents=True)
    for name in ("pagewire", *PACKAGES):
        (folder / name).mkdir()
        for path in sorted((ROOT / name).glob("*.py")):
            (folder / name / path.name).write_bytes(path.read_bytes())
    files = sorted(folder.rglob("*.py"))
    lines = [f"{path.relative_to(folder)},sha256={_digest(path)},{path.stat().st_size}" for path in files]
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: pagewire\nVersion: 0.1.0\n")
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    return folder


def stranger(folder: Path, name: str) -> Path:
    """Installs a package of the same name from another distribution, as pip would do it."""
    package, info = folder / name, folder / "transfer-0.40.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    info.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise RuntimeError('it must not run')\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transfer\nVersion: 0.40\n")
    (info / "top_level.txt").write_text(f"{name}\n")
    return package / "__init__.py"


def test_a_complete_installation_is_imported(installed: Path) -> None:
    assert imported(installed) == (0, str(installed / "pagewire/__init__.py"))


def test_the_working_tree_is_imported() -> None:
    assert imported(ROOT) == (0, str(ROOT / "pagewire/__init__.py"))


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_earlier_in_the_path_is_named(name: str, installed: Path, tmp_path: Path) -> None:
    other = stranger(tmp_path / "other", name)
    status, told = imported(installed, other.parents[1])
    assert status == 1
    assert told == (
        f"pagewire.distribution.ShadowedPackageError: pagewire needs its own package {name!r} "
        f"({installed / name / '__init__.py'}), but Python imports {other}: uninstall the "
        f"distribution that installed that file (transfer), or move its folder behind {installed} in sys.path"
    )


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_was_written_over_is_named(name: str, installed: Path) -> None:
    other = stranger(installed, name)
    status, told = imported(installed)
    assert status == 1
    assert told == (
        f"pagewire.distribution.ShadowedPackageError: pagewire needs its own package {name!r}, but another "
        f"distribution (transfer) has written over {other}: uninstall that distribution, then "
        "pip install --force-reinstall --no-deps pagewire"
    )


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_gone_is_named(name: str, installed: Path) -> None:
    gone = installed / name / "__init__.py"
    gone.unlink()  # pip leaves such a folder after it has uninstalled the other distribution.
    status, told = imported(installed)
    assert status == 1
    assert f"pagewire needs its package {name!r}, but {gone} does not exist: pip install --force-reinstall" in told
