"""The layout matrix: every grid of TP x PP x DP up to 8 ranks, the other factors pairwise.

``matrix()`` gives cases such that each value of a factor meets each value of every other factor
that it can occur with, and each grid with each of them. Greedy: every case takes for each factor
the value that covers most pairs not seen yet, in a fixed order, so the list is the same each time.
"""

from collections import Counter
from dataclasses import dataclass, fields
from itertools import combinations, product

GRIDS = [
    (tensor, pipeline, data)
    for tensor, pipeline, data in product(range(1, 9), repeat=3)
    if tensor * pipeline * data <= 8
]


@dataclass(frozen=True)
class Case:
    """One layout of one model.

    Attributes:
        grid: (tensor, pipeline, data).
        sequence: sequence parallelism.
        chunks: virtual stages.
        split: ``auto``, or ``odd``: an explicit, uneven number of layers in each chunk.
        sharding: as ``parallel.sharding``.
        replicas: whether half of the data-parallel ranks are replicas of the other half.
        style: ``gpt2``, ``llama`` or ``qwen``.
        kv_heads: ``all`` as many as heads, ``half`` of them, or ``one``, held by every rank.
        tied: whether input and output embeddings are one table.
        recompute: ``none``, ``selective``, ``uniform`` or ``block``.
        micro_batches: of a step and copy: ``few`` (one fewer than stages), or ``many`` (one
            more).
        documents: ``joined`` in a window, or ``apart``: positions, attention and loss stop at
            their ends.
    """

    grid: tuple[int, int, int]
    sequence: bool
    chunks: int
    split: str
    sharding: str
    replicas: bool
    style: str
    kv_heads: str
    tied: bool
    recompute: str
    micro_batches: str
    documents: str

    def __str__(self) -> str:
        tensor, pipeline, data = self.grid
        words = [f"tp{tensor}{'s' if self.sequence else ''} pp{pipeline}x{self.chunks} dp{data}"]
        words.append(f"{self.sharding}{'/2' if self.replicas else ''}")
        words += [self.style, f"kv-{self.kv_heads}", "tied" if self.tied else "untied"]
        words += [self.recompute, self.micro_batches, self.split, self.documents]
        return " ".join(words)


def _values(grid: tuple[int, int, int]) -> dict[str, tuple[object, ...]]:
    """The values that each factor can take on a grid."""
    tensor, pipeline, data = grid
    return {
        "sequence": (True, False) if tensor > 1 else (False,),
        "chunks": (2, 1) if pipeline > 1 else (1,),
        "split": ("auto", "odd") if pipeline > 1 else ("auto",),
        "sharding": ("optimizer", "gradients", "parameters"),
        "replicas": (True, False) if data % 2 == 0 else (False,),
        "style": ("gpt2", "llama", "qwen"),
        "kv_heads": ("one", "half", "all"),
        "tied": (True, False),
        "recompute": ("none", "selective", "uniform", "block"),
        "micro_batches": ("many", "few"),
        "documents": ("apart", "joined"),
    }


def _pairs(case: Case) -> set[tuple[object, ...]]:
    named = [(field.name, getattr(case, field.name)) for field in fields(case)]
    return set(combinations(named, 2))


def _all_pairs() -> set[tuple[object, ...]]:
    found: set[tuple[object, ...]] = set()
    for grid in GRIDS:
        values = {"grid": (grid,)} | _values(grid)
        for (one, its), (other, others) in combinations(values.items(), 2):
            found |= {((one, a), (other, b)) for a in its for b in others}
    return found


def _next_case(grid, missing, wanted) -> Case:
    """A case on this grid that covers many of the missing pairs.

    Args:
        grid: (tensor, pipeline, data).
        missing: pairs of values not seen together yet.
        wanted: how many missing pairs each value is part of, which breaks ties.
    """
    chosen = {"grid": grid}
    for name, values in _values(grid).items():

        def gain(value, name=name):
            new = {((other, its), (name, value)) for other, its in chosen.items()}
            return len(new & missing), wanted[name, value]

        chosen[name] = max(values, key=gain)
    return Case(**chosen)


def matrix() -> list[Case]:
    """All cases; the first ``len(GRIDS)`` of them have one grid each."""
    missing, cases = _all_pairs(), []
    for grid in GRIDS:
        cases.append(_next_case(grid, missing, _count(missing)))
        missing -= _pairs(cases[-1])
    while missing:
        wanted = _count(missing)
        found = (_next_case(grid, missing, wanted) for grid in GRIDS)
        best = max(found, key=lambda case: len(_pairs(case) & missing))
        assert _pairs(best) & missing
        missing -= _pairs(best)
        cases.append(best)
    return cases


def _count(missing):
    return Counter(value for pair in missing for value in pair)
