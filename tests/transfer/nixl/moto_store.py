"""An S3 store for tests: moto in its own process, on a free port."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import NamedTuple

from transfer.nixl.object_io import NixlObjects

_KEYS = {"access_key": "test", "secret_key": "test"}


class MotoStore(NamedTuple):
    process: subprocess.Popen[bytes]
    url: str

    def request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        # moto requires a signature, but does not check the signature.
        signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, Signature=0"}
        request = urllib.request.Request(f"{self.url}/{path}", data, signed, method=method)  # noqa: S310 - as below
        with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310 - of http, as the store has it
            return answer.read()

    def bucket(self, name: str, prefix: str = "") -> NixlObjects:
        """Returns a new or an existing bucket."""
        try:
            self.request("PUT", name)
        except urllib.error.HTTPError as error:
            if error.code != 409:  # The bucket exists already.
                raise
        return NixlObjects(name, self.url, prefix, _KEYS)

    def keys(self, bucket: str) -> list[str]:
        return re.findall(r"<Key>(.*?)</Key>", self.request("GET", f"{bucket}?list-type=2").decode())

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def moto_store() -> Iterator[MotoStore]:
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    # The thread reads the later output, so that the pipe never gets full.
    drain = threading.Thread(target=process.stderr.read)
    try:
        for line in process.stderr:
            if found := re.search(rb"http://127.0.0.1:\d+", line):
                break
        else:
            raise RuntimeError("moto has not started")
        drain.start()
        yield MotoStore(process, found[0].decode())
    finally:
        process.kill()
        process.wait()
        if drain.ident is not None:
            drain.join()
        process.stderr.close()
