"""What a test tells a program on a host to do.

Each line of standard input is a JSON array, a command and its arguments. Each is answered by a line.
"""

import json
import select
import sys
from collections.abc import Callable


def serve(side: object, idle: Callable[[], object], step_s: float = 0.002) -> None:
    """Do what is said until there is no more; each command is a method of the side, and what it returns is answered."""
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
