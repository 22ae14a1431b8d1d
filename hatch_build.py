"""Compiles `kvcache/replica/chained.c` where the package is installed, if there are a C compiler and Python's headers.

Without them the package is whole as well: hashlib computes the page digests, and they are the same. `python
hatch_build.py` compiles in place, for a tree that is used without being installed.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand
    BuildHookInterface = object

SOURCE = Path("kvcache/replica/chained.c")
BUILT = SOURCE.with_suffix(".abi3.so")
"""Of every CPython from 3.11 on (but not of one without a GIL, which does not load it)."""


def compile_chained(root: Path, to: Path | None = None) -> str:
    """Compile it to `to`, in place for None. Returns what hindered it, or nothing.

    What an earlier run has made is gone either way.
    """
    built = to or root / BUILT
    settings = sysconfig.get_config_vars()
    compiler = shlex.split(str(settings.get("LDSHARED") or ""))  # with what makes a module of it on this system
    headers = Path(sysconfig.get_path("include"))
    try:
        built.unlink(missing_ok=True)
        if not compiler or not shutil.which(compiler[0]):
            return f"there is no C compiler ({' '.join(compiler[:1]) or 'Python names none'})"
        if not (headers / "Python.h").exists():
            return f"Python's headers are not in {headers}"
        flags = ["-std=c11", "-O2", "-Wall", *shlex.split(str(settings.get("CCSHARED") or "")), f"-I{headers}"]
        run = subprocess.run(  # noqa: S603 - the compiler that Python was made with
            [*compiler, *flags, str(root / SOURCE), "-o", str(built), "-ldl"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        return str(error)
    if run.returncode:
        built.unlink(missing_ok=True)
        return f"{compiler[0]}: {' '.join(run.stderr.split())[:400] or run.returncode}"
    return ""


class CompileChained(BuildHookInterface):
    """Adds the compiled module to the wheel, or to the tree of an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - as hatchling calls it
        """Before the wheel is filled."""
        if hindered := compile_chained(Path(self.root)):
            self.app.display_warning(f"sha256 is computed by hashlib alone, page by page: {hindered}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data |= {"pure_python": False, "tag": f"cp311-abi3-{platform}"}
        build_data["artifacts"].append(f"/{BUILT}")


if __name__ == "__main__":
    sys.exit(compile_chained(Path(__file__).parent) or 0)
