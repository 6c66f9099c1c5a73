"""Conditions of a shell, ``[ ... ]`` and ``[[ ... ]]``, as far as their text tells."""

import fnmatch

from lib.plan.shell_expansion import Environment, arithmetic

Status = bool | None
"""Whether a command succeeds, where that can be told."""


class Condition:
    """One condition, whose words are expanded."""

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
