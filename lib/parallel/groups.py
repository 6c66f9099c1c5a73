"""The process groups that layers and the executor receive.

Groups are passed, never fetched: a layer knows the groups it was built with and nothing else of
the layout, so it can be built and tested with any group, or with none.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from lib.parallel.random import RandomStream

Watch = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Group:
    """One axis of the layout as a rank sees it.

    Attributes:
        rank: this process's place in the group, ``0 <= rank < size``.
        size: number of processes in the group.
        process_group: what collectives run on; None for a group of one process.
        name: what messages call it.
        watch: told call and tensor before each collective (``launch.debug``); None does nothing.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    name: str = ""
    watch: Watch | None = None


@dataclass(frozen=True)
class Channel:
    """One direction between two neighbouring pipeline stages, as one of the two sees it.

    Each direction has a process group of its own, so that a transfer waits for no other one.

    Attributes:
        peer: the other process's global rank.
        process_group: of the two processes.
        name: what messages call it.
        watch: as of a group.
    """

    peer: int
    process_group: dist.ProcessGroup
    name: str = ""
    watch: Watch | None = None


@dataclass(frozen=True)
class Channels:
    """The four channels of a pipeline stage; stages form a ring, for interleaved schedules.

    Attributes:
        activations_in: hidden states from the stage before.
        activations_out: hidden states to the stage after.
        gradients_in: gradients of those sent, from the stage after.
        gradients_out: gradients of those received, to the stage before.
    """

    activations_in: Channel
    activations_out: Channel
    gradients_in: Channel
    gradients_out: Channel


@dataclass(frozen=True)
class ParallelGroups:
    """The groups of one rank.

    Attributes:
        tp: tensor parallel; shards of the same layers.
        pp: pipeline parallel; consecutive slabs of layers.
        dp: data parallel; the same parameters, other samples.
        shards: of ``dp``, the ranks that share the masters of these parameters.
        replicas: of ``dp``, the ranks that hold the same shards.
        embedding: the first and the last stage, which both hold the table of tied embeddings.
        world: all processes.
        sequence_parallel: whether the activations between tensor-parallel layers are cut along
            the sequence over ``tp`` (dimension 0), rather than whole on each of its ranks.
        shard_stream: random numbers that differ between the ranks of ``tp``, for dropout of
            activations that are cut over it; None where ``tp`` has one rank.
        channels: point-to-point connections of the stage; None where ``pp`` has one rank.
    """

    tp: Group = Group()
    pp: Group = Group()
    dp: Group = Group()
    shards: Group = Group()
    replicas: Group = Group()
    embedding: Group = Group()
    world: Group = Group()
    sequence_parallel: bool = False
    shard_stream: RandomStream | None = None
    channels: Channels | None = None
