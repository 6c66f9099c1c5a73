"""From a launch script or command line of Megatron-LM to its flags and its number of processes.

Nothing is executed: see ``lib.plan.shell_script`` for what of a script is followed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath

from lib.errors import UserError
from lib.plan.shell_script import Command, Followed, Source, follow_script

_FLAG = re.compile(r"--[A-Za-z]")
_LAUNCHERS = {"launch.py", "run.py"}
_FEWEST_FLAGS = 3
_PRINTING = {"echo", "printf", "cat", "sed"}
_SLURM = re.compile(r"^#SBATCH\s+(.*?)\s*(?:\s#.*)?$", re.MULTILINE)
_SLURM_SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus"}
# Of mpirun and srun: how many processes, and on how many machines.
_SHORT = {"-np": "ntasks", "-n": "ntasks", "-N": "nodes"}
_STARTERS = {"mpirun", "mpiexec", "srun"}


@dataclass(frozen=True)
class Flag:
    """A flag of the training program.

    Attributes:
        name: in small letters, without dashes in front, dashes for underscores: ``num-layers``.
        spelled: as it is written, ``--num_layers``.
        values: what follows it, variables put in; a ``$`` is left where one is not known.
    """

    name: str
    spelled: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Launch:
    """A training run as a script starts it.

    Attributes:
        program: the Python program, None where only flags were given.
        flags: in order.
        world_size: processes of all machines together; None where the text does not tell.
        nodes: machines; None where the text does not tell.
        rendezvous: ``host:port`` where they meet; None where the text does not tell.
        notes: what of the script was not followed or not clear.
    """

    program: str | None
    flags: tuple[Flag, ...]
    world_size: int | None
    nodes: int | None
    rendezvous: str | None
    notes: tuple[str, ...]


def read_launch(
    text: str, variables: Mapping[str, str], source: Source = lambda _name: None
) -> Launch:
    """Reads a script whose environment has these variables.

    Args:
        text: the script.
        variables: its environment; positional parameters are "1", "2", ...
        source: gives the files that it reads in with ``source``.

    Raises:
        UserError: a quote is never closed, or no flags are in it.
    """
    slurm = _slurm_options(text)
    known = {**_slurm_variables(slurm), **variables}
    followed = follow_script(text, known, source)
    notes = list(followed.notes)
    program, words, launcher = _training_command(followed, notes)
    flags = tuple(split_flags(words))
    if not flags:
        raise UserError(
            f"no flags: this text starts no program with --flags{_hint(text, followed)}"
        )
    options = {flag.name: flag.values[0] if flag.values else "" for flag in split_flags(launcher)}
    options |= _short_options(launcher)
    world_size, nodes = _processes(launcher, options, slurm)
    return Launch(program, flags, world_size, nodes, _rendezvous(options), tuple(notes))


def _hint(text: str, followed: Followed) -> str:
    """Where the flags may be instead."""
    scripts = [
        word for command in followed.commands for word in command.words if word.endswith(".sh")
    ]
    if scripts:
        return f"; it starts {scripts[0]}: give that script"
    return "; what << feeds to another program is not read: give that text" if "<<" in text else ""


def split_flags(words: Sequence[str]) -> Iterator[Flag]:
    """Flags with the words that follow each; words before the first are left out."""
    name, spelled, values = "", "", list[str]()
    for word in words:
        if _FLAG.match(word):
            if name:
                yield Flag(name, spelled, tuple(values))
            spelled, sign, value = word.partition("=")
            name, values = spelled[2:].replace("_", "-").lower(), [_unquoted(value)] if sign else []
        elif word not in ("\\", ""):
            values.append(_unquoted(word))
    if name:
        yield Flag(name, spelled, tuple(values))


def _unquoted(value: str) -> str:
    """Quotes that were themselves quoted reach the program in bash; nobody means that."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


# ---- which command


def _training_command(
    followed: Followed, notes: list[str]
) -> tuple[str | None, list[str], list[str]]:
    """The program that has most flags, its words, and the words in front of it."""
    bare = [command for command in followed.commands if _FLAG.match(command.words[0])]
    found = [
        (at, command)
        for command in followed.commands
        if command not in bare and (at := _program_place(command)) is not None
    ]
    found = [each for each in found if _count_flags(each[1].words[each[0] :]) >= _FEWEST_FLAGS]
    loose = [word for command in bare for word in command.words]
    if not found:
        return None, loose or _flags_of_variables(followed, notes), []
    counts = [_count_flags(command.words[at:]) for at, command in found]
    at, best = found[counts.index(max(counts))]
    others = [
        str(command.line)
        for (_, command), count in zip(found, counts, strict=True)
        if command is not best and 2 * count >= max(counts)
    ]
    if others:
        notes.append(
            f"line {best.line}: this command is read; there are others in line {', '.join(others)}"
        )
    if bare:
        notes.append(
            f"line {bare[0].line}: begins with a flag, so the line before it does not end in a "
            "backslash (or has a comment or blank after it), and bash would stop there; its flags "
            "are read all the same"
        )
    return best.words[at], [*best.words[at + 1 :], *loose], [*best.outer, *best.words[:at]]


def _count_flags(words: Sequence[str]) -> int:
    return sum(1 for word in words if _FLAG.match(word))


def _program_place(command: Command) -> int | None:
    """Where in a command the Python program is; None where it starts none."""
    if PurePosixPath(command.words[0]).name in _PRINTING:
        return None
    for at, word in enumerate(command.words):
        name = PurePosixPath(word).name
        if name.endswith(".py") and name not in _LAUNCHERS:
            return at
        is_module = at > 0 and command.words[at - 1] in ("-m", "--module")
        if is_module and not word.startswith("torch.distributed"):
            return at
    return None


def _flags_of_variables(followed: Followed, notes: list[str]) -> list[str]:
    """Where no program is started, the variable that holds most flags."""
    best, most = "", list[str]()
    for name, value in followed.environment.variables.items():
        words = value if isinstance(value, list) else value.split()
        if _count_flags(words) > _count_flags(most):
            best, most = name, words
    if most:
        notes.append(f"no program is started here; the flags in the variable {best} are read")
    return [part for word in most for part in ([word] if _FLAG.match(word) else word.split())]


# ---- how many processes


def _slurm_options(text: str) -> dict[str, str]:
    """What ``#SBATCH`` lines say, by long name."""
    options: dict[str, str] = {}
    for line in _SLURM.findall(text):
        for name, _, value in re.findall(r"--?([A-Za-z][\w-]*)(=|\s+)([^-\s]\S*)", line):
            options[_SLURM_SHORT.get(name, name)] = value
    return options


def _slurm_variables(options: Mapping[str, str]) -> dict[str, str]:
    """The variables that Slurm sets for such a job."""
    nodes, tasks = _whole(options.get("nodes")), _whole(options.get("ntasks-per-node"))
    gpus = _slurm_gpus(options)
    variables = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_GPUS_ON_NODE": gpus,
        "SLURM_GPUS_PER_NODE": gpus,
        "SLURM_NTASKS": nodes * tasks if nodes and tasks else _whole(options.get("ntasks")),
    }
    return {name: str(number) for name, number in variables.items() if number is not None}


def _slurm_gpus(options: Mapping[str, str]) -> int | None:
    written = options.get("gpus-per-node") or options.get("gres") or ""
    return _whole(written.rpartition(":")[2])


def _whole(text: str | None) -> int | None:
    """A positive whole number; None for anything else."""
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None


def _short_options(launcher: Sequence[str]) -> dict[str, str]:
    """Options of one letter, by long name, of a launcher that has them so."""
    if not {PurePosixPath(word).name for word in launcher} & _STARTERS:
        return {}
    return {_SHORT[word]: value for word, value in pairwise(launcher) if word in _SHORT}


def _processes(
    launcher: Sequence[str], options: Mapping[str, str], slurm: Mapping[str, str]
) -> tuple[int | None, int | None]:
    """Processes in all, and machines."""
    names = {PurePosixPath(word).name for word in launcher}
    written = next(
        (options[name] for name in ("nnodes", "num-nodes", "nodes") if name in options), None
    )
    nodes = _whole(written)
    if written is None:
        nodes = _whole(slurm.get("nodes", "1"))
    elastic = {"torchrun", "deepspeed"} & names or any(
        "torch.distributed" in name for name in names
    )
    if elastic or "nproc-per-node" in options:
        gpus = options.get("nproc-per-node", options.get("num-gpus", "1"))
        if names & {"deepspeed"} and "num-gpus" not in options:
            gpus = None  # as many as the machine has
        per_node = _whole(gpus)
        return (nodes * per_node if nodes and per_node else None), nodes
    tasks = _whole(options.get("ntasks"))
    per_node = _whole(options.get("ntasks-per-node") or slurm.get("ntasks-per-node"))
    if tasks or slurm.get("ntasks"):
        return tasks or _whole(slurm.get("ntasks")), nodes
    if names & _STARTERS:
        return (nodes * per_node if nodes and per_node else None), nodes
    return (None, nodes) if not launcher else (1, 1)


def _rendezvous(options: Mapping[str, str]) -> str | None:
    """``host:port`` of machine 0."""
    endpoint = options.get("rdzv-endpoint", "")
    if not endpoint and "master-addr" in options:
        endpoint = f"{options['master-addr']}:{options.get('master-port', '29500')}"
    return endpoint if re.fullmatch(r"[\w.-]+:\d+", endpoint) else None
