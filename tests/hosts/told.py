"""Carries out the commands of a test in a program on a host.

Each line of standard input is a JSON array of a command and its arguments. One line answers it.
"""

import json
import select
import sys
from collections.abc import Callable


def serve(side: object, idle: Callable[[], object], step_s: float = 0.002) -> None:
    """Carries out commands until the input ends. Each command is a method of `side`, and its result is the answer."""
    say(["ready"])
    while True:
        idle()
        if select.select([sys.stdin], [], [], step_s)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            name, *arguments = json.loads(line)
            say(getattr(side, name)(*arguments))


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
