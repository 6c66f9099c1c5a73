"""From a run configuration and a number of processes to the layout of the training run.

Pure: no process is started and no hardware is asked here, so that the answers can be tested and
shown before anything runs. Parameters that are not resolved yet serve as well: a layout needs no
data.
"""

import math
from dataclasses import dataclass
from typing import Literal

from lib.config.nearest import divisors, divisors_near, multiples_near, nearest_of
from lib.config.operation import LaunchConfig
from lib.config.run_config import Params, RunConfig
from lib.config.schema import ParallelConfig, TrainingShape
from lib.errors import InvalidParams, Problem, UserError


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a training run is laid over its processes.

    Attributes:
        tensor: processes that share each layer.
        pipeline: groups of layers on processes of their own.
        virtual_stages: chunks of layers per process.
        data: copies of the model.
        data_shard: copies that split the optimizer's state (and more) among them.
        micro_batches: per step and copy, each of ``training.micro_batch_size`` samples; of the
            full batch, as a ramp-up has fewer, and of the first phase, as later ones may differ.
    """

    tensor: int
    pipeline: int
    virtual_stages: int
    data: int
    data_shard: int
    micro_batches: int

    @property
    def processes(self) -> int:
        """Processes in all."""
        return self.tensor * self.pipeline * self.data


def choose_device(launch: LaunchConfig, gpus: int) -> Literal["cpu", "cuda"]:
    """``"cuda"`` or ``"cpu"`` for a machine with so many GPUs.

    Raises:
        InvalidParams: GPUs are asked for where there are none.
    """
    if launch.device == "cuda" and gpus == 0:
        raise _refused(
            ("launch.device", "cuda"),
            "this machine shows no GPU",
            "write auto or cpu, or see what nvidia-smi and CUDA_VISIBLE_DEVICES say",
        )
    if launch.device == "auto":
        return "cuda" if gpus > 0 else "cpu"
    return launch.device


def process_count(
    run_config: RunConfig | Params, launch: LaunchConfig, gpus: int, nodes: int = 1
) -> int:
    """The processes to start on a machine with so many GPUs, one of ``nodes`` alike.

    ``launch.processes`` decides where it is given, then ``parallel.data``. Else a CPU run takes
    the fewest, and a GPU run the most GPUs that the layout and the batch allow: that may be fewer
    than there are, which the caller should say. All machines start equally many.

    Raises:
        InvalidParams: the wanted processes do not fit the GPUs, the nodes or the batch.
    """
    parallel = run_config.parallel
    device = choose_device(launch, gpus)
    unit, named = _unit_per_node(parallel, nodes)
    if launch.processes is not None:
        wanted, why = launch.processes, ("launch.processes", launch.processes)
    elif parallel.data is not None:
        wanted, why = _share_of_node(parallel, nodes), ("parallel.data", parallel.data)
    else:
        wanted, why = unit, named
        if device == "cuda":
            larger = (n for n in range(gpus, unit, -1) if _fits(run_config, n * nodes))
            wanted = next(larger, unit)
    if device == "cuda" and wanted > gpus:
        fitting = gpus // unit * unit
        if why[0] == "parallel.data":
            fitting = fitting * nodes // (parallel.tensor * parallel.pipeline)
        remedy = f"{fitting} or less" if fitting else f"a smaller {named[0]}"
        raise _refused(
            why,
            f"wants {wanted} GPUs, one per process, but this machine shows {gpus}",
            f"write {remedy}, or launch.device: cpu",
        )
    layout_for(run_config, wanted * nodes)
    return wanted


def _refused(field: tuple[str, int | str], rule: str, remedy: str) -> InvalidParams:
    """The error of a field, given with its value."""
    source = f"{__name__}.process_count"
    return InvalidParams([Problem(field[0], str(field[1]), rule, remedy, source=source)])


def _unit_per_node(parallel: ParallelConfig, nodes: int) -> tuple[int, tuple[str, int]]:
    """The fewest processes of a node that make whole copies of the model, and why.

    Where the copies' state is split over ``parallel.data_shard`` of them, that many at least.
    """
    names, unit = "parallel.tensor x parallel.pipeline", parallel.tensor * parallel.pipeline
    if parallel.data is None and parallel.data_shard is not None:
        names, unit = f"{names} x parallel.data_shard", unit * parallel.data_shard
    return unit // math.gcd(unit, nodes), (names, unit)


def _share_of_node(parallel: ParallelConfig, nodes: int) -> int:
    """The processes of a node where ``parallel.data`` says how many there are in all."""
    assert parallel.data is not None
    shards = parallel.tensor * parallel.pipeline
    if shards * parallel.data % nodes:
        near = multiples_near(parallel.data, nodes // math.gcd(shards, nodes))
        raise _refused(
            ("parallel.data", parallel.data),
            f"makes {shards * parallel.data} processes, which {nodes} nodes do not share evenly",
            f"nearest parallel.data: {near}; or another number of nodes",
        )
    return shards * parallel.data // nodes


def _fits(run_config: RunConfig | Params, processes: int) -> bool:
    try:
        layout_for(run_config, processes)
    except UserError:
        return False
    return True


def layout_for(run_config: RunConfig | Params, processes: int) -> Layout:
    """The layout of a run over ``processes`` processes, those of all nodes together.

    Raises:
        InvalidParams: the processes or a batch do not divide; never is one rounded.
    """
    parallel, training = run_config.parallel, run_config.training
    copies = _copies(parallel, processes)
    for field, micro in _micro_batches(run_config).items():
        _check_batches(training, parallel, copies, (field, micro))
    unit = training.micro_batch_size * copies
    return Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_stages=parallel.virtual_stages,
        data=copies,
        data_shard=parallel.data_shard or copies,
        micro_batches=training.global_batch_size // unit,
    )


def _copies(parallel: ParallelConfig, processes: int) -> int:
    """Copies of the model that so many processes make."""
    shards = parallel.tensor * parallel.pipeline
    if processes < 1 or processes % shards:
        raise _refused(
            ("launch.processes", processes),
            f"must be a multiple of parallel.tensor = {parallel.tensor} x parallel.pipeline = "
            f"{parallel.pipeline}, on all nodes together",
            f"nearest: {multiples_near(max(processes, 0), shards)}",
        )
    copies = processes // shards
    if parallel.data is not None and parallel.data != copies:
        raise _refused(
            ("parallel.data", parallel.data),
            f"{processes} processes make {copies} copies of the model",
            f"write launch.processes: {shards * parallel.data}, or parallel.data: {copies} or null",
        )
    if parallel.data_shard is not None and copies % parallel.data_shard:
        raise _refused(
            ("parallel.data_shard", parallel.data_shard),
            f"must divide the {copies} copies of the model that {processes} processes make",
            f"nearest: {divisors_near(parallel.data_shard, copies)}; or null for all",
        )
    return copies


def _micro_batches(run_config: RunConfig | Params) -> dict[str, int]:
    """The micro batch size of each phase, by where params.yaml says it."""
    sizes = {"training.micro_batch_size": run_config.training.micro_batch_size}
    later = run_config.data.phases
    if isinstance(run_config, RunConfig):
        later = later[1:]  # its first phase is section training
    for number, phase in enumerate(later):
        if phase.micro_batch_size is not None:
            sizes[f"data.phases[{number}].micro_batch_size"] = phase.micro_batch_size
    return sizes


def _check_batches(
    training: TrainingShape, parallel: ParallelConfig, copies: int, micro_batch: tuple[str, int]
) -> None:
    """Every batch must be a whole number of micro batches (name, size) on every copy."""
    field, micro = micro_batch
    unit = micro * copies
    names = ("global_batch_size", "rampup_start_batch_size", "rampup_increment")
    sizes: dict[str, int | None] = {name: getattr(training, name) for name in names}
    given = {name: size for name, size in sizes.items() if size is not None}
    for name, size in given.items():
        if size % unit:
            fitting = _fitting_copies(math.gcd(*given.values()), micro, parallel, copies)
            raise _refused(
                (f"training.{name}", size),
                f"must be divisible by {field} = {micro} x {copies} copies of the model = {unit}",
                f"nearest {name}: {multiples_near(size, unit)}{fitting}",
            )


def _fitting_copies(batches: int, micro: int, parallel: ParallelConfig, copies: int) -> str:
    """Numbers of copies that would suit all batches, whose greatest common divisor is given."""
    groups = parallel.data_shard or 1
    fitting = [n for n in divisors(batches // micro or 1) if n % groups == 0]
    if batches % micro or not fitting:
        return ""
    return (
        f"; nearest number of copies: {nearest_of(copies, fitting)} "
        f"(processes: {parallel.tensor * parallel.pipeline} per copy)"
    )
