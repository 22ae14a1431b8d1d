"""A process that calls NIXL's OBJ plugin for `object_io.py`, which kills it when a call takes too long.

The script imports neither our packages nor torch, so that it starts within a second and takes 60 MB. Its arguments are
two inherited descriptors: a socket and a memory file. Each request is a line of JSON, and so is its answer, which is
{"answer": ...} or {"error": "..."}. The process exits when the socket closes, whatever NIXL is doing.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import queue
import socket
import sys
import threading
import time
from typing import Any

os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
_WHEELS = ("nixl_cu12", "nixl_cu13")  # the plugin in the first wheel needs no CUDA library
_POLL_S = 2e-4
_NAME = "objects"


class _Plugin:
    """An agent with NIXL's OBJ plugin, which moves bytes between objects and the shared memory.

    NIXL's exceptions reach the caller.
    """

    def __init__(self, settings: dict[str, str], memory: mmap.mmap) -> None:
        api, self._agent = _make_agent(settings)
        self._start = int(api.np.frombuffer(memory, api.np.uint8).ctypes.data)
        self._agent.register_memory([(self._start, len(memory), 0, "")], "DRAM")

    def exist(self, keys: list[str]) -> list[bool]:
        found = self._agent.query_memory([(0, 0, at, key) for at, key in enumerate(keys)], "OBJ", "OBJ")
        return [one is not None for one in found]

    def write(self, ranges: list[tuple[str, int, int, int]]) -> list[bool]:
        done = self._move("WRITE", ranges)
        if not all(done):
            raise RuntimeError(f"{done.count(False)} of {len(done)} objects could not be written")
        return done

    def read(self, ranges: list[tuple[str, int, int, int]]) -> list[bool]:
        return self._move("READ", ranges)

    def _move(self, operation: str, ranges: list[tuple[str, int, int, int]]) -> list[bool]:
        """Moves all ranges at once, each in a separate transfer, so that one failure affects no other range."""
        agent = self._agent
        objects = agent.register_memory(
            [(0, offset + size, at, key) for at, (key, offset, _, size) in enumerate(ranges)], "OBJ"
        )
        try:
            handles: list[Any] = []
            for at, (_, offset, start, size) in enumerate(ranges):
                here = agent.get_xfer_descs([(self._start + start, size, 0)], "DRAM")
                there = agent.get_xfer_descs([(offset, size, at)], "OBJ")
                handles.append(agent.initialize_xfer(operation, here, there, _NAME))
            states = [self._state(agent.transfer, handle) for handle in handles]
            while "PROC" in states:
                time.sleep(_POLL_S)
                states = [
                    self._state(agent.check_xfer_state, handle) if state == "PROC" else state
                    for handle, state in zip(handles, states, strict=True)
                ]
            for handle in handles:
                handle.release()
            return [state == "DONE" for state in states]
        finally:
            agent.deregister_memory(objects)

    @staticmethod
    def _state(call: Any, handle: Any) -> str:
        try:
            return str(call(handle))
        except Exception:  # noqa: BLE001 - NIXL's errors share no base class
            return "ERR"


def _make_agent(settings: dict[str, str]) -> tuple[Any, Any]:
    """Returns the module of the first NIXL wheel whose plugin loads, and an agent with that plugin."""
    errors: list[str] = []
    for wheel in _WHEELS:
        try:
            api: Any = importlib.import_module(f"{wheel}._api")
            agent = api.nixl_agent(_NAME, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
            agent.create_backend("OBJ", settings)
        except Exception as error:  # noqa: BLE001 - as above; a wheel for another machine raises other errors
            errors.append(f"{wheel}: {type(error).__name__}: {error}")
        else:
            return api, agent
    raise RuntimeError("; ".join(errors))


def _answer(plugin: _Plugin, question: dict[str, Any]) -> list[bool]:
    call = question["call"]
    if call == "exist":
        return plugin.exist(question["keys"])
    return plugin.write(question["ranges"]) if call == "write" else plugin.read(question["ranges"])


def _listen(channel: socket.socket, questions: queue.SimpleQueue[dict[str, Any]]) -> None:
    with channel.makefile("rb") as lines:
        for line in lines:
            questions.put(json.loads(line))
    os._exit(0)  # the parent has exited or has closed the socket, so nothing is left to do


def main() -> None:
    """Answers requests until the socket closes."""
    channel, memory = socket.socket(fileno=int(sys.argv[1])), mmap.mmap(int(sys.argv[2]), 0)
    questions: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, questions), daemon=True).start()
    plugin: _Plugin | None = None
    while True:
        question = questions.get()
        try:
            reply: dict[str, Any] = {"answer": None}
            if plugin is None:  # the first request contains the store's settings
                plugin = _Plugin(question["settings"], memory)
            else:
                reply = {"answer": _answer(plugin, question)}
        except Exception as error:  # noqa: BLE001 - the parent gets the error and decides
            reply = {"error": f"{type(error).__name__}: {error}"}
        channel.sendall(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
