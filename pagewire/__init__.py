"""All public names of the project in one module: `from pagewire import KVCacheParams, PagedKVCacheManager`.

A name is imported from its package when it is first used, so `import pagewire` takes milliseconds and needs neither
torch nor NIXL. `__all__` has the public names of `kvcache`, `transfer` and `scheduler_adapters`.

Imports `kvcache`, `transfer` and `scheduler_adapters`. Start reading at `cli.py`, the command line.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pagewire.distribution import ShadowedPackageError as ShadowedPackageError
from pagewire.distribution import check_packages

# Type checkers read `__init__.pyi` instead. A test compares the two.
_ADAPTERS = {
    "AdapterError": "scheduler_adapters.errors",
    "MissingExtraError": "scheduler_adapters.errors",
    "ModelRunner": "scheduler_adapters.loop",
    "Output": "scheduler_adapters.loop",
    "PagedGenerator": "scheduler_adapters.hf.generate",
    "Pages": "scheduler_adapters.base",
    "PulledPages": "scheduler_adapters.base",
    "Request": "scheduler_adapters.loop",
    "ServingLoop": "scheduler_adapters.loop",
    "weights_of_checkpoint": "scheduler_adapters.checkpoints",
}

check_packages()


def __getattr__(name: str) -> Any:
    """Imports a public name from its package on first use. Raises `AttributeError` if no package has it."""
    if name == "__all__":
        public = {*import_module("kvcache").__all__, *import_module("transfer").__all__, *_ADAPTERS}
        return sorted({*public, "ShadowedPackageError"})
    if name.startswith("_") and name != "__version__":
        raise AttributeError(f"module 'pagewire' has no attribute {name!r}")
    # `from pagewire import cli` calls this function before it imports the module
    if find_spec(f"pagewire.{name}") is not None:
        raise AttributeError(f"module 'pagewire' has no attribute {name!r} yet")
    for home in (_ADAPTERS.get(name, "kvcache"), "transfer"):
        module = import_module(home)
        if name in _ADAPTERS or name in module.__all__:
            found = getattr(module, name)
            setattr(sys.modules[__name__], name, found)
            return found
    raise AttributeError(f"module 'pagewire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
