"""The failures of pulls: each has a kind, which metrics count, and a message for people.

The code that notices a failure chooses its kind. No code reads the message, so it may be reworded freely.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class FailureKind(StrEnum):
    """The kinds of failures. The value is the label of a metric, except for `CANCELLED`, which is not counted."""

    TIMEOUT = "timeout"
    """The pull took longer than its owner allowed."""
    LEASE_OVER = "lease_over"
    """The lease had ended before its pages were read, or was never granted."""
    HANDSHAKE = "handshake"
    """The source gave no answer, or an unusable one."""
    CHECKS = "checks"
    """Pages differ from their checksums at the source."""
    REFUSED = "refused"
    """The lease does not hold the pages that the request or its block table names, or the source refused to answer."""
    SOURCE_GONE = "source_gone"
    """The source died, was restarted, is silent, or was given up."""
    TRANSPORT = "transport"
    """NIXL failed in a READ, although the source may be alive."""
    SHUTDOWN = "shutdown"
    """This engine was shut down."""
    OTHER = "other"
    """The caller's own pages, tokens or times are invalid, or the error does not come from this package."""
    CANCELLED = "cancelled"
    """The owner gave up the pull."""


class Failure(NamedTuple):
    """Why a pull failed. Metrics count the `kind`. The `text` is reported to the pull's owner and to the source."""

    kind: FailureKind
    text: str
