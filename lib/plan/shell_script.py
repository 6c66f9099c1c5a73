"""Follows a shell script as far as its text tells, and gives the commands that it would start.

Nothing is executed. Assignments, arrays, functions, loops, ``if``, ``case`` and ``[ ... ]`` are
followed. A condition that only a run could decide (does a file exist?) counts as false.
"""

import fnmatch
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from lib.errors import UserError
from lib.plan.shell_condition import Condition, Status
from lib.plan.shell_expansion import Environment, arithmetic, expand, expand_text, without_unknown
from lib.plan.shell_words import Token, tokenize

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]+\])?(\+?=)(.*)", re.DOTALL)
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_SHELLS = {"bash", "sh", "zsh"}
_DEEPEST = 20
_MOST_TURNS = 300

Source = Callable[[str], str | None]
"""Gives the text of a file that a script names after ``source``; None where it is not there."""


class _LeaveTurnError(Exception):
    """``break`` or ``continue`` in a loop; its argument is the word."""


@dataclass(frozen=True)
class Command:
    """A command with its variables put in.

    Attributes:
        words: its words.
        line: where it is in the script.
        outer: the words of commands around it, such as ``srun`` of ``srun bash -c "..."``.
    """

    words: tuple[str, ...]
    line: int
    outer: tuple[str, ...] = ()


@dataclass(frozen=True)
class Followed:
    """What a script does, as far as its text tells.

    Attributes:
        commands: in order.
        environment: the variables at the end.
        notes: where the script was not followed although that may matter.
    """

    commands: tuple[Command, ...]
    environment: Environment
    notes: tuple[str, ...]


def follow_script(
    text: str, variables: Mapping[str, str], source: Source = lambda _name: None
) -> Followed:
    """Follows a script whose environment has these variables; positional ones are "1", "2", ...

    Raises:
        UserError: a quote or bracket that never ends.
    """
    environment = Environment(dict(variables))
    shell = _Shell(environment, source)
    shell.run(tokenize(text))
    return Followed(tuple(shell.commands), environment, tuple(dict.fromkeys(shell.notes)))


class _Shell:
    """Walks through tokens."""

    def __init__(self, environment: Environment, source: Source) -> None:
        self.environment = environment
        self.source = source
        self.turns = 0
        self.loops = 0  # around the place
        self.commands: list[Command] = []
        self.notes: list[str] = []
        self.functions: dict[str, list[Token]] = {}
        self.tokens: list[Token] = []
        self.place = 0
        self.depth = 0
        self.outer: tuple[str, ...] = ()

    def run(self, tokens: list[Token]) -> Status:
        """Follows all of a list of tokens."""
        if self.depth >= _DEEPEST:
            return None
        before = self.tokens, self.place
        self.tokens, self.place, self.depth = tokens, 0, self.depth + 1
        status: Status = None
        try:
            while self.place < len(tokens):
                status = self._list((), active=True)
                self.place += 1  # a closing word that nothing opened
        finally:
            self.tokens, self.place = before
            self.depth -= 1
        return status

    # ---- the grammar

    def _peek(self) -> Token | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def _sees(self, *texts: str) -> bool:
        token = self._peek()
        return token is not None and token.kind != "array" and token.text in texts

    def _take(self, *texts: str) -> bool:
        """Steps over one of these words or operators."""
        found = self._sees(*texts)
        self.place += found
        return found

    def _list(self, stops: Collection[str], *, active: bool) -> Status:
        """Commands up to one of the closing words, which is left; the last one's status."""
        status: Status = None
        while True:
            while self._take("\n", ";", "&"):
                pass
            if self._peek() is None or self._sees(*stops) or self._sees(")", ";;", "}"):
                return status
            before = self.place
            status = self._chain(active=active)
            if self.place == before:
                return status

    def _chain(self, *, active: bool) -> Status:
        """Commands joined by && and ||."""
        status = self._pipe(active=active)
        while self._sees("&&", "||"):
            runs = status is not False if self._take("&&") else self._take("||") and status is False
            while self._take("\n"):
                pass
            following = self._pipe(active=active and runs)
            status = following if runs else status
        return status

    def _pipe(self, *, active: bool) -> Status:
        negated = self._take("!")
        status = self._command(active=active)
        while self._take("|", "|&"):
            self._command(active=active)
            status = None
        return not status if negated and status is not None else status

    def _command(self, *, active: bool) -> Status:
        compound: dict[str, Callable[[bool], Status]] = {
            "if": self._if,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "{": self._group,
            "(": self._group,
            "function": self._function,
        }
        token = self._peek()
        if token is not None and token.kind != "array" and token.text in compound:
            self.place += 1
            return compound[token.text](active)
        following = self.tokens[self.place + 1 : self.place + 3]
        if len(following) == 2 and all(
            each.is_operator(text) for each, text in zip(following, "()", strict=True)
        ):
            return self._function(active)
        return self._simple(active=active)

    def _if(self, active: bool) -> Status:
        line = self.tokens[self.place - 1].line
        status = self._list({"then"}, active=active)
        self._take("then")
        start = self.place
        self._list({"elif", "else", "fi"}, active=active and status is True)
        if active and status is None:
            self._left_out(line, start, "this condition is only known in a run; taken as false")
        otherwise = active and status is not True
        if self._take("elif"):
            return self._if(otherwise)
        if self._take("else"):
            self._list({"fi"}, active=otherwise)
        self._take("fi")
        return None

    def _left_out(self, line: int, start: int, what: str) -> None:
        """Notes that a part is left out, if flags are in it."""
        part = self.tokens[start : self.place]
        if any("--" in text for token in part for text in (token.text, *token.words)):
            self.notes.append(f"line {line}: {what}")

    def _for(self, active: bool) -> Status:
        token, words = self._peek(), list[str]()
        name = token.text if token else ""
        self.place += 1
        if self._take("in"):
            while (token := self._peek()) is not None and token.kind == "word":
                words += expand(token.text, self.environment) if active else []
                self.place += 1
        else:
            words = self.environment.positions
        while self._take("\n", ";"):
            pass
        self._take("do")
        start = self.place
        for word in words if active else []:
            self.place = start
            self.environment.add(name, word, append=False)
            if not self._turn():
                break
        self.place = start
        self._list({"done"}, active=False)
        self._take("done")
        return None

    def _turn(self) -> bool:
        """Follows a loop's body once; whether there is a next turn."""
        self.turns += 1
        if self.turns > _MOST_TURNS:
            self.notes.append(f"loops are left after {_MOST_TURNS} turns")
            return False
        self.loops += 1
        try:
            self._list({"done"}, active=True)
        except _LeaveTurnError as leaving:
            return leaving.args == ("continue",)
        finally:
            self.loops -= 1
        return True

    def _while(self, active: bool) -> Status:
        opening = self.tokens[self.place - 1]
        condition, goes_on = self.place, opening.text == "while"
        while True:
            self.place = condition
            status = self._list({"do"}, active=active)
            self._take("do")
            start = self.place
            if not active or status is not goes_on or not self._turn():
                break
        self.place = start
        self._list({"done"}, active=False)
        if active and status is None:
            self._left_out(opening.line, start, "when this loop ends is only known in a run")
        self._take("done")
        return None

    def _case(self, active: bool) -> Status:
        word = self._peek()
        subject = expand_text(word.text, self.environment) if word else ""
        self.place += 1
        while self._take("\n", "in"):
            pass
        is_open = active
        while self._peek() is not None and not self._sees("esac"):
            self._take("(")
            fits = False
            while (token := self._peek()) is not None and not token.is_operator(")"):
                pattern = expand_text(token.text, self.environment)
                fits |= token.kind == "word" and fnmatch.fnmatchcase(subject, pattern)
                self.place += 1
            self._take(")")
            self._list({"esac"}, active=is_open and fits)
            is_open = is_open and not fits
            while self._take("\n", ";;"):
                pass
        self._take("esac")
        return None

    def _group(self, active: bool) -> Status:
        status = self._list((), active=active)
        self._take("}", ")")
        return status

    def _function(self, active: bool) -> Status:
        name = self._peek()
        self.place += 1
        while self._take("(", ")", "\n"):
            pass
        start = self.place
        self._command(active=False)
        if active and name is not None:  # else the script breaks off
            self.functions[name.text] = self.tokens[start : self.place]
        return None

    # ---- simple commands

    def _simple(self, *, active: bool) -> Status:
        tokens: list[Token] = []
        while (token := self._peek()) is not None:
            in_test = bool(tokens) and tokens[0].text == "[["
            if token.kind == "operator" and not (in_test and token.text != "\n"):
                break
            tokens.append(token)
            self.place += 1
            if in_test and token.text == "]]":
                break
        return self._execute(tokens) if active and tokens else None

    def _execute(self, tokens: Sequence[Token]) -> Status:
        count = self._assign(tokens)
        rest = tokens[count:]
        if not rest:
            return True
        first = rest[0].text
        if first in _DECLARING:
            declared = [token for token in rest[1:] if not token.text.startswith("-")]
            while declared:
                declared = declared[self._assign(declared) or 1 :]
            return True
        if first.startswith("(("):
            number = arithmetic(first[2:-2], self.environment)
            return None if number is None else number != 0
        if first in ("[", "[[", "test"):
            operands = [expand_text(each.text, self.environment) for each in rest[1:]]
            return Condition(list(map(without_unknown, operands)), self.environment).result()
        words = [word for token in rest for word in expand(token.text, self.environment)]
        return self._start(words, rest[0].line) if words else None

    def _assign(self, tokens: Sequence[Token]) -> int:
        """Carries out the assignments at the beginning; how many there are."""
        for count, token in enumerate(tokens):
            if token.kind == "array":
                name, sign = token.text.rstrip("+="), token.text.lstrip("_").endswith("+=")
                items = [word for raw in token.words for word in expand(raw, self.environment)]
                self.environment.add(name, items, append=sign)
                continue
            found = _ASSIGNMENT.fullmatch(token.text) if token.kind == "word" else None
            if found is None:
                return count
            name, index, sign, value = found.groups()
            value = expand_text(f"{index}={value}" if index else value, self.environment)
            entry = [value] if index else value
            self.environment.add(name, entry, append=bool(index) or sign == "+=")
        return len(tokens)

    def _start(self, words: list[str], line: int) -> Status:
        name = words[0] if words[0] == "." else PurePosixPath(words[0]).name
        if name in ("true", "false", ":"):
            return name != "false"
        if name in ("break", "continue") and self.loops:
            raise _LeaveTurnError(name)
        if name in self.functions:
            return self._call(self.functions[name], words[1:])
        builtins: dict[str, Callable[[list[str], int], Status]] = {
            "eval": lambda words, line: self._inner([], " ".join(words), line),
            "shift": self._shift,
            "source": self._source,
            ".": self._source,
        }
        if name in builtins:
            return builtins[name](words[1:], line)
        for at in [at for at, word in enumerate(words) if PurePosixPath(word).name in _SHELLS]:
            # bash -c TEXT, with options such as -l before it, or joined as -lc
            for option in range(at + 1, len(words) - 1):
                if re.fullmatch(r"-[a-z]*c", words[option]):
                    return self._inner(words[:at], words[option + 1], line)
        self.commands.append(Command(tuple(words), line, self.outer))
        return None

    def _call(self, body: list[Token], arguments: list[str]) -> Status:
        before, self.environment.positions = self.environment.positions, arguments
        try:
            return self.run(body)
        finally:
            self.environment.positions = before

    def _shift(self, words: list[str], _line: int) -> Status:
        count = arithmetic("".join(words) or "1", self.environment)
        self.environment.positions = self.environment.positions[count or 0 :]
        return True

    def _source(self, words: list[str], line: int) -> Status:
        """Follows a script that is in another file."""
        text = self.source(words[0]) if words else None
        why = "is not beside the script, so it is not read"
        try:
            if text is not None:
                return self._inner([], text, line)
        except UserError as error:
            why = f"is not read: {error}"
        self.notes.append(f"line {line}: the file {' '.join(words)} {why}")
        return None

    def _inner(self, outer: list[str], text: str, line: int) -> Status:
        """Follows a script that is an argument."""
        tokens = [replace(token, line=line) for token in tokenize(text)]
        before, self.outer = self.outer, (*self.outer, *outer)
        try:
            return self.run(tokens)
        finally:
            self.outer = before
