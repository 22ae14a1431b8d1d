"""A cable between hosts, simulated by a process: `python -m tests.hosts.relay DEVICE ...`.

It copies Ethernet frames from each device to the others. It can delay frames, drop some of them, and pause.

Each line of standard input is a JSON array of a command and its arguments. One line of output answers it.
"""

import heapq
import itertools
import json
import random
import select
import socket
import sys
import time
from collections import Counter

ETH_P_ALL = 3
_LONGEST = 1 << 16


class Relay:
    """Delays, drops and forwards frames. `counts` has the number of frames with each outcome."""

    def __init__(self, devices: list[str]) -> None:
        self._ports = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) for _ in devices]
        for port, device in zip(self._ports, devices, strict=True):
            port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
            port.bind((device, ETH_P_ALL))
            port.setblocking(False)
        self._delay_s = self._loss = self._still_until = 0.0
        self._random = random.Random(0)
        self._number = itertools.count()
        self._on_way: list[tuple[float, int, socket.socket, bytes]] = []
        self.counts = Counter[str]()

    def delay(self, seconds: float) -> None:
        """Delays each frame by this time, in each direction."""
        self._delay_s = seconds

    def lose(self, share: float, seed: int) -> None:
        """Drops this fraction of the frames."""
        self._loss, self._random = share, random.Random(seed)

    def pause(self, seconds: float) -> None:
        """Holds all frames back for this time. No frame is lost."""
        self._still_until = time.monotonic() + seconds

    def counted(self) -> Counter[str]:
        return self.counts

    def serve(self) -> None:
        """Carries frames until there are no more commands."""
        while True:
            now = time.monotonic()
            first = max(self._on_way[0][0], self._still_until) if self._on_way else now + 60
            found, _, _ = select.select([sys.stdin, *self._ports], [], [], max(0.0, first - now))
            for port in found:
                if port is sys.stdin:
                    line = sys.stdin.readline()
                    if not line:
                        return
                    name, *arguments = json.loads(line)
                    sys.stdout.write(json.dumps(getattr(self, name)(*arguments)) + "\n")
                    sys.stdout.flush()
                else:
                    self._take(port)
            self._give()

    def _take(self, port: socket.socket) -> None:
        for _ in range(64):
            try:
                frame, where = port.recvfrom(_LONGEST)
            except BlockingIOError:
                return
            if where[2] == socket.PACKET_OUTGOING:  # This process has sent the frame.
                continue
            self.counts["taken"] += 1
            if self._random.random() < self._loss:
                self.counts["lost"] += 1
                continue
            due = time.monotonic() + self._delay_s
            for other in self._ports:
                if other is not port:
                    heapq.heappush(self._on_way, (due, next(self._number), other, frame))

    def _give(self) -> None:
        now = time.monotonic()
        while self._on_way and now >= max(self._on_way[0][0], self._still_until):
            _, _, port, frame = heapq.heappop(self._on_way)
            try:
                port.send(frame)
            except OSError:
                self.counts["refused"] += 1


if __name__ == "__main__":
    relay = Relay(sys.argv[1:])
    sys.stdout.write('["ready"]\n')
    sys.stdout.flush()
    relay.serve()
