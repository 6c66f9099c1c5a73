"""Follows a shell script as far as its text tells, and gives the commands that it would start.

Nothing is executed. Assignments, arrays, functions, ``if``, ``case`` and ``[ ... ]`` are followed;
of ``for`` the first turn is taken, of ``while`` none. A condition that only a run could decide
(does a file exist?) counts as false.
"""

import fnmatch
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from lib.plan.shell_expansion import Environment, arithmetic, expand, expand_text, without_unknown
from lib.plan.shell_words import Token, tokenize

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_SHELLS = {"bash", "sh", "zsh"}
_DEEPEST = 20

Status = bool | None
"""Whether a command succeeds, where that can be told."""


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


def follow_script(text: str, variables: Mapping[str, str]) -> Followed:
    """Follows a script whose environment has these variables; positional ones are "1", "2", ...

    Raises:
        UserError: a quote or bracket that never ends.
    """
    environment = Environment(dict(variables))
    shell = _Shell(environment)
    shell.run(tokenize(text))
    return Followed(tuple(shell.commands), environment, tuple(dict.fromkeys(shell.notes)))


class _Shell:
    """Walks through tokens."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
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
        while self.place < len(tokens):
            status = self._list((), active=True)
            self.place += 1  # a closing word that nothing opened
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
        line = self.tokens[self.place - 1].line
        name, words = self._peek(), list[str]()
        self.place += 1
        if self._take("in"):
            while (token := self._peek()) is not None and token.kind == "word":
                words += expand(token.text, self.environment) if active else []
                self.place += 1
        while self._take("\n", ";"):
            pass
        self._take("do")
        start = self.place
        if active and words and name is not None:
            self.environment.add(name.text, words[0], append=False)
        self._list({"done"}, active=active and bool(words))
        if active and len(words) != 1:
            self._left_out(
                line, start, f"of this loop {'the first turn' if words else 'none'} is taken"
            )
        self._take("done")
        return None

    def _while(self, active: bool) -> Status:
        self._list({"do"}, active=False)
        self._take("do")
        self._list({"done"}, active=False)
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
            return _Test([self._operand(each) for each in rest[1:]], self.environment).result()
        words = [word for token in rest for word in expand(token.text, self.environment)]
        return self._start(words, rest[0].line) if words else None

    def _operand(self, token: Token) -> str:
        return without_unknown(expand_text(token.text, self.environment))

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
            value = expand_text(found.group(3), self.environment)
            self.environment.add(found.group(1), value, append=found.group(2) == "+=")
        return len(tokens)

    def _start(self, words: list[str], line: int) -> Status:
        name = PurePosixPath(words[0]).name
        if name in ("true", "false", ":"):
            return name != "false"
        if name == "eval":
            return self._inner([], " ".join(words[1:]), line)
        if name in ("source", "."):
            self.notes.append(f"line {line}: {' '.join(words)} is not read")
            return None
        if name in self.functions:
            for number, word in enumerate(words[1:], 1):
                self.environment.add(str(number), word, append=False)
            return self.run(self.functions[name])
        shells = [at for at, word in enumerate(words) if PurePosixPath(word).name in _SHELLS]
        for at in shells:
            # bash -c TEXT, with options such as -l before it, or joined as -lc
            for option in range(at + 1, len(words) - 1):
                if re.fullmatch(r"-[a-z]*c", words[option]):
                    return self._inner(words[:at], words[option + 1], line)
        self.commands.append(Command(tuple(words), line, self.outer))
        return None

    def _inner(self, outer: list[str], text: str, line: int) -> Status:
        """Follows a script that is an argument."""
        before, self.outer = self.outer, (*self.outer, *outer)
        status = self.run([replace(token, line=line) for token in tokenize(text)])
        self.outer = before
        return status


class _Test:
    """``[ ... ]`` and ``[[ ... ]]``, whose words are expanded."""

    def __init__(self, words: list[str], environment: Environment) -> None:
        self.words = [word for word in words if word not in ("]", "]]", "(", ")")]
        self.environment = environment

    def result(self) -> Status:
        """Whether the condition holds; None where only a run could tell."""
        return self._or(self.words)

    def _or(self, words: list[str]) -> Status:
        parts = [self._and(part) for part in _split(words, ("||", "-o"))]
        if any(part is True for part in parts):
            return True
        return None if None in parts else False

    def _and(self, words: list[str]) -> Status:
        parts = [self._single(part) for part in _split(words, ("&&", "-a"))]
        if any(part is False for part in parts):
            return False
        return None if None in parts else True

    def _single(self, words: list[str]) -> Status:
        if words[:1] == ["!"]:
            status = self._single(words[1:])
            return status if status is None else not status
        if len(words) <= 1:
            return bool("".join(words))
        if len(words) == 2:
            empty = {"-n": False, "-z": True}.get(words[0])
            return None if empty is None else (words[1] == "") == empty
        return self._compare(words[0], words[1], words[-1])

    def _compare(self, left: str, sign: str, right: str) -> Status:
        if sign in ("=", "==", "!="):
            return fnmatch.fnmatchcase(left, right) == (sign != "!=")
        symbol = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
        if sign not in symbol:
            return None
        number = arithmetic(f"({left}) {symbol[sign]} ({right})", self.environment)
        return None if number is None else number != 0


def _split(words: list[str], at: tuple[str, ...]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word in at:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts
