"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("pagewire")
except PackageNotFoundError:  # pagewire runs from a folder and was never installed
    __version__ = "unknown"
