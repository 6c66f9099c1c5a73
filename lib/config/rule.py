"""What a rule is, and how several are run together; the rules themselves are elsewhere.

A rule is a function that takes what it compares by name, sections of params.yaml and other facts,
and yields what is wrong.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from lib.errors import Problem

Rule = Callable[..., Iterator[Problem]]


def problems_of(rules: Sequence[Rule], facts: Mapping[str, object]) -> list[Problem]:
    """What all rules find that can be run on these facts, with the name of each rule."""
    problems: list[Problem] = []
    for rule in rules:
        wanted = inspect.signature(rule).parameters
        if all(name in facts for name in wanted):
            found = rule(**{name: facts[name] for name in wanted})
            source = f"{rule.__module__}.{rule.__name__}"
            problems += [replace(problem, source=source) for problem in found]
    return problems
