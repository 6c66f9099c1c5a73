"""How many machines train together, which of them this one is, and where they meet.

What ``params.yaml`` says comes first (section ``launch``), field by field; then what Slurm sets
for a step that ``srun`` started with one task per node; else it is one machine. All machines read
one ``params.yaml`` on a shared file system, so the number of a machine may also stand in the
environment, as DRYDOCK_NODE_RANK.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lib.config.operation import LaunchConfig, host_and_port
from lib.errors import UserError

NODE_RANK_VARIABLE = "DRYDOCK_NODE_RANK"
# Below the ports that the kernel gives to outgoing connections (from 32768 on, on Linux).
_FIRST_SLURM_PORT, _SLURM_PORTS = 20000, 10000
_SRUN = "srun --ntasks-per-node=1 python -m stages.pretrain"
# srun sets these for every task; the batch script itself, which runs on the first node, has none.
_ONLY_IN_A_STEP = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NODELIST")


@dataclass(frozen=True)
class Nodes:
    """The machines of one training run.

    Attributes:
        count: how many there are.
        rank: the number of this one, from 0.
        rendezvous: host and port of node 0 where they meet; None when there is one machine.
    """

    count: int
    rank: int
    rendezvous: tuple[str, int] | None

    def address(self) -> str:
        """``host:port``, as it is written in params.yaml."""
        assert self.rendezvous is not None
        host, port = self.rendezvous
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


ONE_NODE = Nodes(1, 0, None)


def find_nodes(launch: LaunchConfig, environ: Mapping[str, str]) -> Nodes:
    """The machines of this run, from the section ``launch`` and the environment.

    Raises:
        UserError: what is said is partial or contradicts itself; the text names field, value,
            rule and remedy.
    """
    if launch.nodes == 1:
        _require_no_number(launch, "launch.nodes is 1")
        return ONE_NODE
    slurm = _slurm_step(environ, launch)
    if launch.nodes is None and slurm is None:
        _require_no_number(launch, "launch.nodes is null")
        if launch.rendezvous is not None:
            raise UserError(
                f"launch.rendezvous = {launch.rendezvous}: is where several nodes meet, but "
                "launch.nodes is null and Slurm started no step here; write launch.nodes, or "
                "launch.rendezvous: null"
            )
        return ONE_NODE
    count = launch.nodes if launch.nodes is not None else slurm.count if slurm else 1
    rank = _rank(launch, environ, slurm, count)
    return Nodes(count, rank, _meeting_point(launch, slurm, count))


def _require_no_number(launch: LaunchConfig, why: str) -> None:
    if launch.node_rank:
        raise UserError(
            f"launch.node_rank = {launch.node_rank}: numbers one of several nodes, but {why}; "
            "write how many there are in launch.nodes, or launch.node_rank: null"
        )


def _rank(
    launch: LaunchConfig, environ: Mapping[str, str], slurm: "_Step | None", count: int
) -> int:
    if launch.node_rank is not None:
        field, rank = "launch.node_rank", launch.node_rank
    elif environ.get(NODE_RANK_VARIABLE):
        field, rank = NODE_RANK_VARIABLE, _whole_number(environ, NODE_RANK_VARIABLE)
    elif slurm is None:
        raise UserError(
            f"launch.nodes = {count}: which of them this machine is must be said; set "
            f"{NODE_RANK_VARIABLE}=0 where launch.rendezvous is, 1 and so on elsewhere (or "
            "launch.node_rank), or start with Slurm's srun"
        )
    elif slurm.count != count:
        raise UserError(
            f"launch.nodes = {count}: Slurm started this step on {slurm.count} nodes; write null, "
            f"or ask srun for {count}"
        )
    else:
        field, rank = "SLURM_NODEID", slurm.rank
    if rank >= count:
        raise UserError(
            f"{field} = {rank}: must be below the number of nodes, which is {count} (they are "
            f"numbered from 0); write 0 to {count - 1}, or more in launch.nodes"
        )
    return rank


def _meeting_point(launch: LaunchConfig, slurm: "_Step | None", count: int) -> tuple[str, int]:
    if launch.rendezvous is not None:
        place = host_and_port(launch.rendezvous)
        assert place is not None, "the section's type wants host:port"
        return place
    if slurm is None:
        raise UserError(
            f"launch.nodes = {count}: launch.rendezvous must say where they meet; write the name "
            "of node 0 and a free port of it, such as gpu001:29500"
        )
    return slurm.first_host, slurm.port


@dataclass(frozen=True)
class _Step:
    """What Slurm says about the step that this process belongs to."""

    count: int
    rank: int
    first_host: str
    port: int


def _slurm_step(environ: Mapping[str, str], launch: LaunchConfig) -> _Step | None:
    """The step of several nodes that srun started here, if it did."""
    count_name = _first_set(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if count_name is None:
        return None
    count = _whole_number(environ, count_name)
    if count <= 1:
        return None
    if _first_set(environ, *_ONLY_IN_A_STEP) is None:
        if launch.nodes is not None:  # started by hand inside an allocation
            return None
        raise UserError(
            f"{count_name} = {count}: this command runs on the first node only, so the others "
            f"would be missing; start it on all of them: {_SRUN}; or write launch.nodes: 1 to "
            "train on this node alone"
        )
    _require_one_task_per_node(environ, count)
    rank_name = _first_set(environ, "SLURM_NODEID", "SLURM_PROCID")
    hosts_name = _first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if rank_name is None or hosts_name is None:
        missing = "SLURM_NODEID" if rank_name is None else "SLURM_STEP_NODELIST"
        raise UserError(
            f"{missing} is not set, though {count_name} = {count}: it says which node this is, or "
            f"where node 0 is; start with {_SRUN}, or write launch.nodes, node_rank and rendezvous"
        )
    hosts = expand_node_list(environ[hosts_name], hosts_name)
    job_name = _first_set(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    job = _whole_number(environ, job_name) if job_name else 0
    # Two jobs on one node must not meet at one port.
    port = _FIRST_SLURM_PORT + job % _SLURM_PORTS
    return _Step(count, _whole_number(environ, rank_name), hosts[0], port)


def _require_one_task_per_node(environ: Mapping[str, str], nodes: int) -> None:
    name = _first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if name is not None and _whole_number(environ, name) != nodes:
        raise UserError(
            f"{name} = {environ[name]}: must be one task per node, and there are {nodes} nodes: "
            f"each task starts a training process for every GPU of its node; start with {_SRUN}"
        )


def _first_set(environ: Mapping[str, str], *names: str) -> str | None:
    return next((name for name in names if environ.get(name)), None)


def _whole_number(environ: Mapping[str, str], name: str) -> int:
    if re.fullmatch(r"[0-9]+", environ[name], re.ASCII) is None:
        raise UserError(f"{name} = {environ[name]}: must be a whole number; correct or unset it")
    return int(environ[name])


def expand_node_list(text: str, name: str = "node list") -> list[str]:
    """Every host of a list as Slurm writes it, such as ``gpu[001-003,007],login1``, in its order.

    Args:
        text: the list. Numbers keep their leading zeros; a name may have several brackets, of
            which the last counts fastest.
        name: what to call the list in an error.

    Raises:
        UserError: the text is no such list.
    """
    pattern = r"(?:[\w.-]|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])+"
    if re.fullmatch(f"{pattern}(?:,{pattern})*", text, re.ASCII) is None:
        raise UserError(
            f"{name} = {text}: must be names joined by commas, numbers of them in brackets, such "
            "as gpu[001-003,007],login1; write launch.rendezvous, which is used instead"
        )
    return [host for part in re.findall(pattern, text, re.ASCII) for host in _hosts_of(part)]


def _hosts_of(part: str) -> list[str]:
    hosts = [""]
    for fixed, ranges in re.findall(r"([^\[\]]+)|\[([^\]]+)\]", part):
        endings = [fixed] if fixed else [n for r in ranges.split(",") for n in _numbers_of(r)]
        hosts = [host + ending for host in hosts for ending in endings]
    return hosts


def _numbers_of(text: str) -> list[str]:
    first, _, last = text.partition("-")
    return [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
