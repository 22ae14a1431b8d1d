"""The options of `pagewire doctor`."""

from dataclasses import dataclass
from pathlib import Path

from pagewire.arguments import option, output_file


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorOptions:
    """The validated options of `pagewire doctor`."""

    json: Path | None = option("FILE", output_file, None, "also write the report to this file")
