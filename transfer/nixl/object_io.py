"""Objects of an S3 store through NIXL's OBJ plugin: `KVCacheParams(object_tier_io=NixlObjects(bucket))`.

The plugin runs in a separate process, `object_store.py`, which shares only the memory that the bytes pass through.
There are three reasons. First, a call to the plugin hangs if the store does not answer: for 25 s if nothing listens,
and for 59 s or more if nothing replies, whatever the settings. Second, an abandoned READ keeps writing to its memory.
Third, the plugin of one of NIXL's two wheels needs a CUDA library to load. A process can be killed at any time, and
writes nothing after that.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvcache.errors import InvalidParamsError

_PROGRAM = Path(__file__).with_name("object_store.py")
_START_S = 30.0
_SHOWN = 400  # in bytes: how much of the process's error output an error shows
_T = TypeVar("_T")
_Range: TypeAlias = tuple[str, int, int, int]
"""Key, offset, start and size, as in `kvcache.types.ObjectRange`."""


class _Store(NamedTuple):
    process: subprocess.Popen[bytes]
    channel: socket.socket


@dataclass(frozen=True)
class NixlObjects:
    """A bucket of an S3 store, for `KVCacheParams(object_tier_io=...)`. Invalid values raise `InvalidParamsError`.

    Credentials are found as the AWS SDK finds them (its environment variables, files and roles), or are given in
    `settings` as `access_key` and `secret_key`. All writers to the bucket are trusted: checksums guard only against
    accidents.
    """

    bucket: str
    endpoint: str | None = None  # URL of a store other than AWS's; http is allowed
    prefix: str = ""  # prefix of every object's key, such as "kv/"
    settings: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)  # further parameters of the plugin

    def __post_init__(self) -> None:
        given: dict[object, object] = {"bucket": self.bucket, "prefix": self.prefix, **self.settings}
        if self.endpoint is not None:
            given["endpoint"] = self.endpoint
        for name, value in given.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise InvalidParamsError(f"NixlObjects: {name} is {value!r}: a string is needed")
        if not self.bucket:
            raise InvalidParamsError("NixlObjects: bucket is '': a bucket name is needed")
        if self.endpoint is not None and not re.match(r"https?://.", self.endpoint):
            raise InvalidParamsError(f"NixlObjects: endpoint is {self.endpoint!r}: an http or https URL is needed")

    def __call__(self, size: int, timeout_s: float) -> NixlObjectIO:
        """Returns an I/O object with `size` bytes of memory. Each of its calls takes at most `timeout_s` seconds."""
        given = {"bucket": self.bucket, "num_threads": "8"}
        if self.endpoint is not None:
            given |= {"endpoint_override": self.endpoint, "scheme": self.endpoint.partition("://")[0]}
        return NixlObjectIO(size, timeout_s, self.prefix, given | dict(self.settings))


class NixlObjectIO:
    """A `kvcache.types.ObjectIO` that uses a separate process. The first call starts this process."""

    def __init__(self, size: int, timeout_s: float, prefix: str, settings: Mapping[str, str]) -> None:
        self._timeout_s = timeout_s
        self._prefix = prefix
        self._settings = dict(settings)
        self._file = os.memfd_create("pagewire-objects", os.MFD_CLOEXEC)
        os.ftruncate(self._file, size)
        self._memory = np.frombuffer(mmap.mmap(self._file, size), np.uint8)
        self._said = os.memfd_create("pagewire-object-log", os.MFD_CLOEXEC)  # the process's standard error
        fcntl.fcntl(self._said, fcntl.F_SETFL, os.O_APPEND)
        self._process: _Store | None = None

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The memory that objects are read into and written from."""
        return self._memory

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Returns whether an object exists for each key. Raises `OSError` if the store fails."""
        return self._ask({"call": "exist", "keys": [self._prefix + key for key in keys]}, list[bool])

    def write(self, objects: Sequence[_Range]) -> None:
        """Writes whole objects. Raises `OSError` if an object could not be written."""
        self._ask({"call": "write", "ranges": self._rows(objects)}, list[bool])

    def read(self, ranges: Sequence[_Range]) -> list[bool]:
        """Reads ranges of objects. Returns whether each range was read. Raises `OSError` if the store fails."""
        return self._ask({"call": "read", "ranges": self._rows(ranges)}, list[bool])

    def close(self) -> None:
        """Kills the process for good. Safe to call twice."""
        self._end()
        for file in (self._file, self._said):
            with contextlib.suppress(OSError):
                os.close(file)
        self._file = self._said = -1

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.channel.close()
            process.process.kill()
            process.process.wait()

    def _rows(self, ranges: Sequence[_Range]) -> list[_Range]:
        return [(self._prefix + key, offset, start, size) for key, offset, start, size in ranges]

    def _ask(self, question: dict[str, object], answer: type[_T]) -> _T:
        """Sends one request to the process and returns its answer.

        Any failure kills the process, and the next call starts another one.
        """
        os.ftruncate(self._said, 0)
        try:
            if self._process is None:
                self._process = self._start()
                self._exchange(self._process, {"call": "start", "settings": self._settings}, _START_S)
            return msgspec.convert(self._exchange(self._process, question, self._timeout_s), answer)
        except (OSError, KeyError, msgspec.MsgspecError) as error:
            self._end()
            said = os.pread(self._said, _SHOWN, max(0, os.fstat(self._said).st_size - _SHOWN))
            text = " ".join(said.decode(errors="replace").split())
            raise OSError(f"bucket {self._settings['bucket']!r}: {question['call']}: {error}; {text}") from error

    def _start(self) -> _Store:
        ours, theirs = socket.socketpair()
        with theirs:
            inherited = (theirs.fileno(), self._file)
            process = subprocess.Popen(  # noqa: S603 - the program is our own
                [sys.executable, str(_PROGRAM), *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=inherited,
            )
        return _Store(process, ours)

    def _exchange(self, store: _Store, question: dict[str, object], seconds: float) -> Any:
        """Sends a request and returns the answer. Each is one line of JSON. Raises `OSError` or a decoding error."""
        deadline, channel, line = time.monotonic() + seconds, store.channel, b""
        channel.settimeout(seconds)
        channel.sendall(msgspec.json.encode(question) + b"\n")
        while not line.endswith(b"\n"):
            channel.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                piece = channel.recv(1 << 16)
            except TimeoutError as error:
                raise TimeoutError(f"no answer in {seconds:g} s") from error
            if not piece:
                raise ConnectionError("the process that reads and writes the objects has ended")
            line += piece
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "error" in answer:
            raise ConnectionError(answer["error"])
        return answer["answer"]
