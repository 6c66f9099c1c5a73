r"""Values of a shell's variables put into its words, without running anything.

What only a run could tell, ``$(hostname)`` or a variable that the script never sets, stays as it
is written, or as ``$(...)``; a value with a ``$`` in it is therefore not known.
"""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from lib.plan.shell_arithmetic import evaluate

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]")
_BRACED = re.compile(
    r"(?P<count>#?)(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#])(?:\[(?P<index>[^\]]+)\])?(?P<rest>.*)",
    re.DOTALL,
)
_DEFAULT = re.compile(r"(:?)([-=+?])(.*)", re.DOTALL)
_KEY = re.compile(r"^\[[^\]]+\]=")
_BRACE = re.compile(r"(?<!\$)\{(?:(-?\d+)\.\.(-?\d+)|([^{}\s\"']*,[^{}\s\"']*))\}")
_ALL_ITEMS = re.compile(r'\$(?:@|\{@\}|\{\w+\[@\]\})"')
_UNKNOWN = re.compile(r"\$\{[^}]*\}|\$\w+|\$\(.*?\)+|`[^`]*`", re.DOTALL)
_OUTPUT = "$(...)"  # of a command, which is not known
_MOST_WORDS = 10_000  # that braces may make of one

Value = str | list[str]


@dataclass
class Environment:
    """The variables of a script: texts, and lists for arrays."""

    variables: dict[str, Value] = field(default_factory=dict)

    def text(self, name: str) -> str | None:
        """A variable's value as ``$name`` has it; None where it was never set."""
        value = self.variables.get(name)
        if isinstance(value, list):
            return value[0] if value else ""
        return value

    def items(self, name: str) -> list[str] | None:
        """The entries of an array."""
        value = self.positions if name in ("@", "*") else self.variables.get(name)
        return [value] if isinstance(value, str) else value

    @property
    def positions(self) -> list[str]:
        """The positional parameters, ``$1`` and on."""
        found: list[str] = []
        while (value := self.text(str(len(found) + 1))) is not None:
            found.append(value)
        return found

    @positions.setter
    def positions(self, values: Sequence[str]) -> None:
        for number in range(1, len(self.positions) + 1):
            del self.variables[str(number)]
        self.variables |= {str(number): value for number, value in enumerate(values, 1)}

    def add(self, name: str, value: Value, *, append: bool) -> None:
        """Sets a variable, or with ``append`` adds to it, as += does."""
        old = self.variables.get(name)
        if append and isinstance(value, list):
            self.variables[name] = [*(self.items(name) or []), *value]
        elif append and isinstance(old, str) and isinstance(value, str):
            self.variables[name] = old + value
        else:
            self.variables[name] = value


def expand(raw: str, environment: Environment) -> list[str]:
    """The words that a raw word becomes: none, one, or more where a value has blanks."""
    fields = _Fields()
    for word in _braces(raw):
        fields.is_open = False
        _Expansion(word, environment, fields).run(quoted=False)
    return fields.words


def _braces(raw: str) -> list[str]:
    """``x{1..3}`` and ``x{a,b}`` written out; a word with quotes before one stays."""
    found = _BRACE.search(raw)
    before = raw[: found.start()] if found else ""
    is_inside = before.count("{") > before.count("}") or before.count("(") > before.count(")")
    if found is None or is_inside or {"'", '"', "\\", "`"} & set(before):
        return [raw]
    first, last, listed = found.groups()
    words = listed.split(",") if listed else [first]
    if listed is None:
        step = 1 if int(last) >= int(first) else -1
        numbers = range(int(first), int(last) + step, step)
        is_padded = any(re.match(r"-?0\d", each) for each in (first, last))
        width = max(len(first), len(last)) if is_padded else 0
        words = [f"{number:0{width}}" for number in numbers[: _MOST_WORDS + 1]]
    tails = _braces(raw[found.end() :])
    if len(words) * len(tails) > _MOST_WORDS:
        return [raw]
    return [before + word + tail for word in words for tail in tails]


def expand_text(raw: str, environment: Environment) -> str:
    """A raw word as one text, as in an assignment."""
    fields = _Fields(splits=False)
    _Expansion(raw, environment, fields).run(quoted=False)
    return " ".join(fields.words)


def without_unknown(text: str) -> str:
    """A text as it is where what is not known is empty."""
    return _UNKNOWN.sub("", text)


class _Fields:
    """Words in the making."""

    def __init__(self, *, splits: bool = True) -> None:
        self.words: list[str] = []
        self.is_open = False
        self.splits = splits

    def add(self, text: str) -> None:
        if not self.is_open:
            self.words.append("")
            self.is_open = True
        self.words[-1] += text

    def add_value(self, text: str, *, quoted: bool) -> None:
        """A variable's value, which outside quotes is cut at its blanks."""
        if quoted or not self.splits:
            self.add(text)
            return
        for part in re.findall(r"\s+|<[A-Za-z][^<>\n]*>\S*|\S+", text):
            if part.isspace():
                self.is_open = False
            else:
                self.add(part)

    def add_items(self, items: list[str], *, quoted: bool) -> None:
        for number, item in enumerate(items):
            if number:
                if self.splits:
                    self.is_open = False
                else:
                    self.add(" ")
            self.add_value(item, quoted=quoted)


class _Expansion:
    """One raw word being expanded."""

    def __init__(
        self, raw: str, environment: Environment, fields: _Fields, *, is_value: bool = False
    ) -> None:
        self.raw, self.environment, self.fields = raw, environment, fields
        self.is_value = is_value  # so that its own blanks part words
        self.place = 0

    def run(self, *, quoted: bool) -> None:
        """Expands up to the end, or to the closing double quote."""
        while self.place < len(self.raw):
            first = self.raw[self.place]
            self.place += 1
            if first == '"' and quoted:
                return
            if first == '"':
                if not _ALL_ITEMS.match(self.raw, self.place):
                    self.fields.add("")  # a word even if nothing is in it
                self.run(quoted=True)
            elif first == "'" and not quoted:
                end = self.raw.find("'", self.place)
                end = len(self.raw) if end < 0 else end
                self.fields.add(self.raw[self.place : end])
                self.place = end + 1
            elif first == "\\":
                self._escape(quoted=quoted)
            elif first in "$`":
                self._value(first, quoted=quoted)
            elif first.isspace() and self.is_value and not quoted:
                self.fields.add_value(first, quoted=False)
            else:
                self.fields.add(first)

    def _escape(self, *, quoted: bool) -> None:
        following = self.raw[self.place : self.place + 1]
        self.place += 1
        if following == "\n":
            return
        keeps = quoted and following not in ("$", "`", '"', "\\")
        self.fields.add("\\" + following if keeps else following)

    def _value(self, first: str, *, quoted: bool) -> None:
        if first == "`":
            end = self.raw.find("`", self.place)
            self.place = len(self.raw) if end < 0 else end + 1
            self.fields.add(_OUTPUT)
        elif self.raw.startswith("((", self.place):
            number = arithmetic(self._bracketed("(", ")")[2:-2], self.environment)
            self.fields.add(_OUTPUT if number is None else str(number))
        elif self.raw.startswith("(", self.place):
            self._bracketed("(", ")")
            self.fields.add(_OUTPUT)
        elif self.raw.startswith("{", self.place):
            self._parameter(self._bracketed("{", "}")[1:-1], quoted=quoted)
        elif found := _NAME.match(self.raw, self.place):
            self.place = found.end()
            self._parameter(found.group(), quoted=quoted)
        else:
            self.fields.add("$")

    def _bracketed(self, opening: str, closing: str) -> str:
        depth, start = 0, self.place
        while self.place < len(self.raw):
            letter = self.raw[self.place]
            depth += (letter == opening) - (letter == closing)
            self.place += 1
            if depth == 0:
                break
        return self.raw[start : self.place]

    def _parameter(self, inside: str, *, quoted: bool) -> None:
        """Puts in ``${inside}``."""
        found = _BRACED.fullmatch(inside)
        if found is None:
            self.fields.add_value(_special(inside), quoted=quoted)
            return
        name, index, rest = found.group("name", "index", "rest")
        items = [_KEY.sub("", item) for item in self.environment.items(name) or []]
        if found.group("count"):
            self.fields.add(str(len(items) if index else len("".join(items))))
        elif name == "#":
            self.fields.add(str(len(self.environment.positions)))
        elif "*" in (name, index) and quoted:
            self.fields.add(" ".join(items))
        elif name in ("@", "*") or index in ("@", "*"):
            self.fields.add_items(items, quoted=quoted)
        elif (default := self._default(name, rest)) is not None and not quoted:
            _Expansion(default, self.environment, self.fields, is_value=True).run(quoted=False)
        else:
            self.fields.add_value(self._text(name, index, rest), quoted=quoted)

    def _default(self, name: str, rest: str) -> str | None:
        """The raw text that stands for a variable; None where the variable itself does."""
        found, value = _DEFAULT.fullmatch(rest), self.environment.text(name)
        if found is None:
            return None
        colon, kind, text = found.groups()
        is_missing = value is None or (bool(colon) and value == "")
        if kind == "=" and is_missing:
            self.environment.add(name, expand_text(text, self.environment), append=False)
        wanted = {"+": not is_missing, "?": False}.get(kind, is_missing)
        return text if wanted else None

    def _text(self, name: str, index: str | None, rest: str) -> str:
        """A variable's text, or what stands for it where it has none."""
        value = self.environment.text(name)
        if index is not None:
            value = self._item(self.environment.items(name) or [], index)
        written = f"${{{name}{'' if index is None else f'[{index}]'}{rest}}}"
        if not rest:
            return f"${name}" if value is None else value
        if found := _DEFAULT.fullmatch(rest):
            default = self._default(name, rest)
            if default is not None:
                return expand_text(default, self.environment)
            if found.group(2) == "+":
                return ""
            return f"${name}" if value is None else value
        if value is None:
            return written
        cut = self._cut_out(value, rest)
        return _trimmed(value, rest, written) if cut is None else cut

    def _item(self, items: list[str], index: str) -> str | None:
        """An entry of an array, by its number or, as in ``([name]=value)``, by its name."""
        key = f"[{expand_text(index, self.environment)}]="
        named = [item[len(key) :] for item in items if item.startswith(key)]
        number = arithmetic(index, self.environment)
        if named or number is None or not 0 <= number < len(items):
            return named[-1] if named else None
        return items[number]

    def _cut_out(self, value: str, rest: str) -> str | None:
        """``${name:start}`` and ``${name:start:length}``; None for anything else."""
        start, colon, length = rest[1:].partition(":")
        first = arithmetic(start, self.environment) if rest[0] == ":" else None
        count = arithmetic(length, self.environment) if colon else len(value)
        if first is None or count is None or count < 0 or first < -len(value):
            return None
        first = first + len(value) if first < 0 else first
        return value[first : first + count]


def _special(inside: str) -> str:
    """``$?`` and the like; anything else is not known."""
    return {"?": "0", "-": "", "$": "1", "!": ""}.get(inside, f"${{{inside}}}")


def _trimmed(value: str, rest: str, written: str) -> str:
    """``${name%pattern}``, ``${name##pattern}``, ``${name/old/new}``, and ``,,`` or ``^^``."""
    if rest in (",,", "^^"):
        return value.lower() if rest == ",," else value.upper()
    if found := re.fullmatch(r"/(/?)([^/*?[\]#%]+)(?:/(.*))?", rest):
        return value.replace(found.group(2), found.group(3) or "", -1 if found.group(1) else 1)
    found = re.fullmatch(r"(%%?|##?)(.+)", rest)
    if found is None:
        return written
    mark, pattern = found.groups()
    lengths = range(len(value) + 1)
    if mark in ("%", "##"):
        lengths = reversed(lengths)
    for cut in lengths:  # % and # remove as little as can be, %% and ## as much
        removed, kept = (value[cut:], value[:cut]) if "%" in mark else (value[:cut], value[cut:])
        if fnmatch.fnmatchcase(removed, pattern):
            return kept
    return value


def arithmetic(expression: str, environment: Environment) -> int | None:
    """What bash's ``$((expression))`` is; None where that cannot be told."""
    return evaluate(expand_text(expression, environment), environment.text)
