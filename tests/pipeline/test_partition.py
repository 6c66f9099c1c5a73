"""Splits of layers against all possible splits, and some known ones."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.pipeline.partition import layer_ranges, partition_layers


def chunk_costs(counts, first_extra, last_extra):
    costs = [float(count) for count in counts]
    costs[0] += first_extra
    costs[-1] += last_extra
    return costs


def descending(costs):
    return sorted(costs, reverse=True)


def stage_costs(costs, stages):
    return descending(sum(costs[stage::stages]) for stage in range(stages))


def all_splits(num_layers, chunks):
    for cuts in itertools.combinations(range(1, num_layers), chunks - 1):
        bounds = [0, *cuts, num_layers]
        yield tuple(end - start for start, end in itertools.pairwise(bounds))


EXTRAS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.75, 20.0])


@st.composite
def problems(draw):
    stages, per_stage = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    chunks = stages * per_stage
    most = chunks + (10 if chunks <= 4 else 5 if chunks <= 8 else 3)
    return draw(st.integers(chunks, most)), chunks, stages, draw(EXTRAS), draw(EXTRAS)


@given(problems())
def test_no_other_split_is_better(problem):
    num_layers, chunks, stages, first, last = problem
    counts = partition_layers(num_layers, chunks, stages=stages, first_extra=first, last_extra=last)
    assert (sum(counts), len(counts), min(counts) >= 1) == (num_layers, chunks, True)

    def worth(split):
        costs = chunk_costs(split, first, last)
        return max(costs), stage_costs(costs, stages)

    assert worth(counts) == min(map(worth, all_splits(num_layers, chunks)))
    # Within each stage: as level as its number of layers allows, whatever the others do.
    ends = [0.0] * chunks
    ends[0], ends[-1] = first, ends[-1] + last
    for stage in range(stages):
        mine, extra = counts[stage::stages], ends[stage::stages]
        level = [
            descending(n + e for n, e in zip(split, extra, strict=True))
            for split in all_splits(sum(mine), len(mine))
        ]
        assert descending(n + e for n, e in zip(mine, extra, strict=True)) == min(level)


@given(st.integers(1, 60), st.integers(1, 12))
def test_without_extras_a_split_is_even_and_the_last_chunks_take_the_rest(num_layers, chunks):
    num_layers += chunks
    few, rest = divmod(num_layers, chunks)
    expected = (few,) * (chunks - rest) + (few + 1,) * rest
    assert partition_layers(num_layers, chunks) == expected


@pytest.mark.parametrize(
    ("num_layers", "stages", "chunks", "last", "expected"),
    [
        (4, 1, 1, 2.0, (4,)),
        (24, 4, 4, 0.0, (6, 6, 6, 6)),
        (24, 4, 4, 2.0, (6, 6, 7, 5)),  # 26 in all: none above 7, the last one 5 + 2
        (22, 4, 4, 2.0, (6, 6, 6, 4)),  # level: 6 each
        (4, 4, 4, 2.0, (1, 1, 1, 1)),  # the head alone is the slowest; nothing to shift
        (5, 4, 4, 50.0, (1, 1, 2, 1)),
        (6, 2, 4, 2.0, (2, 1, 2, 1)),  # stages 4 and 2 + 2
        (10, 2, 4, 2.0, (3, 3, 3, 1)),  # stages 6 and 4 + 2, chunks 3 and 1 + 2
    ],
)
def test_known_splits(num_layers, stages, chunks, last, expected):
    assert partition_layers(num_layers, chunks, stages=stages, last_extra=last) == expected


def test_stages_are_levelled_as_well_as_chunks():
    """Chunks of 2 at most either way; only counting whole stages avoids 4 against 2."""
    counts = partition_layers(6, 4, stages=2)
    assert sorted(counts) == [1, 1, 2, 2]
    assert sum(counts[0::2]) == sum(counts[1::2]) == 3


@given(problems())
def test_ranges_cover_every_layer_once_in_order_of_depth(problem):
    num_layers, chunks, stages, first, last = problem
    counts = partition_layers(num_layers, chunks, stages=stages, first_extra=first, last_extra=last)
    ranges = [layer_ranges(counts, stage, stages) for stage in range(stages)]
    assert all(len(mine) == chunks // stages for mine in ranges)
    by_depth = [ranges[chunk % stages][chunk // stages] for chunk in range(chunks)]
    assert [number for one in by_depth for number in one] == list(range(num_layers))
    assert tuple(map(len, by_depth)) == counts


def test_ranges_of_two_stages_with_two_chunks():
    assert layer_ranges((1, 2, 3, 1), 0, 2) == [range(1), range(3, 6)]
    assert layer_ranges((1, 2, 3, 1), 1, 2) == [range(1, 3), range(6, 7)]
