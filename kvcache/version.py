"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("pagewire")
except PackageNotFoundError:  # run from a folder that was never installed
    __version__ = "unknown"
