"""The prompts of the demo: questions that share long prefixes, or the lines of a file."""

from itertools import cycle, islice
from pathlib import Path

import msgspec

from scheduler_adapters.errors import PromptsError

_DOCUMENTS = (
    """The lighthouse at Skerry Point was lit for the first time on a night in November 1868. For forty years the
keepers carried oil up its 214 steps, first whale oil, then paraffin, and turned the lens by a clockwork that had to
be wound every three hours. In 1909 the lamp was changed to a mantle that burned vapour, which gave six times the
light for half the fuel. The keepers' log notes the first night of the new lamp with one word: "Brighter."
Electricity came late, in 1957, by a cable laid across the sound, and with it the clockwork fell silent. The last
keeper left on a spring morning in 1984. Since then a controller in a town ninety kilometres away has watched the
light, and a boat brings a mechanic twice a year, who cleans the lens, checks the batteries, and signs the same log.""",
    """How the bakery plans its day. At two in the morning the night baker feeds the sour dough, weighs what the
orders of the day before ask for, and adds a tenth for the shop. Rye breads go first, because the oven is hottest
then and they need an hour; wheat follows at half past four, rolls at five, and cake when the stones have cooled. A
loaf that is not sold by evening costs the bakery its flour, its heat, and eleven minutes of somebody's work, so
every unsold loaf is written on the board by the door. When the board shows the same bread three days in a row, the
plan gives it a smaller batch. On the eve of a holiday nobody looks at the board: the old ledger tells what was sold
on that day in the years before, and the baker trusts it more than any forecast.""",
    """Notes on the river gauge. The station measures the height of the water every fifteen minutes with a float in
a pipe, and once an hour with radar from the bridge. The two agree to a centimetre in calm weather. In flood they
part: the pipe is slow, and the radar sees the waves. Three rules came out of twenty years of such floods. First,
trust the slower one for the level and the faster one for the trend. Second, a reading that has not moved for two
hours in rain is a blocked pipe and not a calm river. Third, send the warning on the trend and take it back on the
level. The flood of March 2001 broke the first rule: ice had jammed the float, both trends were wrong, and the
warning came from a farmer upstream, who telephoned. His number has been painted on the wall of the station ever
since.""",
    """Minutes of the orchestra's library committee. The library holds 2,300 sets of parts. A set that is lent out
must be back, complete and with pencil marks erased, nine days before the next rehearsal that needs it. Last season
41 sets came back late and 7 came back without a part; in each of those cases it was the second oboe or the harp.
The committee discussed three remedies. To lend copies in place of originals was refused, since most editions do not
allow it. To ask for a deposit was refused as unfriendly. To send the list of missing parts to all players, with
names, was accepted by five votes to two, for one season, as a trial. The librarian asked to note that she had
proposed this in 1998. The next meeting is on the first Tuesday after the spring tour, in the room behind the stage.""",
)
_LONGEST_FILE = 64 << 20  # in bytes; a device file would fill the memory
_QUESTIONS = (
    "What happened first, and when?",
    "Which number in the text is the largest?",
    "Who does the work, and at what hour?",
    "Why was the old way given up?",
    "What would change if nobody wrote anything down?",
    "Sum the text up in one sentence.",
    "Which rule or habit matters most, and why?",
    "What is left open at the end?",
)


def default_prompts(count: int) -> list[str]:
    """Returns `count` prompts: several questions about each of a few documents, in turn."""
    documents = [" ".join(document.split()) for document in _DOCUMENTS]
    prompts: list[str] = []
    for number in range(count):
        turn, which = divmod(number, len(documents))
        round_, question = divmod(turn, len(_QUESTIONS))
        again = f" (asked again, {round_})" if round_ else ""
        prompts.append(f"{documents[which]}\n\nQuestion{again}: {_QUESTIONS[question]}\nAnswer:")
    return prompts


def read_prompts(path: Path) -> list[str]:
    """Returns the prompts of a file. Skips empty lines.

    The file has one prompt per line, or JSON lines, each with a string "prompt".

    The file counts as JSON lines if its first line is a JSON object. A fault raises `PromptsError` with the line and
    the reason.
    """
    where = f"prompts file {str(path)!r}"
    try:
        with path.open("rb") as file:
            data = file.read(_LONGEST_FILE + 1)
        if len(data) > _LONGEST_FILE:
            raise PromptsError(f"{where} is longer than {_LONGEST_FILE:,} bytes")
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise PromptsError(f"{where} cannot be read: {reason}") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise PromptsError(f"{where} contains no prompt")
    if not _is_object(lines[0][1]):
        return [line for _, line in lines]
    return [_prompt_of(f"{where}, line {number}", line) for number, line in lines]


def take(prompts: list[str], count: int | None) -> list[str]:
    """Returns the first `count` prompts, and repeats the prompts if there are fewer. None returns all prompts once."""
    return prompts if count is None else list(islice(cycle(prompts), count))


class _Line(msgspec.Struct):
    prompt: str


def _is_object(line: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _prompt_of(where: str, line: str) -> str:
    try:
        prompt = msgspec.json.decode(line, type=_Line).prompt
    except (msgspec.DecodeError, RecursionError) as error:
        raise PromptsError(f"{where}: {error}") from error
    if not prompt:
        raise PromptsError(f"{where}: the prompt is empty")
    return prompt
