"""Megatron-LM's flags of parallelism, and the sums of the processes that they make."""

from lib.plan.megatron_flags import Importing

_STRATEGIES = {
    "no_shard": "optimizer",
    "optim": "optimizer",
    "optim_grads": "gradients",
    "optim_grads_params": "parameters",
}
_ZERO = {0: "optimizer", 1: "optimizer", 2: "gradients", 3: "parameters"}


def import_layout(importing: Importing) -> int | None:
    """Puts how the model is laid over processes; gives the copies of it, where they are known."""
    tensor = _size(importing, "tensor", "tensor-model-parallel-size")
    pipeline = _size(importing, "pipeline", "pipeline-model-parallel-size")
    copies = _copies(importing, tensor, pipeline)
    importing.put("parallel.data", copies, why=_why_copies(importing, copies))
    sequence = importing.arguments.has("sequence-parallel")
    alone = sequence and tensor == 1
    importing.put(
        "parallel.sequence",
        sequence and not alone,
        "sequence-parallel",
        why="Megatron switches it off where tensor-model-parallel-size is 1" if alone else "",
    )
    _virtual_stages(importing, pipeline)
    _uneven_stages(importing, pipeline)
    _sharding(importing, copies)
    _machines(importing)
    return copies


def _size(importing: Importing, name: str, flag: str) -> int:
    if not importing.arguments.has(flag):
        importing.put_default(f"parallel.{name}", 1, flag)
        return 1
    size = importing.arguments.whole(flag)
    if size is not None and size < 1:
        importing.refuse(flag, "must be 1 or more", "write 1 for none")
    importing.put(f"parallel.{name}", size or 1, flag)
    return max(1, size or 1)


def _copies(importing: Importing, tensor: int, pipeline: int) -> int | None:
    world, context = importing.launch.world_size, _context(importing)
    unit = tensor * pipeline * context
    if world is None:
        return None
    if world % unit:
        sizes = f"tensor {tensor} x pipeline {pipeline}" + (f" x context {context}" * (context > 1))
        importing.refuse(
            "tensor-model-parallel-size",
            f"{sizes} = {unit} must divide the {world} processes that the script starts",
            f"start {-(-world // unit) * unit} processes, or make the sizes smaller",
        )
        return None
    return world // unit


def _context(importing: Importing) -> int:
    """The size of context parallelism, which is looked at but not read: there is none here."""
    given = importing.arguments.given.get("context-parallel-size")
    text = given.values[0] if given and given.values else "1"
    return int(text) if text.isdecimal() and int(text) > 0 else 1


def _why_copies(importing: Importing, copies: int | None) -> str:
    if copies is None:
        return "the script does not say how many processes it starts: what the machine has"
    return f"{importing.launch.world_size} processes / (tensor x pipeline x context)"


def _virtual_stages(importing: Importing, pipeline: int) -> None:
    arguments, name = importing.arguments, "parallel.virtual_stages"
    flags = ("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage")
    if all(arguments.has(flag) for flag in flags):
        importing.refuse(flags[1], f"--{flags[0]} is given as well", "keep one of the two")
    if arguments.has(flags[0]):
        importing.put(name, arguments.whole(flags[0]) or 1, flags[0])
        return
    if not arguments.has(flags[1]):
        importing.put_default(name, 1, flags[0])
        return
    chunk, layers = arguments.whole(flags[1]), importing.value("model.num_layers")
    if not chunk or not isinstance(layers, int):
        return
    if layers % (pipeline * chunk):
        importing.refuse(
            flags[1],
            f"{chunk} layers x {pipeline} pipeline stages must divide the {layers} layers",
            f"write a divisor of {max(1, layers // pipeline)}",
        )
        return
    importing.put(name, layers // (pipeline * chunk), flags[1], why="chunks instead of layers")


def _uneven_stages(importing: Importing, pipeline: int) -> None:
    """The numbers of layers of the first and last stage, where they are given."""
    arguments, name = importing.arguments, "parallel.layers_per_chunk"
    flags = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
    ends = [arguments.whole(flag) if arguments.has(flag) else None for flag in flags]
    layers = importing.value("model.num_layers")
    if ends == [None, None] or not isinstance(layers, int):
        importing.put(name, None, why="split such that no stage is slower than it must be")
        return
    middle = pipeline - sum(end is not None for end in ends)
    rest = layers - sum(end or 0 for end in ends)
    if importing.value("parallel.virtual_stages") != 1:
        for flag in flags:
            importing.leave(flag, "write parallel.layers_per_chunk", changes_result=False)
        return
    if middle < 0 or rest < 0 or (rest % middle if middle else rest):
        importing.refuse(
            flags[0] if arguments.has(flags[0]) else flags[1],
            f"the other {rest} of {layers} layers must divide among {middle} pipeline stages",
            "change the numbers of layers of the first and last stage",
        )
        return
    between = [rest // middle] * middle if middle else []
    split = [end for end in ends[:1] if end is not None] + between
    importing.put(name, split + [end for end in ends[1:] if end is not None], *flags)


def _sharding(importing: Importing, copies: int | None) -> None:
    arguments, name = importing.arguments, "parallel.sharding"
    strategy, stage = (
        arguments.text("data-parallel-sharding-strategy"),
        arguments.whole("zero-stage"),
    )
    if strategy in _STRATEGIES:
        flags = ("data-parallel-sharding-strategy", "use-megatron-fsdp")
        importing.put(name, _STRATEGIES[strategy], *flags)
    elif arguments.has("use-torch-fsdp2"):
        importing.put(name, "parameters", "use-torch-fsdp2")
    elif stage in _ZERO:
        importing.put(name, _ZERO[stage], "zero-stage")
    else:
        why = "always split: without the flag each copy of Megatron holds all of the state"
        importing.put(name, "optimizer", "use-distributed-optimizer", why=why)
    if importing.value(name) != "optimizer":
        importing.agree("use-distributed-optimizer", "the optimizer's state is always split")
    importing.agree("use-megatron-fsdp", "parallel.sharding says what is split")
    instances = arguments.whole("num-distributed-optimizer-instances")
    shard = copies // instances if instances and copies and copies % instances == 0 else None
    importing.put("parallel.data_shard", shard, "num-distributed-optimizer-instances")


def _machines(importing: Importing) -> None:
    launch = importing.launch
    several = launch.nodes is not None and launch.nodes > 1
    importing.put("launch.nodes", launch.nodes if several else None, why="the launcher's")
    importing.put("launch.rendezvous", launch.rendezvous if several else None, why="the launcher's")
