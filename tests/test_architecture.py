"""Imports between packages and rooms follow the rules, and the public interface is as documented."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvcache", "transfer", "scheduler_adapters", "pagewire")
MAX_FUNCTION = 60  # lines

# The shared modules of each package, which are called its values below. These files are outside of rooms, and the rooms
# of the package may import them. All other files outside of rooms are the top of the package. A room may have shared
# modules, too.
VALUES = {
    "kvcache": {
        *("arguments", "copies", "errors", "eviction_order", "layer_groups", "layout", "params", "retention", "types"),
        *("uncopied", "under_way", "unmoved", "weights"),
    },
    # the rest of this room looks at a manager from outside
    "kvcache.endpoints": {"addresses", "dialer", "families", "publisher", "reset", "sockets"},
    "transfer": {"errors", "failures", "memory", "spans", "stats"},
    "scheduler_adapters": {"base", "checkpoints", "errors", "interrupts", "loop", "overlapped", "pull_or_compute"},
    "pagewire": {"arguments", "distribution", "extras", "listening", "plots", "tables", "viewer"},
}
_MANAGER = {"kvcache values", "kvcache.replica", "kvcache"}
# For each room (a folder of a package), the rooms that it may import.
ROOMS: dict[str, set[str]] = {
    "kvcache values": set(),
    "kvcache.pool": {"kvcache values"},
    "kvcache.events": {"kvcache values", "kvcache.pool"},
    "kvcache.states": {"kvcache values", "kvcache.pool"},
    "kvcache.endpoints values": {"kvcache values", "kvcache.events"},
    "kvcache.replica": {"kvcache values", "kvcache.pool", "kvcache.events", "kvcache.states"},
    "kvcache.tiers": {"kvcache values", "kvcache.pool", "kvcache.replica", "kvcache.states"},
    "kvcache.policies": {"kvcache values", "kvcache.pool", "kvcache.replica", "kvcache.states"},
    "kvcache": {
        *("kvcache values", "kvcache.pool", "kvcache.events", "kvcache.replica", "kvcache.states", "kvcache.tiers"),
        *("kvcache.endpoints values", "kvcache.policies"),
    },
    "kvcache.watch": {"kvcache values", "kvcache.pool", "kvcache.replica", "kvcache"},
    "kvcache.endpoints": {
        *("kvcache values", "kvcache.endpoints values", "kvcache.events", "kvcache.replica", "kvcache.states"),
        *("kvcache.tiers", "kvcache", "kvcache.watch"),
    },
    "transfer values": {"kvcache values"},
    "transfer.plan": {"kvcache values", "kvcache.replica", "transfer values"},
    "transfer.wire": {"kvcache.endpoints values", "transfer values", "transfer.plan"},
    "transfer.nixl": {"kvcache values", "transfer values"},
    "transfer.pull": {
        *("kvcache values", "kvcache.replica"),
        *("transfer values", "transfer.plan", "transfer.wire", "transfer.nixl"),
    },
    "transfer.engine": {"kvcache values", "transfer values", "transfer.plan", "transfer.wire", "transfer.nixl"},
    "transfer.connector": {
        *("kvcache values", "kvcache.replica"),
        *("transfer values", "transfer.plan", "transfer.wire", "transfer.pull"),
    },
    "transfer": {
        *("kvcache.endpoints values", "kvcache.watch"),
        *("transfer values", "transfer.wire", "transfer.nixl", "transfer.pull", "transfer.engine"),
        "transfer.connector",
    },
    "scheduler_adapters values": _MANAGER,
    "scheduler_adapters.hf": {*_MANAGER, "kvcache.states", "scheduler_adapters values"},
    "scheduler_adapters.service": {
        *_MANAGER,
        *("kvcache.endpoints values", "kvcache.endpoints", "kvcache.watch"),
        *("transfer values", "transfer.wire", "transfer.nixl", "transfer.pull", "transfer"),
        *("scheduler_adapters values", "scheduler_adapters.hf"),
    },
    "scheduler_adapters.front": {
        *("kvcache values", "kvcache.endpoints values", "kvcache.events", "kvcache.replica"),
        *("transfer values", "transfer.wire"),
        *("scheduler_adapters values", "scheduler_adapters.hf", "scheduler_adapters.service"),
    },
    "scheduler_adapters.peers": {
        *("kvcache values", "kvcache.replica", "transfer values", "transfer.wire", "transfer.pull"),
        *("transfer.connector", "scheduler_adapters values"),
    },
    "scheduler_adapters.sglang": {
        *("kvcache values", "kvcache.endpoints values", "kvcache.pool", "kvcache.replica", "kvcache.tiers"),
        *("kvcache.endpoints", "kvcache.watch", "scheduler_adapters values"),
        *("transfer values", "transfer.wire", "transfer.pull", "transfer.connector", "scheduler_adapters.service"),
        "scheduler_adapters.peers",
    },
    "scheduler_adapters.vllm": {
        *("kvcache values", "kvcache.endpoints values", "kvcache.pool", "kvcache.replica", "kvcache.tiers"),
        *("transfer values", "transfer.wire", "transfer.nixl", "transfer.pull", "transfer.connector"),
        *("scheduler_adapters values", "scheduler_adapters.peers"),
    },
    "scheduler_adapters": set(),
    "pagewire values": {"scheduler_adapters values"},
    "pagewire.demo": {
        *("kvcache values", "kvcache"),
        *("scheduler_adapters values", "scheduler_adapters.hf", "scheduler_adapters.service", "pagewire values"),
    },
    "pagewire.serve": {
        *("kvcache values", "transfer values", "transfer.wire", "scheduler_adapters values", "scheduler_adapters.hf"),
        *("scheduler_adapters.service", "scheduler_adapters.front", "pagewire values"),
    },
    "pagewire.replay": {
        *("kvcache values", "kvcache", "kvcache.watch", "kvcache.endpoints"),
        *("scheduler_adapters values", "pagewire values"),
    },
    "pagewire.plan": {
        *("kvcache values", "kvcache.states", "kvcache", "transfer.plan"),
        *("scheduler_adapters values", "scheduler_adapters.hf", "pagewire values", "pagewire.replay"),
    },
    "pagewire.doctor": {
        *("kvcache values", "kvcache.replica", "transfer values", "transfer.nixl", "pagewire values"),
    },
    "pagewire.top": {
        *("kvcache values", "kvcache.watch", "kvcache.endpoints"),
        *("transfer.wire", "scheduler_adapters values", "pagewire values"),
    },
    "pagewire": {
        *("kvcache values", "scheduler_adapters values", "pagewire values", "pagewire.demo", "pagewire.doctor"),
        *("pagewire.plan", "pagewire.replay", "pagewire.serve", "pagewire.top"),
    },
}
# `transfer` may import these modules of `kvcache`: the contract between the packages.
CONTRACT = {
    *("kvcache.arguments", "kvcache.errors", "kvcache.endpoints.families", "kvcache.layer_groups", "kvcache.layout"),
    *("kvcache.endpoints.sockets", "kvcache.uncopied", "kvcache.unmoved", "kvcache.watch.messages"),
    "kvcache.replica.block_table",
}
# The only folder of `kvcache` that imports zmq and prometheus_client.
_ENDPOINTS = "kvcache.endpoints."
# Only the factory imports a policy by its name. Everything else knows the protocols: `EvictionOrder`, `ReplicaPolicy`.
_POLICIES, _FACTORY = "kvcache.policies.", "kvcache.policies.factory"


@cache
def files() -> dict[str, Path]:
    """Returns every file of the packages, by module name."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(files()[module].read_text())


@cache
def imports(module: str) -> frozenset[str]:
    """Returns the modules that a file imports, including imports only for types. A module of the packages is given by
    its file.
    """
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"{module}: imports are absolute"
            assert not node.level, f"{module}: imports are absolute"
            for name in node.names:
                below = f"{node.module}.{name.name}"
                found.add(below if below in files() else node.module)
    return frozenset(found)


def room(module: str) -> str:
    *folder, name = files()[module].relative_to(ROOT).with_suffix("").parts
    found = ".".join(folder)
    return f"{found} values" if name in VALUES.get(found, ()) else found


def circle(graph: Mapping[str, AbstractSet[str]]) -> list[str]:
    """Returns the nodes of a cycle in the graph. The result is empty if there is no cycle."""
    over: set[str] = set()

    def walk(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node not in over:
            for following in sorted(graph[node]):
                if found := walk(following, [*way, node]):
                    return found
            over.add(node)
        return []

    return next((way for node in graph if (way := walk(node, []))), list[str]())


def test_the_table_of_rooms_has_every_room_and_no_circle() -> None:
    assert set(map(room, files())) == set(ROOMS)
    assert all(f"{folder}.{name}" in files() for folder, names in VALUES.items() for name in names)
    assert circle(ROOMS) == []
    order = {package: at for at, package in enumerate(PACKAGES)}
    first = {name: order[re.split(r"[. ]", name)[0]] for name in ROOMS}
    assert all(first[other] <= first[name] for name, others in ROOMS.items() for other in others), "one way only"


def test_each_room_imports_only_what_the_table_allows() -> None:
    broken: set[tuple[str, str]] = set()
    for module in files():
        for other in imports(module) & files().keys():
            if room(other) != room(module) and room(other) not in ROOMS[room(module)]:
                broken.add((module, other))
    assert broken == set(), "these imports are beyond the table of rooms"


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle({module: imports(module) & files().keys() for module in files()}) == []


def test_outside_libraries_and_the_contract_have_their_places() -> None:
    for module in files():
        tops = {name.split(".")[0] for name in imports(module)}
        assert "nixl" not in tops or module == "transfer.nixl.agent", module
        if not module.startswith(_POLICIES):
            known = {name for name in imports(module) if name.startswith(_POLICIES)}
            assert known <= {_FACTORY}, f"{module}: {known - {_FACTORY}}"
        if module.startswith("kvcache"):
            assert not {"zmq", "prometheus_client"} & tops or module.startswith(_ENDPOINTS), module
        if module.startswith("transfer"):
            known = {name for name in imports(module) if name.split(".")[0] == "kvcache"}
            assert known <= CONTRACT, f"{module}: {known - CONTRACT}"


def test_functions_stay_readable_and_nothing_raises_an_assertion() -> None:
    for module in files():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= MAX_FUNCTION, f"{module}: {node.name} has {lines} lines"
            assert not (isinstance(node, ast.Raise) and "AssertionError" in ast.dump(node)), f"{module}:{node.lineno}"


def test_the_limit_is_the_one_that_contributors_are_told() -> None:
    assert f"at most {MAX_FUNCTION} lines a function" in (ROOT / "CONTRIBUTING.md").read_text()


def test_no_class_name_stands_for_two_things() -> None:
    where: dict[str, list[str]] = {}
    for module in files():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in where.items() if len(modules) > 1} == {}


def spelled(value: ast.expr) -> str:
    """Normalises the spelling of a type alias, so that equal aliases compare equal."""
    if isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Literal":
        return str(sorted(re.findall(r"'[^']*'", ast.unparse(value.slice))))
    return ast.unparse(value).replace("npt.", "")


def test_no_name_of_a_type_stands_for_two_things() -> None:
    where: dict[str, dict[str, str]] = {}
    for module in files():
        for node in tree(module).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) or node.value is None:
                continue
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and re.match("[A-Z][a-z]", target.id):
                where.setdefault(target.id, {}).setdefault(spelled(node.value), module)
    assert {name: found for name, found in where.items() if len(found) > 1} == {}


def folders() -> Iterator[tuple[str, str]]:
    """Returns each package and room, with the docstring of its `__init__` in one line."""
    for module, path in files().items():
        if path.name == "__init__.py":
            yield module, " ".join((ast.get_docstring(tree(module)) or "").split())


def named_rooms(sentence: str) -> set[str]:
    """Returns the rooms that a docstring lists as imported. An example of such a list is "`kvcache.pool` and the shared
    modules of `kvcache`".
    """
    shared = r"the shared modules of (`[\w.]+`(?:(?:, | and )`[\w.]+`)*)"
    spelled = re.sub(shared, lambda found: re.sub(r"`([\w.]+)`", r"`\1 values`", found[1]), sentence)
    return {name for name in re.findall(r"`([^`]+)`", spelled) if re.split(r"[. ]", name)[0] in PACKAGES}


def test_each_folder_says_what_it_imports_and_where_to_start() -> None:
    for module, text in folders():
        found = re.search(r"(Imports .+?)\. Start reading at (.+)", text)
        assert found, f"{module}: its docstring says what it imports, and where to start reading"
        if "." in module:
            allowed = ROOMS[module]
        else:  # a whole package
            tops = {re.split(r"[. ]", other)[0] for name in ROOMS if name.startswith(module) for other in ROOMS[name]}
            allowed = tops - {module}
        assert named_rooms(found[1]) == allowed, module
        starts = re.findall(r"`([\w/]+\.(?:py|md))`", found[2])
        assert starts, module
        for name in starts:
            assert (files()[module].parent / name).exists() or (ROOT / name).exists(), f"{module}: no {name}"


def paths_in(document: str) -> set[str]:
    """Returns the files and folders that a document names with their path from the root."""
    found = re.findall(r"`((?:kvcache|transfer|scheduler_adapters|pagewire|tests|benchmarks|docs)/[\w/.]*)`", document)
    return set(found)


def test_documents_name_files_that_are_there() -> None:
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        missing = sorted(name for name in paths_in(path.read_text()) if not (ROOT / name).exists())
        assert missing == [], path.name


@pytest.mark.parametrize(
    "name", ["../CONTRIBUTING.md", "concepts/architecture.md", "glossary.md", "guides/layers.md", "guides/routers.md"]
)
def test_documents_that_map_the_code_name_what_is_there(name: str) -> None:
    """Checks each file that a document names, and each word that looks like an identifier of pagewire. The test
    therefore finds outdated names.
    """
    code = " ".join(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / name).read_text()))
    named = {word for word in re.findall(r"[A-Za-z_]\w*", code) if "_" in word.strip("_") or word.lower() != word}
    texts = [path.read_text() for path in (*files().values(), ROOT / "Makefile")]
    known = {word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text)}
    outside = {path.stem for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")}
    assert sorted(named - known - outside - set(files())) == []
    ours = {
        path.name
        for path in (
            *files().values(),
            *(ROOT / "tests").rglob("*.py"),
            *ROOT.glob("benchmarks/*.py"),
            *ROOT.glob("examples/*.py"),
        )
    }
    assert sorted(set(re.findall(r"\w+\.py", code)) - ours) == []


def test_the_map_has_every_room_and_the_glossary_each_term_once() -> None:
    mapped = re.findall(r"^- `([\w/]+)/`: ", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert sorted(mapped) == sorted(name.replace(".", "/") for name in ROOMS if " " not in name)
    rows = re.findall(r"^- \*\*([^*]+)\*\*: .+ \(`([\w/.]+)`\)$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    terms = [term for names, _ in rows for term in names.split(", ")]
    assert len(terms) > 60
    assert sorted({term for term in terms if terms.count(term) > 1}) == []


@pytest.mark.parametrize("package", ["kvcache", "transfer"])
def test_init_lists_the_public_names_and_nothing_else(package: str) -> None:
    for node in tree(package).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        assert docstring or isinstance(node, ast.ImportFrom | ast.Assign), ast.dump(node)
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_importing_the_packages_loads_nothing_heavy() -> None:
    heavy = "('nixl', 'transformers', 'rich', 'prometheus_client', 'textual')"
    code = f"import sys, kvcache, transfer; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"
