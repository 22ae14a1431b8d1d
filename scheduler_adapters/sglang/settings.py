"""Reads settings from environment variables, because SGLang passes no options to a transfer backend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from transfer.connector.config import Timing
from transfer.errors import InvalidEngineError

PREFIX = "PAGEWIRE_"
_TIMING = Timing()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Each setting is the environment variable `PAGEWIRE_` plus its name in capitals.

    Attributes:
        secret: as in `WorkerConfig`: "file:PATH", "env:NAME" or the secret itself; plain sockets if empty.
        allowed_peers: addresses, networks and host names of prefill, separated by commas; this host is always allowed.
        lease_s: seconds that prefill keeps pages without a message from decode.
        load_s: seconds after which a read that has not ended fails.
        watch: the endpoint where `pagewire top` may watch our cache, as in `ManagerWatch`; empty for none.
        exchange: the endpoint where peers ask for cached pages; empty if none are lent or asked for.
        lend: the fraction of the pages that peers may hold at the same time; 0 for none.
        ask_s: seconds that peers may take to say which pages of a prompt they have.
    """

    secret: str = ""
    allowed_peers: str = ""
    lease_s: float = _TIMING.lease
    load_s: float = _TIMING.load
    watch: str = ""
    exchange: str = ""
    lend: Annotated[float, Meta(ge=0, le=1)] = 0.25
    ask_s: Annotated[float, Meta(gt=0, le=60)] = 0.05

    @property
    def timing(self) -> Timing:
        """The time limits of a worker."""
        return Timing(lease=self.lease_s, load=self.load_s)


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Returns the settings of this process.

    Raises:
        InvalidEngineError: a value is invalid; the message names its variable.
    """
    found: dict[str, Any] = {
        name: environ[variable]
        for name in Settings.__struct_fields__
        if (variable := f"{PREFIX}{name.upper()}") in environ
    }
    try:
        return msgspec.convert(found, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidEngineError(f"{PREFIX}*: {error}") from error
