"""The options of `pagewire top`."""

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from pagewire.arguments import endpoint, input_path, number, option, output_file, plain, switch, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class TopOptions:
    """The validated options of `pagewire top`."""

    addresses: tuple[str, ...] = option(
        "ADDRESS",
        endpoint,
        MISSING,
        "endpoints of watched processes",
        name="addresses",
        nargs="*",
    )
    address_file: Path | None = option(
        "FILE", input_path, None, "address file of `pagewire serve`: watch its processes"
    )
    updates: float = option("N", number(0, 20), 2.0, "snapshots per second", rare=True)
    record: Path | None = option("FILE", output_file, None, "record every snapshot in this file")
    json: Path | None = option("FILE", output_file, None, "write one snapshot of each process to this file, and end")
    play: Path | None = option("FILE", input_path, None, "play a recording, in place of addresses")
    speed: float = option("X", number(0, 1000), 1.0, "speed of playing, in seconds per second", rare=True)
    secret: str | None = option("SECRET", plain, None, "secret of the fleet: file:PATH, env:NAME or plain text")
    keyring: Path | None = option(
        "FILE", input_path, None, "file with this process's keys, in place of a secret", rare=True
    )
    web: bool = switch("show it in a browser: prints the address, with a token")
    theme: Literal["auto", "dark", "light"] = option(
        "THEME", str, "auto", "dark, light, or auto (by COLORFGBG)", choices=("auto", "dark", "light"), rare=True
    )
    web_host: str = option("HOST", plain, "127.0.0.1", "where the browser's server listens (it has no keys)", rare=True)
    web_port: int = option("PORT", whole(0, 65535), 0, "port of the browser's server; 0 takes a free one", rare=True)
    token: str | None = option(
        "TOKEN", plain, None, "token that a browser must present (default: a random one)", rare=True
    )
