"""Makes the tables of options in `docs/reference/options.md`.

Source files are parsed instead of imported, because the packages that they import (such as vLLM) may be missing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/options.md"
OPTIONS = {
    "Options": "scheduler_adapters/vllm/options.py",
    "TierOptions": "scheduler_adapters/vllm/tiers.py",
    "WorkerConfig": "transfer/connector/config.py",
    "GroupConfig": "transfer/connector/config.py",
    "Timing": "transfer/connector/config.py",
    "PageExchange": "transfer/pull/exchange.py",
    "ReplicaTransfer": "transfer/pull/replica.py",
    "PagedKVCacheManager": "kvcache/manager.py",
    "KVCacheParams": "kvcache/params.py",
    "KVCacheQuantizationConfig": "kvcache/params.py",
    "KVEvents": "kvcache/params.py",
    "Routing": "kvcache/params.py",
    "ManagerWatch": "kvcache/endpoints/watch.py",
    "ServerConfig": "scheduler_adapters/service/server.py",
}
"""Classes whose fields are options, and classes whose arguments are options."""

_FACTORIES = {"dict": "{}", "list": "[]"}


class Option(NamedTuple):
    """One row of a table. `default` is Python code, or "" for a required option. `text` comes from the docstring of the
    class.
    """

    name: str
    default: str
    meaning: str


@cache
def source(path: str) -> str:
    """Returns the text of a file of the repository."""
    return (ROOT / path).read_text()


def class_of(name: str, path: str) -> ast.ClassDef:
    """Returns the syntax tree of a class in a file."""
    return next(node for node in ast.parse(source(path)).body if isinstance(node, ast.ClassDef) and node.name == name)


def fields_of(name: str, path: str) -> list[str]:
    """Returns the fields of a class, in the order of their definition."""
    nodes = class_of(name, path).body
    return [node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]


def constant(name: str) -> ast.expr:
    """Returns the value of the first constant of this name in the packages."""
    return _constants()[name]


@cache
def _constants() -> dict[str, ast.expr]:
    """Returns the values of all assignments in modules. The result is cached, because parsing every module takes a
    second.
    """
    found: dict[str, ast.expr] = {}
    for package in ("kvcache", "transfer", "scheduler_adapters", "pagewire"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(source(str(path.relative_to(ROOT)))).body:
                if isinstance(node, ast.Assign):
                    found.setdefault(ast.unparse(node.targets[0]), node.value)
    return found


def _default(node: ast.expr | None) -> str:
    match node:
        case None:
            return ""
        case ast.Call(func=func, keywords=[ast.keyword(arg="default_factory", value=value), *_]):
            assert ast.unparse(func) in {"field", "msgspec.field"}
            if isinstance(value, ast.Lambda):
                return ast.unparse(value.body).removeprefix("envs.")
            return _FACTORIES.get(ast.unparse(value).partition("[")[0], f"{ast.unparse(value)}()")
        case ast.Attribute(value=ast.Name(id="_TIMING"), attr=name):
            return next(option.default for option in options_of("Timing") if option.name == name)
        case ast.Name(id=name) if name.isupper():
            return str(ast.literal_eval(ast.unparse(constant(name))))
        case _:
            return ast.unparse(node).replace("'", '"')


def _meanings(node: ast.ClassDef) -> dict[str, str]:
    """Returns the descriptions of attributes and arguments in the docstring of a class.

    If an entry reads "a, b: text", both names get this text.
    """
    found: dict[str, str] = {}
    for section in re.findall(
        r"^(?:Attributes|Args):\n((?:    .*\n?|\n)+)", ast.get_docstring(node) or "", re.MULTILINE
    ):
        for names, text in re.findall(r"^    ([\w, ]+): ((?:.*\n?)(?:(?:     .*)\n?)*)", section, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


def _comment(path: str, node: ast.AnnAssign) -> str:
    lines = source(path).splitlines()
    before = node.lineno - 2
    above: list[str] = []
    while lines[before].strip().startswith("#"):
        above.insert(0, lines[before].strip()[1:].strip())
        before -= 1
    return lines[node.lineno - 1].partition("#")[2].strip() or " ".join(above)


def _entries(node: ast.ClassDef, path: str) -> Iterator[tuple[str, ast.expr | None, str]]:
    init = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if init is None:
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                yield one.target.id, one.value, _comment(path, one)
        return
    arguments = init.args.args[1:]
    missing: list[ast.expr | None] = [None] * (len(arguments) - len(init.args.defaults))
    for argument, value in zip(arguments, [*missing, *init.args.defaults], strict=True):
        yield argument.arg, value, ""
    for argument, value in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True):
        yield argument.arg, value, ""


def options_of(name: str) -> list[Option]:
    """Returns the options of a class in `OPTIONS`, in the order of their definition."""
    node = class_of(name, OPTIONS[name])
    meanings = _meanings(node)
    return [
        Option(field, _default(value), meanings.get(field) or comment)
        for field, value, comment in _entries(node, OPTIONS[name])
    ]


def table(name: str) -> str:
    """Returns the table of a class in Markdown."""
    rows = ["| option | default | what it is |", "|---|---|---|"]
    for option in options_of(name):
        default = f"`{option.default}`" if option.default else "must be given"
        rows.append(f"| `{option.name}` | {default} | {option.meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)
