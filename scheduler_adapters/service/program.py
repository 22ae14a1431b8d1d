"""A prefill or decode process: `python -m scheduler_adapters.service.program`, with its settings on standard input.

It ends with its parent from its first moment on: what `scheduler_adapters.service.server` imports takes seconds.
"""

from __future__ import annotations

import sys

from scheduler_adapters.service.parent import die_with_parent


def main() -> int:
    """Run the process; the exit status."""
    die_with_parent()
    from scheduler_adapters.service import server  # noqa: PLC0415  (heavy: torch, nixl)

    return server.main()


if __name__ == "__main__":
    sys.exit(main())
