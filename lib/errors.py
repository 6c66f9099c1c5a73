"""Errors that are the user's to mend: one clear message, never a traceback."""

from dataclasses import dataclass


class UserError(ValueError):
    """A user's mistake or a fault of the surroundings (a full disk, a cut download).

    The message is complete in itself: field or file and line, value, rule, remedy. Stages print
    it as one line and exit with status 1.
    """


@dataclass(frozen=True)
class Problem:
    """One broken rule of a parameter file, or one piece of advice on it.

    Attributes:
        field: dotted name, such as ``model.num_attention_heads``.
        value: what the file says, as text.
        rule: the rule that it breaks.
        remedy: what to write instead.
        where: ``params.yaml:LINE`` where it is known.
        source: what says so, for programs: the rule's function, or the type of the section.
    """

    field: str
    value: str
    rule: str
    remedy: str
    where: str = ""
    source: str = ""

    def __str__(self) -> str:
        """One line: where, field = value: rule; remedy."""
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.field} = {self.value}: {self.rule}; {self.remedy}"


class InvalidParams(UserError):
    """Every broken rule of a parameter file at once."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"{count} in the parameters:\n{lines}")
