import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

from scheduler_adapters.sglang import register

HEAVY = {"sglang", "torch", "numpy", "nixl", "kvcache", "transfer"}


def test_the_plugin_is_imported_without_sglang_and_brings_nothing_heavy() -> None:
    """SGLang loads the plugin in each of its processes. The processes without a cache do not need torch."""
    code = "import sys, scheduler_adapters.sglang; print(*{name.partition('.')[0] for name in sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not HEAVY & set(ran.stdout.split())


def test_the_entry_point_of_the_package_is_the_function() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    ((name, target),) = project["project"]["entry-points"]["sglang.srt.plugins"].items()
    assert EntryPoint(name, target, "sglang.srt.plugins").load() is register
