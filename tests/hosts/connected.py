"""A vLLM engine with our connector as a program on a host: `python -m tests.hosts.connected ROLE ADDRESS FOLDER TP`.

It runs in the environment of the tests of vLLM's schedulers and workers.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tests.vllm_engine.conftest  # noqa: F401 - tells vLLM that its platform is a CPU, before anything else of it
from tests.hosts.network import PEERS
from tests.hosts.told import serve
from tests.vllm_engine.engine import Engine, Shape, expected_tokens

BLOCKS, COUNT = 600, 3
_WITHIN_S = 90.0


class Connected:
    """One of the two engines. A prompt of 3,200 tokens has 200 blocks of 4 KiB in each of two layers, in total 1.6
    MB.
    """

    def __init__(self, role: str, address: str, folder: Path, tp_size: int) -> None:
        options = {
            "host": address, "port": 0, "secret": "env:PAGEWIRE_TEST_SECRET", "allowed_peers": PEERS,
            "kv_lease_duration": 5.0, "load_timeout": 20.0,
        }  # fmt: skip
        shape = Shape(blocks=BLOCKS, tp_size=tp_size, policy="recompute", max_batched=4096, extra=options)
        self.engine = Engine(folder, role, shape, f"{role}-{address}-{time.time_ns()}")

    def prefill(self, name: str, prompt: list[int]) -> Any:
        """Computes a prompt for another engine. Returns the params with which the other engine reads the prompt's
        blocks.
        """
        self.engine.add(name, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        self._until(lambda: self.engine.finish_reason(name))
        return self.engine.params(name)

    def decode(self, name: str, prompt: list[int], params: Any) -> list[Any]:
        """Continues a prompt that another engine has computed. Returns whether the tokens are right. Also returns how
        many tokens were computed here.
        """
        begin = len(self.engine.scheduled)
        self.engine.add(name, prompt, COUNT, params)
        self._until(lambda: self.engine.finish_reason(name))
        computed = sum(step.get(name, 0) for step in self.engine.scheduled[begin:])
        right = self.engine.tokens(name) == expected_tokens(prompt, COUNT, self.engine.shape)
        return [right, computed]

    def held(self) -> int:
        """Returns the number of blocks that are not free."""
        return self.engine.free_at_start - self.engine.free_blocks

    def _until(self, done: Callable[[], object]) -> None:
        end = time.monotonic() + _WITHIN_S
        while not done():
            assert time.monotonic() < end, list(self.engine.scheduler.requests.values())
            self.engine.step()
            time.sleep(0.001)


if __name__ == "__main__":
    role, address, folder, ranks = sys.argv[1:]
    side = Connected(role, address, Path(folder), int(ranks))
    serve(side, side.engine.step, 0.001)
    side.engine.close()
