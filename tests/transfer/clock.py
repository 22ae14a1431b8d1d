"""A clock that a test advances."""


class Clock:
    """Shows the time `now`, in seconds, which the test changes."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
