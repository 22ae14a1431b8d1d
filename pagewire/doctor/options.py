"""The options of `pagewire doctor`."""

from dataclasses import dataclass
from pathlib import Path

from pagewire.arguments import option, output_file


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """Options of the command line, each validated."""

    json: Path | None = option("FILE", output_file, None, "write the report there, too")
