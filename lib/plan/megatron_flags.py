"""The flags of one Megatron-LM run, and what becomes of each: the ground of the import.

The modules beside this one read ``Arguments`` and put ``Setting``s into an ``Importing``; a flag
that none of them reads is looked up in ``lib.plan.megatron_flag_table``.
"""

import fnmatch
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from lib.errors import Problem
from lib.plan.megatron_flag_table import CHANGES_NOTHING, CHANGES_RESULT, RENAMED
from lib.plan.megatron_script import Flag, Launch

REQUIRED = "required"
_SAME_VALUE = {
    old: new[2:] for old, new in RENAMED.items() if new.startswith("--") and " " not in new
}
_SAME_VALUE["persistent-save-interval"] = "save-interval"
# Under these names today's flag means something else, or the importing modules tell them apart.
_READ_APART = {"glu-activation", "num-attention-heads-kv", "num-key-value-heads", "use-rms-norm"}


@dataclass(frozen=True)
class Setting:
    """A field that the import writes.

    Attributes:
        field: dotted name in params.yaml.
        value: what is written.
        flags: the flags that it comes from, as written; empty where it is Megatron's default.
        why: how the value comes about, where that is not plain.
    """

    field: str
    value: object
    flags: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True)
class Without:
    """A flag without a counterpart: as written, why, and whether the run is another one for it."""

    flag: str
    why: str
    changes_result: bool


def show_flag(flag: Flag) -> str:
    """A flag and its values as one text."""
    return " ".join((flag.spelled, *flag.values))


def is_unknown(text: str) -> bool:
    """Whether a value is not in the script: a variable from outside, or a place to fill in."""
    return "$" in text or "`" in text or text.startswith("<")


def reason_without(name: str) -> tuple[str, bool] | None:
    """Why a flag has no counterpart, and whether it changes the result; None: not known."""
    for table, changes in ((CHANGES_RESULT, True), (CHANGES_NOTHING, False)):
        for why, names in table.items():
            if name in names.split():
                return why, changes
    for table, changes in ((CHANGES_RESULT, True), (CHANGES_NOTHING, False)):
        for why, names in table.items():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in names.split()):
                return why, changes
    return None


class Arguments:
    """The flags by name; of one that is given twice the last counts, as in Python's argparse."""

    def __init__(self, flags: Sequence[Flag]) -> None:
        self.given: dict[str, Flag] = {}
        for flag in flags:
            name = flag.name if flag.name in _READ_APART else _SAME_VALUE.get(flag.name, flag.name)
            self.given[name] = flag
        self.read: set[str] = set()
        self.taken: dict[str, int] = {}
        self.asked: set[str] = set()
        self.problems: list[Problem] = []
        self.unknown_values: list[str] = []

    def has(self, name: str) -> bool:
        """Whether a flag is given."""
        self.asked.add(name)
        if name in self.given:
            self.read.add(name)
        return name in self.given

    def values(self, name: str) -> tuple[str, ...]:
        """All values of a flag; none where it is not given."""
        values = self.given[name].values if self.has(name) else ()
        self.taken[name] = len(values)
        return values

    def _first(self, name: str) -> tuple[str, ...]:
        """The first value of a flag that takes one."""
        values = self.values(name)[:1]
        self.taken[name] = len(values)
        return values

    def text(self, name: str) -> str | None:
        """The one value of a flag as text."""
        values = self._first(name)
        if not values:
            if self.has(name):
                self._refuse(name, "needs a value", "write one after it")
            return None
        if is_unknown(values[0]):
            self.unknown_values.append(show_flag(self.given[name]))
        return values[0]

    def number(self, name: str) -> float | None:
        """The one value of a flag as a finite number."""
        values = self._first(name)
        if not values:
            self._no_value(name)
            return None
        try:
            number = float(values[0])
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            self._refuse(name, *_no_number(values[0], "a number"))
            return None
        return number

    def whole(self, name: str) -> int | None:
        """The one value of a flag as a whole number; ``1_000`` and ``1e3`` are such."""
        values = self._first(name)
        try:
            if not values:
                self._no_value(name)
                return None
            try:
                return int(values[0])
            except ValueError:
                number = float(values[0])
                if not number.is_integer():
                    raise
                return int(number)
        except (ValueError, OverflowError):
            self._refuse(name, *_no_number(values[0], "a whole number"))
            return None

    def wholes(self, name: str) -> list[int]:
        """All values of a flag as whole numbers."""
        found: list[int] = []
        for value in self.values(name):
            try:
                found.append(int(value))
            except ValueError:
                self._refuse(name, *_no_number(value, "whole numbers"))
        return found

    def finish(self) -> None:
        """Looks at the words that no flag takes: a variable of more flags, or a mistake."""
        for name, flag in self.given.items():
            left = flag.values[self.taken.get(name, 0 if name in self.read else 1) :]
            self.unknown_values += [f"{word} after {flag.spelled}" for word in left if "$" in word]
            if name in self.read and (stray := [word for word in left if not is_unknown(word)]):
                self._refuse(name, f"does not take {' '.join(stray)}", "remove it, or quote a list")
        self.problems = list(dict.fromkeys(self.problems))

    def _no_value(self, name: str) -> None:
        if self.has(name):
            self._refuse(name, "needs a value", "write one after it")

    def _refuse(self, name: str, rule: str, remedy: str) -> None:
        flag = self.given[name]
        self.problems.append(Problem(flag.spelled, " ".join(flag.values) or "(none)", rule, remedy))


def _no_number(value: str, kind: str) -> tuple[str, str]:
    """Rule and remedy."""
    if is_unknown(value):
        found = re.search(r"\$\{?(\w+)", value)
        remedy = f"give it: --set {found.group(1)}=VALUE" if found else "write it into the script"
        return "the script does not say this value", remedy
    return f"must be {kind}", f"write {kind}"


@dataclass
class Importing:
    """An import in the making.

    Attributes:
        arguments: the flags.
        launch: the run that they are of.
        settings: what is written, in order; of two of one field the later counts.
        agreed: flags that say what is so here anyway, with a word.
        without: flags whose value has no counterpart.
        notes: what a person should know.
        problems: sums that do not add up.
    """

    arguments: Arguments
    launch: Launch
    settings: list[Setting] = field(default_factory=list)
    agreed: dict[str, str] = field(default_factory=dict)
    without: list[Without] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def put(self, name: str, value: object, *flags: str, why: str = "") -> None:
        """Writes a field; ``flags`` are names of which those that are given are its source."""
        given = [self.arguments.given[flag] for flag in flags if self.arguments.has(flag)]
        self.settings.append(Setting(name, value, tuple(map(show_flag, given)), why))

    def put_default(self, name: str, value: object, flag: str) -> None:
        """Writes a field that no flag sets: Megatron's default of ``flag``."""
        self.settings.append(Setting(name, value, (), f"Megatron's default of --{flag}"))

    def agree(self, flag: str, word: str) -> None:
        """Notes that a flag says what is so here."""
        if self.arguments.has(flag):
            self.agreed[flag] = word

    def leave(self, flag: str, why: str, *, changes_result: bool = True) -> None:
        """Notes that a flag's value has no counterpart."""
        if self.arguments.has(flag):
            self.arguments.values(flag)
            self.without.append(Without(show_flag(self.arguments.given[flag]), why, changes_result))
            self.agreed.pop(flag, None)
            self.left.add(flag)

    def refuse(self, flag: str, rule: str, remedy: str) -> None:
        """Notes a sum that does not add up."""
        given = self.arguments.given.get(flag)
        value = "(not given)" if given is None else " ".join(given.values) or "(given)"
        spelled = f"--{flag}" if given is None else given.spelled
        self.problems.append(Problem(spelled, value, rule, remedy))

    def value(self, name: str) -> object:
        """What is written into a field so far."""
        return next((each.value for each in reversed(self.settings) if each.field == name), None)

    left: set[str] = field(default_factory=set)
    """Names of the flags of ``without``."""
