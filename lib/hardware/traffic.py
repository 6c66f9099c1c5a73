"""What ranks send each other: whether it arrives, and how fast. Runs on every rank.

Bus bandwidth, as nccl-tests counts it, is what each link carries, so that it can be held against
the link whatever the number of ranks n. With all bytes b of the whole tensor and t seconds:

    all-reduce        2 (n - 1) / n  b / t
    all-gather        (n - 1) / n  b / t
    reduce-scatter    (n - 1) / n  b / t
    exchange of two   b / t, both ways at once

Each function here that sends is named after what it tries: where a rank hangs, the name is told.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import nccl

from lib.hardware.speed import synchronize
from lib.parallel.collectives import all_reduce, gather_first_dim, reduce_scatter_first_dim
from lib.parallel.groups import Group

_WARM_UPS = 2
_SMALL_REPEATS = 50
_ODD = 1021  # numbers of each rank's part in the tests of rightness: no multiple of anything


@dataclass(frozen=True)
class Traffic:
    """What rank 0 tells of all ranks.

    Attributes:
        ranks: how many.
        library: ``gloo``, or NCCL with its version.
        wrong: calls that gave wrong numbers, with the ranks that saw it.
        latency_us: of an all-reduce of one number.
        bus_gb_per_s: by call and size in bytes.
        pairs_gb_per_s: of each pair of ranks, at the largest size.
    """

    ranks: int
    library: str
    wrong: tuple[str, ...]
    latency_us: float
    bus_gb_per_s: dict[tuple[str, int], float]
    pairs_gb_per_s: dict[tuple[int, int], float]


def measure_traffic(device_type: str, sizes: tuple[int, ...], repeats: int) -> Traffic:
    """One rank's part; all must call.

    Args:
        device_type: ``cpu`` or ``cuda``.
        sizes: bytes of the whole tensors to time, the largest last.
        repeats: how often each is sent.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    group = Group(rank, ranks, dist.group.WORLD)
    wrong = _wrong_calls(group, device)
    number = torch.zeros(1, device=device)
    latency = _seconds(lambda: all_reduce(number, group), _SMALL_REPEATS, device)
    bus: dict[tuple[str, int], float] = {}
    pairs: dict[tuple[int, int], float] = {}
    if ranks > 1:
        for size in sizes:
            for name, rate in _bus_rates(size, group, device, repeats):
                bus[name, size] = rate
        for pair in combinations(range(ranks), 2):
            pairs[pair] = _pair_rate(pair, sizes[-1], device, repeats)
    return Traffic(ranks, _library(device), wrong, 1e6 * latency, bus, pairs)


def _library(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    return "NCCL " + ".".join(str(part) for part in nccl.version())


def _wrong_calls(group: Group, device: torch.device) -> tuple[str, ...]:
    """Names of the calls that gave wrong numbers on any rank."""
    tests = [try_all_reduce, try_all_gather, try_reduce_scatter, try_exchange_of_pairs]
    wrong = [test.__name__.removeprefix("try_") for test in tests if not test(group, device)]
    everyone: list[list[str]] = [[] for _ in range(group.size)]
    dist.all_gather_object(everyone, wrong)
    return tuple(
        f"{name.replace('_', ' ')} on rank {rank}"
        for rank, names in enumerate(everyone)
        for name in names
    )


def _own_numbers(rank: int, ranks: int, device: torch.device) -> Tensor:
    """Whole numbers, which every order of sums adds up exactly; others on each rank."""
    return torch.arange(_ODD * ranks, dtype=torch.float32, device=device) + rank


def try_all_reduce(group: Group, device: torch.device) -> bool:
    """Whether a sum over all ranks is right."""
    found = all_reduce(_own_numbers(group.rank, group.size, device), group)
    return torch.equal(found.cpu(), _sum_of_all(group))


def _sum_of_all(group: Group) -> Tensor:
    cpu = torch.device("cpu")
    return torch.stack([_own_numbers(r, group.size, cpu) for r in range(group.size)]).sum(0)


def try_all_gather(group: Group, device: torch.device) -> bool:
    """Whether the parts of all ranks arrive in their order."""
    found = gather_first_dim(_own_numbers(group.rank, group.size, device), group)
    cpu = torch.device("cpu")
    parts = [_own_numbers(rank, group.size, cpu) for rank in range(group.size)]
    return torch.equal(found.cpu(), torch.cat(parts))


def try_reduce_scatter(group: Group, device: torch.device) -> bool:
    """Whether each rank gets its part of a sum."""
    found = reduce_scatter_first_dim(_own_numbers(group.rank, group.size, device), group)
    return torch.equal(found.cpu(), _sum_of_all(group).chunk(group.size)[group.rank])


def try_exchange_of_pairs(group: Group, device: torch.device) -> bool:
    """Whether what every pair of ranks sends each other arrives."""
    right = True
    for pair in combinations(range(group.size), 2):
        if group.rank in pair:
            peer = sum(pair) - group.rank
            arriving = torch.zeros(_ODD * group.size, device=device)
            _exchange(_own_numbers(group.rank, group.size, device), arriving, peer)
            expected = _own_numbers(peer, group.size, torch.device("cpu"))
            right = right and torch.equal(arriving.cpu(), expected)
    return right


def _exchange(leaving: Tensor, arriving: Tensor, peer: int) -> None:
    calls = [dist.P2POp(dist.isend, leaving, peer), dist.P2POp(dist.irecv, arriving, peer)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()


def _bus_rates(
    size: int, group: Group, device: torch.device, repeats: int
) -> list[tuple[str, float]]:
    """GB/s of each collective with tensors of so many bytes."""
    count = size // 4 // group.size * group.size
    whole = torch.ones(count, device=device)
    part = torch.ones(count // group.size, device=device)
    share = (group.size - 1) / group.size
    calls: list[tuple[str, float, Callable[[], object]]] = [
        ("all-reduce", 2 * share, lambda: all_reduce(whole, group)),
        ("all-gather", share, lambda: gather_first_dim(part, group)),
        ("reduce-scatter", share, lambda: reduce_scatter_first_dim(whole, group)),
    ]
    return [
        (name, factor * 4 * count / _seconds(call, repeats, device) / 1e9)
        for name, factor, call in calls
    ]


def _pair_rate(pair: tuple[int, int], size: int, device: torch.device, repeats: int) -> float:
    """GB/s each way between two ranks; the others wait."""
    rank = dist.get_rank()
    seconds = 0.0
    if rank in pair:
        leaving = torch.ones(size // 4, device=device)
        arriving = torch.empty_like(leaving)
        peer = sum(pair) - rank
        seconds = _own_seconds(lambda: _exchange(leaving, arriving, peer), repeats, device)
    return size / _slowest(seconds, device) / 1e9


def _seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds of one call that all ranks make, by the slowest of them."""
    dist.barrier()
    return _slowest(_own_seconds(call, repeats, device), device)


def _own_seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    for _ in range(_WARM_UPS):
        call()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - begin) / repeats


def _slowest(seconds: float, device: torch.device) -> float:
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()
