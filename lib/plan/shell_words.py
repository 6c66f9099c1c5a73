"""Cuts the text of a shell script into words and operators, as bash does before it runs anything.

Words stay raw: quotes, ``$`` and backslashes are still in them, for ``lib.plan.shell_expansion``.
Comments, redirections and here-documents are left out. ``<Specify path>``, which example scripts
write where a person is to fill something in, is a part of a word, not a redirection.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lib.errors import UserError

_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_HEREDOC = re.compile(r"\d*<<(?!<)-?[ \t]*(['\"]?)(\w+)\1")
_OPERATOR = re.compile(r";;|&&|\|\||\|&|[;|&()\n]")
_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n]*>")
_REDIRECTION = re.compile(r"\d*(?:&>>?|>>|>&|<&|<<<|>\||[<>])[ \t]*")


@dataclass(frozen=True)
class Token:
    """A piece of a script.

    Attributes:
        kind: ``word``; ``array``, an assignment of a list; ``operator``, a new line among them.
        text: the raw word, ``NAME=`` or ``NAME+=`` of an array, or the operator.
        line: where it begins, from 1.
        words: an array's raw words.
    """

    kind: Literal["word", "array", "operator"]
    text: str
    line: int
    words: tuple[str, ...] = ()

    def is_operator(self, *texts: str) -> bool:
        """Whether this is one of these operators."""
        return self.kind == "operator" and self.text in texts


def tokenize(text: str) -> list[Token]:
    """The words and operators of a script.

    Raises:
        UserError: a quote or bracket that never ends; names its line.
    """
    return list(_Lexer(text.replace("\r\n", "\n")).tokens())


class _Lexer:
    """Walks through a text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self.heredocs: list[str] = []

    def tokens(self) -> Iterator[Token]:
        """All tokens in order."""
        while self._skip():
            line = self.text.count("\n", 0, self.place) + 1
            if self._match(_ARRAY):
                name = self.matched[:-1]
                yield Token("array", name, line, tuple(self._array_words(line)))
            elif self.text.startswith("((", self.place):
                yield Token("word", self._take(self._end_of_brackets(self.place, "(", ")")), line)
            elif self._match(_OPERATOR):
                yield Token("operator", self.matched, line)
                if self.matched == "\n":
                    self._skip_heredocs()
            else:
                yield Token("word", self._take(self._end_of_word(self.place)), line)

    def _match(self, pattern: re.Pattern[str]) -> bool:
        """Steps over what the pattern matches here."""
        if found := pattern.match(self.text, self.place):
            self.matched, self.place = found.group(), found.end()
        return found is not None

    def _take(self, end: int) -> str:
        taken, self.place = self.text[self.place : end], end
        return taken

    def _skip(self) -> bool:
        """Steps over what is no token; False at the end."""
        while self.place < len(self.text):
            if found := _HEREDOC.match(self.text, self.place):
                self.heredocs.append(found.group(2))
                self.place = found.end()
            elif self._match(_BLANK) or self._match(_COMMENT):
                continue
            elif not _PLACEHOLDER.match(self.text, self.place) and self._match(_REDIRECTION):
                self.place = self._end_of_word(self.place)
            else:
                return True
        return False

    def _skip_heredocs(self) -> None:
        for word in self.heredocs:
            end = re.compile(rf"^\t*{re.escape(word)}$", re.MULTILINE).search(self.text, self.place)
            self.place = end.end() if end else len(self.text)
        self.heredocs = []

    def _array_words(self, line: int) -> Iterator[str]:
        """The words up to the closing bracket; new lines only part them."""
        while self._skip():
            if self._match(_OPERATOR):
                if self.matched == ")":
                    return
            else:
                yield self._take(self._end_of_word(self.place))
        raise UserError(f"line {line}: the list that begins here has no closing )")

    def _end_of_word(self, place: int) -> int:
        text = self.text
        while place < len(text):
            if found := _PLACEHOLDER.match(text, place):
                place = found.end()
            elif text[place] in " \t\n;&|()<>":
                break
            else:
                place = self._end_of_piece(place)
        return place

    def _end_of_piece(self, place: int) -> int:
        """The end of a character, or of the quotes or brackets that begin with it."""
        text, first = self.text, self.text[place]
        if first == "\\":
            return min(place + 2, len(text))
        if first in "'`":
            return self._after(place, first)
        if first == '"':
            return self._end_of_double_quotes(place)
        if first == "$" and text[place + 1 : place + 2] == "(":
            return self._end_of_brackets(place + 1, "(", ")")
        if first == "$" and text[place + 1 : place + 2] == "{":
            return self._end_of_brackets(place + 1, "{", "}")
        return place + 1

    def _after(self, place: int, closing: str) -> int:
        end = self.text.find(closing, place + 1)
        return end + 1 if end >= 0 else self._never_ends(place)

    def _end_of_double_quotes(self, place: int) -> int:
        end = place + 1
        while end < len(self.text):
            if self.text[end] == '"':
                return end + 1
            end = end + 1 if self.text[end] == "'" else self._end_of_piece(end)
        return self._never_ends(place)

    def _end_of_brackets(self, place: int, opening: str, closing: str) -> int:
        depth, end = 0, place
        while end < len(self.text):
            depth += (self.text[end] == opening) - (self.text[end] == closing)
            if depth == 0:
                return end + 1
            end = end + 1 if self.text[end] in (opening, closing) else self._end_of_piece(end)
        return self._never_ends(place)

    def _never_ends(self, place: int) -> int:
        line = self.text.count("\n", 0, place) + 1
        raise UserError(f"line {line}: {self.text[place]} is opened here and never closed")
