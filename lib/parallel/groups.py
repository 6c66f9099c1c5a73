"""The process groups that layers and the executor receive.

Groups are passed, never fetched: a layer knows the group it was built with and nothing else of
the layout, so it can be built and tested with any group, or with none.
"""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """One axis of the layout as a rank sees it.

    Attributes:
        rank: this process's place in the group, ``0 <= rank < size``.
        size: number of processes in the group.
        process_group: what collectives run on; None for a group of one process.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class ParallelGroups:
    """The groups of one rank.

    Attributes:
        tp: tensor parallel; shards of the same layers.
        pp: pipeline parallel; consecutive slabs of layers.
        dp: data parallel; the same parameters, other samples.
        embedding: the ranks that hold a copy of tied embeddings.
    """

    tp: Group = Group()
    pp: Group = Group()
    dp: Group = Group()
    embedding: Group = Group()
