"""Substitutes for packages that SGLang imports but does not use here: kernels for GPUs, codecs, other file formats.
SGLang's own code is unchanged: scheduler, cache interface, allocators, model runner and model code.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PACKAGES = (
    "IPython",
    "compressed_tensors",
    "cuda",
    "flashinfer",
    "gguf",
    "httpx",
    "kernels",
    "mistral_common",
    "partial_json_parser",
    "pynvml",
    "scipy",
    "sentencepiece",
    "setproctitle",
    "sgl_kernel",
    "sniffio",
    "soundfile",
    "tiktoken",
    "timm",
    "torch_memory_saver",
    "torchao",
    "torchaudio",
    "torchvision",
    "uvicorn",
    "zstandard",
)


class _Nothing(type):
    """The metaclass of classes that can be used in any way at import time. The classes are false in conditions."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(name)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __bool__(cls) -> bool:
        return False


class _Stand(metaclass=_Nothing):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if decorates else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stand()

    def __bool__(self) -> bool:
        return False


def _named(name: str) -> Any:
    return _Nothing(name, (_Stand,), {})


class _Module(types.ModuleType):
    __path__: Sequence[str] = ()
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _named(name)
        setattr(self, name, made)
        return made


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder for `PACKAGES` that are not installed."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> bool:
    """Installs the finder after all other finders. Returns whether SGLang is installed."""
    if importlib.util.find_spec("sglang") is None:
        return False
    import nixl  # noqa: F401  (it looks for CUDA's package, and would take a stand-in for it)

    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.append(StandIns())
    return True
