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
        "FILE", input_path, None, "of `pagewire serve`: watch the processes that it names"
    )
    updates: float = option("N", number(0, 20), 2.0, "looks a second", rare=True)
    record: Path | None = option("FILE", output_file, None, "write every look there, to be played back")
    json: Path | None = option("FILE", output_file, None, "write one look at each process there, and end")
    play: Path | None = option("FILE", input_path, None, "play a recording, in place of addresses")
    speed: float = option("X", number(0, 1000), 1.0, "of playing, in seconds a second", rare=True)
    secret: str | None = option("SECRET", plain, None, "of the fleet: file:PATH, env:NAME, or itself")
    keyring: Path | None = option("FILE", input_path, None, "this process's keys, in place of a secret", rare=True)
    web: bool = switch("show it in a browser: prints the address, with a token")
    theme: Literal["auto", "dark", "light"] = option(
        "THEME", str, "auto", "dark, light, or auto: as COLORFGBG says", choices=("auto", "dark", "light"), rare=True
    )
    web_host: str = option(
        "HOST", plain, "127.0.0.1", "where the browser's server listens; it knows no keys", rare=True
    )
    web_port: int = option("PORT", whole(0, 65535), 0, "the same; 0 takes a free one", rare=True)
    token: str | None = option("TOKEN", plain, None, "that a browser must bring; without it, a random one", rare=True)
