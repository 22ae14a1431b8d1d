"""Runs our source and our reader on two hosts of one machine (`tests.hosts.network`), over a link of a given rate.

A bare socket between the same hosts is measured for comparison.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from benchmarks.frame import Row
from benchmarks.peers.environment import PeerError
from benchmarks.rivals.lender import Setting
from tests.hosts.network import network, why_not

_BURST = "72kb"
"""In bytes: a little more than the kernel's largest packet. With a larger bucket, much of 1 MiB would pass unlimited.
"""
_SECRET = "a secret of the benchmark, of enough bytes"  # noqa: S105 - nobody else is on these hosts


def over_link(rate: str, setting: Setting, blocks: Sequence[int], seconds: float) -> list[Row]:
    """The rows of fetches over the link. Each fetch alternates with sending the same number of bytes through a socket.

    Raises:
        PeerError: hosts cannot be created here, or the program on one of them failed.
    """
    if reason := why_not():
        raise PeerError(f"no link of {rate}: {reason}")
    with network("source", "reader") as (source, reader), tempfile.TemporaryFile() as log:
        for host in (source, reader):
            host.shape(rate, _BURST)
        setting = replace(setting, address=source.address, reader=reader.address, secret=_SECRET)
        command = [sys.executable, "-m", "benchmarks.rivals.ours", "--socket", "--seconds", str(seconds)]
        command += ["--setting", msgspec.json.encode(setting).decode(), "--prefix", json.dumps(source.command())]
        process = reader.start([*command, "--blocks", ",".join(map(str, blocks))], {}, log, answers=True)
        printed, _ = process.communicate()
        if process.returncode:
            log.seek(0)
            last = "\n".join(log.read().decode(errors="replace").strip().splitlines()[-5:])
            raise PeerError(
                f"link of {rate}: the measuring program ended with exit status {process.returncode}:\n{last}"
            )
    return [json.loads(line) | {"link": rate} for line in printed.splitlines()]
