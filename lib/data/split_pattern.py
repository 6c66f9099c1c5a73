r"""The patterns by which byte-level tokenizers cut a text into words, for any regex engine.

A byte-level BPE first cuts the text by a regular expression; no token crosses such a cut.
``tokenizers`` runs it in Oniguruma, ``tiktoken`` in Rust's own engine, and Python has a third: each
knows the characters of another version of Unicode, so that ``\p{L}`` is not the same set in all of
them. Here the classes are spelt out as ranges of characters, which are measured from the engine of
``tokenizers`` itself. What is left of the known patterns below (literals, classes, alternatives
from left to right, greedy repetition, one look-ahead) means the same in every engine.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Regex
from tokenizers.normalizers import Replace

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# What (?i:...) finds: Oniguruma takes the long s for an s, and no other letter of these has such a
# double.
_CONTRACTIONS_SPELT = "(?:'(?:[sS\u017f]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD]))"
_OTHER = r"| ?[^\s\p{L}\p{N}]+"
_LINES = r"|\s*[\r\n]+"
# The end of each pattern: white space without its last character where a word follows.
_SPACES = r"|\s+(?!\S)|\s+"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"

GPT2_PATTERN = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+{_OTHER}{_SPACES}"


def _words_and_numbers(words: str, number: str, line_ends: str) -> str:
    return f"{words}|{number}{_OTHER}{line_ends}*{_LINES}{_SPACES}"


def _cased_words(contractions: str) -> str:
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{first}[{_UPPER}]*[{_LOWER}]+{contractions}|{first}[{_UPPER}]+[{_LOWER}]*{contractions}"
    )


_NUMBERS = (r"\p{N}", r"\p{N}{1,2}", r"\p{N}{1,3}")
# Llama 3, GPT-4 and Qwen2 | GPT-4o | Tekken. Each finds a match at every character: what is no
# letter, number or white space is taken by _OTHER, and white space by the end.
_KNOWN = frozenset(
    [GPT2_PATTERN]
    + [
        _words_and_numbers(words, number, line_ends)
        for number in _NUMBERS
        for words, line_ends in (
            (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+", r"[\r\n]"),
            (_cased_words(_CONTRACTIONS + "?"), r"[\r\n/]"),
            (_cased_words(""), r"[\r\n/]"),
        )
    ]
)

_CLASS = r"\\p\{\w+\}|\\s"
_BRACKETS_OR_CLASS = re.compile(rf"\[(?P<inside>[^\]]*)\]|(?P<alone>{_CLASS}|\\S)")


@dataclass(frozen=True)
class WordPlaces:
    """Where words begin and end.

    Attributes:
        words: finds the words, which lie side by side.
        cut: finds places where a word ends whatever stands on either side.
    """

    words: re.Pattern[str]
    cut: re.Pattern[str]


@dataclass(frozen=True)
class SplitPattern(WordPlaces):
    """One known pattern, its classes spelt out.

    Attributes:
        rust: for Rust's engine; what needs no look-ahead is one group, which it runs in one go.
    """

    rust: str


SPACE_MARK = "\u2581"
"""What stands for a space in SentencePiece's pieces."""
MARKED_WORDS = WordPlaces(
    words=re.compile(f"{SPACE_MARK}*[^{SPACE_MARK}]+|{SPACE_MARK}+"),
    cut=re.compile(f"(?<=[^{SPACE_MARK}])(?={SPACE_MARK})"),
)
"""The words of the tokenizers that ``sentencepiece_model`` makes."""


def split_pattern_of(content: dict[str, Any]) -> str | None:
    r"""The pattern by which a tokenizer.json cuts text, where nothing else changes the text.

    Args:
        content: a tokenizer.json.

    Returns:
        A known pattern, in the spelling with ``\p{L}``; None for any other tokenizer.
    """
    if content["normalizer"] is not None:
        return None
    if not all(token["special"] for token in content["added_tokens"]):
        return None  # these are looked for in the text before it is cut
    pattern = _regex_of(content["pre_tokenizer"] or {})
    return pattern if pattern in _KNOWN else None


def mark_before_text(content: dict[str, Any]) -> str | None:
    """What a tokenizer made by ``sentencepiece_model`` puts before each text: a mark, or nothing.

    Args:
        content: a tokenizer.json.

    Returns:
        None for any other tokenizer, and where tokens may begin before a space and end after it.
    """
    normalizer, splitter = content["normalizer"] or {}, content["pre_tokenizer"] or {}
    steps = normalizer.get("normalizers", [])
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    mark = {"type": "Prepend", "prepend": SPACE_MARK}
    if splitter.get("pattern") != {"Regex": MARKED_WORDS.words.pattern}:
        return None
    if not all(token["special"] for token in content["added_tokens"]):
        return None
    if steps == [spaces]:
        return ""
    return SPACE_MARK if steps == [mark, spaces] else None


def _regex_of(step: dict[str, Any]) -> str | None:
    steps = step.get("pretokenizers", [step])
    byte_level = steps[-1]
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        return None
    if byte_level.get("use_regex", True):
        return GPT2_PATTERN if len(steps) == 1 else None
    if len(steps) != 2 or steps[0].get("type") != "Split":
        return None
    # With a match at every position nothing lies between two matches, so it is the same whether
    # the rest is kept or removed.
    if (steps[0]["behavior"], steps[0]["invert"]) not in {("Isolated", False), ("Removed", True)}:
        return None
    return steps[0]["pattern"].get("Regex")


@cache
def spelt_out(pattern: str) -> SplitPattern:
    """A known pattern with its classes as ranges of characters."""
    plain = pattern.replace(_CONTRACTIONS, _CONTRACTIONS_SPELT)
    spelt = _BRACKETS_OR_CLASS.sub(_spell, plain)
    spaces = _BRACKETS_OR_CLASS.sub(_spell, _SPACES)
    letters, white = characters(r"\p{L}"), characters(r"\s")
    # A word ends, by each of the known patterns, before a space that follows another character, and
    # between a letter and what is none, except that an apostrophe may go on, as in it's. Of these:
    # all ASCII, and the full stops and commas of texts that have no spaces.
    ends = r"\n!-&(-@\[-`{-~" + "\u3001\u3002\uff0c"
    return SplitPattern(
        rust=f"(?:{spelt.removesuffix(spaces)}){spaces}",
        words=re.compile(spelt),
        cut=re.compile(f"(?<=[{letters}])(?=[{ends}])|(?<=[^{white}])(?= )"),
    )


def _spell(found: re.Match[str]) -> str:
    if found["alone"] == r"\S":
        return f"[^{characters(chr(92) + 's')}]"
    if found["alone"]:
        return f"[{characters(found['alone'])}]"
    return f"[{re.sub(_CLASS, lambda one: characters(one[0]), found['inside'])}]"


@cache
def characters(escape: str) -> str:
    r"""The characters of a class such as ``\p{L}`` as ranges to stand within brackets.

    Measured: the library's engine removes all others from the text of all characters. Beyond the
    planes asked for no version of Unicode has letters, numbers, marks or white space.
    """
    asked = [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000)]
    found = Replace(Regex(f"[^{escape}]+"), "").normalize_str("".join(map(chr, asked)))
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in _ranges(found))


def _ranges(found: str) -> Iterator[tuple[int, int]]:
    codes = np.frombuffer(found.encode("utf-32-le"), dtype=np.uint32).astype(np.int64)
    starts = np.flatnonzero(np.diff(codes, prepend=-2) != 1)
    ends = np.append(starts[1:], codes.size) - 1
    yield from zip(codes[starts].tolist(), codes[ends].tolist(), strict=True)
