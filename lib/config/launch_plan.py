"""From a run configuration and a number of processes to the layout of the training run.

Pure: no process is started and no hardware is asked here, so that the answers can be tested and
shown before anything runs. Parameters that are not resolved yet serve as well: a layout needs no
data.
"""

from dataclasses import dataclass

from lib.config.nearest import divisors_near, multiples_near
from lib.config.operation import LaunchConfig
from lib.config.run_config import Params, RunConfig
from lib.errors import UserError


@dataclass(frozen=True)
class Layout:
    """How a training run is laid over its processes.

    Attributes:
        tensor: processes that share each layer.
        pipeline: groups of layers on processes of their own.
        data: copies of the model.
        micro_batches: per step and copy, each of ``training.micro_batch_size`` samples.
    """

    tensor: int
    pipeline: int
    data: int
    micro_batches: int

    @property
    def processes(self) -> int:
        """Processes in all."""
        return self.tensor * self.pipeline * self.data


def choose_device(launch: LaunchConfig, gpus: int) -> str:
    """``"cuda"`` or ``"cpu"`` for a machine with so many GPUs.

    Raises:
        UserError: GPUs are asked for where there are none.
    """
    if launch.device == "cuda" and gpus == 0:
        raise UserError(
            "launch.device = cuda: this machine shows no GPU; write auto or cpu, or see what "
            "nvidia-smi and CUDA_VISIBLE_DEVICES say"
        )
    if launch.device == "auto":
        return "cuda" if gpus > 0 else "cpu"
    return launch.device


def process_count(run_config: RunConfig | Params, launch: LaunchConfig, gpus: int) -> int:
    """The processes to start on a machine with so many GPUs.

    ``launch.processes`` decides where it is given, then ``parallel.data``. Else a CPU run takes
    the fewest, and a GPU run the most GPUs over which the global batch divides: that may be fewer
    than there are, which the caller should say.

    Raises:
        UserError: the wanted processes do not fit the GPUs or the batch.
    """
    parallel, training = run_config.parallel, run_config.training
    device = choose_device(launch, gpus)
    shards = parallel.tensor * parallel.pipeline
    if launch.processes is not None:
        wanted, why = launch.processes, f"launch.processes = {launch.processes}"
    elif parallel.data is not None:
        wanted, why = shards * parallel.data, f"parallel.data = {parallel.data}"
    elif device == "cpu" or gpus < shards:
        wanted, why = shards, f"parallel.tensor x parallel.pipeline = {shards}"
    else:
        batches = training.global_batch_size // training.micro_batch_size
        copies = max(n for n in range(1, gpus // shards + 1) if batches % n == 0)
        wanted, why = shards * copies, ""
    if device == "cuda" and wanted > gpus:
        raise UserError(
            f"{why}: wants {wanted} GPUs, one per process, but this machine shows {gpus}; "
            f"write {gpus // shards * shards or shards} processes or less, or launch.device: cpu"
        )
    layout_for(run_config, wanted)
    return wanted


def layout_for(run_config: RunConfig | Params, processes: int) -> Layout:
    """The layout of a run over ``processes`` processes.

    Raises:
        UserError: the processes or the global batch do not divide; never is one rounded.
    """
    parallel, training = run_config.parallel, run_config.training
    shards = parallel.tensor * parallel.pipeline
    if processes < 1 or processes % shards:
        raise UserError(
            f"processes = {processes}: must be a multiple of parallel.tensor = {parallel.tensor} "
            f"x parallel.pipeline = {parallel.pipeline}; "
            f"nearest: {multiples_near(max(processes, 0), shards)} (launch.processes)"
        )
    copies = processes // shards
    if parallel.data is not None and parallel.data != copies:
        raise UserError(
            f"parallel.data = {parallel.data}: {processes} processes make {copies} copies of the "
            f"model; write launch.processes: {shards * parallel.data}, or parallel.data: {copies} "
            "or null"
        )
    batch, micro = training.global_batch_size, training.micro_batch_size
    if batch % (micro * copies):
        fitting = divisors_near(copies, max(1, batch // micro))
        raise UserError(
            f"training.global_batch_size = {batch}: must be divisible by "
            f"training.micro_batch_size = {micro} x {copies} copies of the model = "
            f"{micro * copies}; nearest global_batch_size: {multiples_near(batch, micro * copies)};"
            f" nearest number of copies: {fitting} (processes: {shards} per copy)"
        )
    return Layout(parallel.tensor, parallel.pipeline, copies, batch // (micro * copies))
