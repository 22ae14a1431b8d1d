"""The mutants that no test can notice, with the reasons. Each line of `harmless.txt` names one mutant: the file and the
function, the operator, the expressions, and a reason.

`make mutants` reports an entry whose expression no longer occurs in its function. No test fails because of such an
entry.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from tests.mutants.sites import Mutant

LIST = Path(__file__).with_name("harmless.txt")
_BECAUSE = " ## "
ANY = "*"  # An entry with this text matches every change that its operator makes in its function.


@cache
def reasons(file: Path = LIST) -> Mapping[str, str]:
    """Maps the key of each listed mutant to the reason why the mutant is harmless."""
    found: dict[str, str] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            key, parted, reason = line.partition(_BECAUSE)
            if not parted or not reason.strip() or key.count(" | ") < 2:
                raise ValueError(
                    f"{file.name}, line {number}: expected 'file:function | operator | old -> new ## reason'"
                )
            found[key.strip()] = reason.strip()
    return found


def reason_of(mutant: Mutant, known: Mapping[str, str]) -> str:
    """Returns the reason for which a mutant is harmless. The result is empty if the list does not have the mutant."""
    return known.get(mutant.key) or known.get(_any(mutant), "")


def gone(mutants: Iterable[Mutant], known: Mapping[str, str]) -> list[str]:
    """Returns the entries that no longer match any mutant."""
    there = {key for mutant in mutants for key in (mutant.key, _any(mutant))}
    return [key for key in known if key not in there]


def _any(mutant: Mutant) -> str:
    return f"{mutant.path}:{mutant.function} | {mutant.operator} | {ANY}"
