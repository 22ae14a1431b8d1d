"""`import pagewire` offers every public name of the packages, and imports each name only when it is used."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import kvcache
import pagewire
import transfer

ROOT = Path(__file__).parents[2]


def test_each_public_name_is_that_of_its_package() -> None:
    for module in (kvcache, transfer):
        assert all(getattr(pagewire, name) is getattr(module, name) for name in module.__all__)
    for name, home in pagewire._ADAPTERS.items():
        found = getattr(pagewire, name)
        assert found is getattr(import_module(home), name)
        assert found.__module__ == home
    names = pagewire.__all__
    assert len(names) == len(set(names)) == len({*kvcache.__all__, *transfer.__all__, *pagewire._ADAPTERS}) + 1
    assert set(names) <= set(dir(pagewire))
    assert pagewire.__version__ == kvcache.__version__


@pytest.mark.parametrize("name", ["Nonsense", "_private", "__wrapped__"])
def test_an_unknown_name_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'pagewire' has no attribute '{name}'"):
        getattr(pagewire, name)


def test_type_checkers_see_the_same_names(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    named = "".join(f"print(pagewire.{name})\n" for name in pagewire.__all__)
    program.write_text(f"import pagewire\n{named}print(pagewire.Nonsense)\n")
    done = subprocess.run(
        [Path(sys.executable).with_name("pyright"), "--pythonpath", sys.executable, program],
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line.strip() for line in done.stdout.splitlines() if " error: " in line]
    last = f"{program}:{len(pagewire.__all__) + 2}:"
    assert [line for line in found if not line.startswith(last)] == []
    assert any('"Nonsense" is not a known attribute of module "pagewire"' in line for line in found)


def test_importing_it_loads_neither_torch_nor_nixl() -> None:
    program = "import sys, pagewire; print({'torch', 'numpy', 'nixl', 'zmq', 'kvcache', 'transfer'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n"


def test_without_nixl_everything_is_imported_and_a_transfer_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nixl", None)  # Importing nixl now fails, as if the package was not installed.
    assert pagewire.PageExchange is transfer.PageExchange
    agents = import_module("transfer.nixl.agent")
    with pytest.raises(
        pagewire.AgentError, match=r"'a': nixl cannot be imported \(pip install 'pagewire\[transfer\]'\)"
    ):
        agents.Agent("a")


def test_a_submodule_is_imported_by_name_without_the_packages_below() -> None:
    """`from pagewire import cli` first asks the package `pagewire` for an attribute of that name."""
    code = "import sys; from pagewire import cli; print({'torch', 'zmq', 'kvcache'} & {*sys.modules}, cli.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set() pagewire.cli\n"
