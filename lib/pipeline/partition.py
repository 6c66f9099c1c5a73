"""Which layers each chunk of a pipeline holds.

Layers cost the same, so a split is a number of layers per chunk. The first chunk also embeds and
the last one also computes the head and the loss; both are counted in units of one layer (the head
of a vocabulary of 50k tokens costs about two layers of a 1.4B model).
"""

import math
from collections.abc import Sequence

# Costs are sums of whole layers and two given numbers; closer ones than this are equal.
_DIGITS = 9


def partition_layers(
    num_layers: int,
    chunks: int,
    *,
    first_extra: float = 0.0,
    last_extra: float = 0.0,
    stages: int | None = None,
) -> tuple[int, ...]:
    """Splits layers over all chunks of a pipeline, in order of depth, at least one each.

    A pipeline is as fast as its slowest part, so in this order:

    1. The largest cost of a chunk is as small as possible.
    2. Then the costs of whole stages (the sums of their chunks): the largest as small as possible,
       then the second largest, and so on.
    3. Then the same for the chunks within each stage.
    4. What is still equal goes to the later one: earlier stages keep the activations of more micro
       batches.

    Each is a sum of separate convex costs, for which adding one layer at a time where the result
    is cheapest is exact; the first gives a limit per chunk that the others keep.

    Args:
        num_layers: at least ``chunks``, which the caller guarantees.
        chunks: stages x chunks per stage.
        first_extra: cost of what the first chunk does beside its layers, in layers.
        last_extra: the same of the last chunk.
        stages: chunk c belongs to stage c % stages; None: each chunk is a stage of its own.

    Returns:
        Layers of each chunk.
    """
    stages = stages or chunks
    assert num_layers >= chunks
    assert chunks % stages == 0
    cost = [1.0] * chunks  # of a chunk with the one layer that it has at least
    cost[0] += first_extra
    cost[-1] += last_extra
    spare = num_layers - chunks
    anywhere = _spread(spare, cost, [spare] * chunks)
    limit = max(one + more for one, more in zip(cost, anywhere, strict=True))
    room = [math.floor(round(limit - one, _DIGITS)) for one in cost]
    by_stage = _spread(
        spare,
        [sum(cost[stage::stages]) for stage in range(stages)],
        [sum(room[stage::stages]) for stage in range(stages)],
    )
    counts = [1] * chunks
    for stage, more in enumerate(by_stage):
        places = range(stage, chunks, stages)
        for place, layers in zip(
            places, _spread(more, cost[stage::stages], room[stage::stages]), strict=True
        ):
            counts[place] += layers
    return tuple(counts)


def layer_ranges(counts: Sequence[int], stage: int, stages: int) -> list[range]:
    """The global numbers, from 0, of the layers of each chunk of a stage.

    Args:
        counts: layers of each chunk of the pipeline, in order of depth.
        stage: whose chunks.
        stages: number of stages; chunk c belongs to stage c % stages.
    """
    starts = [sum(counts[:chunk]) for chunk in range(len(counts))]
    return [
        range(starts[chunk], starts[chunk] + counts[chunk])
        for chunk in range(stage, len(counts), stages)
    ]


def _spread(amount: int, costs: Sequence[float], room: Sequence[int]) -> list[int]:
    """Adds units of cost 1, each to the cheapest place with room, the last of equal ones."""
    added = [0] * len(costs)
    for _ in range(amount):
        place = min(
            (place for place in range(len(costs)) if added[place] < room[place]),
            key=lambda place: (round(costs[place] + added[place], _DIGITS), -place),
        )
        added[place] += 1
    return added
