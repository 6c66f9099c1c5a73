"""Sums of a shell, ``$((...))``: whole numbers, compared, chosen and combined as bash does."""

import ast
import operator
import re
from collections.abc import Callable, Mapping

_LARGEST_POWER = 64
_TOO_LARGE = 2**64

ValueOf = Callable[[str], str | None]
"""The text of a variable; None where it was never set."""

_BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[int], int]] = {
    ast.Not: lambda number: int(not number),
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_COMPARED: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def evaluate(text: str, value_of: ValueOf) -> int | None:
    """What bash's ``$((text))`` is, its ``$`` put in; None where that cannot be told."""
    text = text.replace("&&", " and ").replace("||", " or ")
    text = re.sub(r"!(?!=)", " not ", _conditional(text))
    text = re.sub(r"(?<!/)/(?!/)", "//", text)
    text = re.sub(r"(?<![\w$])0+(?=\d)", "0o", text)  # octal, which has no 8 and no 9
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body, value_of)
    except (SyntaxError, ValueError, LookupError, ArithmeticError, RecursionError):
        return None


def _conditional(text: str) -> str:
    """``c ? a : b`` as Python writes it, in brackets too."""
    inner = re.compile(r"\(([^()]*)\)")
    kept: list[str] = []
    while found := inner.search(text):  # innermost brackets first; a mark stands for them
        kept.append(f"({_unbracketed(found.group(1))})")
        text = f"{text[: found.start()]}\x00{len(kept) - 1}\x01{text[found.end() :]}"
    text = _unbracketed(text)
    for number, piece in reversed(list(enumerate(kept))):
        text = text.replace(f"\x00{number}\x01", piece)
    return text


def _unbracketed(text: str) -> str:
    condition, mark, rest = text.partition("?")
    if not mark:
        return text
    depth = 1  # a ? before the : has a : of its own
    for place, letter in enumerate(rest):
        depth += (letter == "?") - (letter == ":")
        if depth == 0:
            chosen, other = _unbracketed(rest[:place]), _unbracketed(rest[place + 1 :])
            return f"(({chosen}) if ({condition}) else ({other}))"
    return text


def _evaluate(node: ast.expr, value_of: ValueOf) -> int:
    """Raises ValueError for what is no plain arithmetic of whole numbers."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.Name):
        value = value_of(node.id)
        number = None if value is None else evaluate(value, value_of)
        if number is None:
            raise ValueError(node.id)
        return number
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_evaluate(node.operand, value_of))
    if isinstance(node, ast.IfExp):
        node = node.body if _evaluate(node.test, value_of) else node.orelse
        return _evaluate(node, value_of)
    if isinstance(node, ast.BoolOp):
        values = [_evaluate(each, value_of) for each in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    return _evaluate_pair(node, value_of)


def _evaluate_pair(node: ast.expr, value_of: ValueOf) -> int:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = (_evaluate(each, value_of) for each in (node.left, node.comparators[0]))
        return int(_COMPARED[type(node.ops[0])](left, right))
    if isinstance(node, ast.BinOp):
        left, right = (_evaluate(each, value_of) for each in (node.left, node.right))
        return _combine(node.op, left, right)
    raise ValueError("no whole number")


def _combine(symbol: ast.operator, left: int, right: int) -> int:
    if max(abs(left), abs(right)) >= _TOO_LARGE:
        raise ValueError("more than 64 bits")
    if isinstance(symbol, ast.FloorDiv):
        quotient = abs(left) // abs(right)  # bash rounds towards 0
        return quotient if (left < 0) == (right < 0) else -quotient
    if isinstance(symbol, ast.Mod):
        return left - right * _combine(ast.FloorDiv(), left, right)
    if isinstance(symbol, ast.Pow | ast.LShift) and not 0 <= right <= _LARGEST_POWER:
        raise ValueError("too large")
    if isinstance(symbol, ast.Pow):
        return int(left**right)
    return _BINARY[type(symbol)](left, right)
