"""What this machine cannot do for a run, and what it does slowly; without torch.

``stages.pretrain`` refuses by ``MACHINE_RULES`` before a process is started;
``stages.validate_config`` only warns of it, since data may be prepared on one machine for a
training on another. ``MACHINE_ADVICE`` are warnings in both. That there are enough GPUs for all
processes is found by ``lib.config.launch_plan``.

Rules have the form of those in ``lib.config.rule``; ``machine`` is what they are told of this one.
"""

from collections.abc import Iterator
from dataclasses import replace

from lib.config.launch_plan import process_count
from lib.config.nearest import divisors_near
from lib.config.operation import LaunchConfig, RuntimeConfig
from lib.config.rule import Rule, problems_of
from lib.config.run_config import Params, RunConfig
from lib.errors import InvalidParams, Problem
from lib.layers.attention_limits import AttentionCase, package_modules
from lib.layers.gpu_limits import OLDEST_FOR_BF16, OLDEST_FOR_TRITON, Capability, written
from lib.train.attention_rules import attention_cases, choose_another, limit
from lib.train.hardware import UNKNOWN, Gpu, Machine


def machine_findings(
    config: RunConfig | Params, launch: LaunchConfig, runtime: RuntimeConfig, here: Machine
) -> tuple[list[Problem], list[Problem]]:
    """What this machine cannot do for a run, and advice on what it can.

    Args:
        config: the run.
        launch: device and processes.
        runtime: attention and kernels.
        here: all that this machine has; of several nodes, how many there are.
    """
    is_on_gpus = launch.device == "cuda" or (launch.device == "auto" and bool(here.gpus))
    gpus = here.gpus if is_on_gpus else ()
    problems: list[Problem] = []
    try:
        processes = process_count(config, launch, len(here.gpus), here.nodes)
        machine = replace(here, gpus=gpus[:processes], processes=processes)
    except InvalidParams as refusal:
        problems += refusal.problems
        machine = replace(here, gpus=gpus, nodes=1)  # how nodes share the layers is not known
    if is_on_gpus and not gpus:
        return problems, []
    facts = {"config": config, "runtime": runtime, "machine": machine}
    return problems + problems_of(MACHINE_RULES, facts), problems_of(MACHINE_ADVICE, facts)


def gpus_compute_in_bf16(config: RunConfig | Params, machine: Machine) -> Iterator[Problem]:
    """GPUs before Ampere have no bf16 products in hardware."""
    old = _older(machine, OLDEST_FOR_BF16)
    if config.precision.compute == "bf16" and old:
        yield Problem(
            "precision.compute",
            "bf16",
            f"needs GPUs of compute capability {written(OLDEST_FOR_BF16)} or later, and "
            f"{_titles(old)}",
            "write fp16, or fp32",
        )


def attention_serves_on_this_machine(
    config: RunConfig | Params, runtime: RuntimeConfig, machine: Machine
) -> Iterator[Problem]:
    """A backend that was asked for by name is never replaced in silence."""
    name, cases = runtime.attention, attention_cases(config, runtime)
    capabilities = {gpu.capability: gpu.name for gpu in machine.gpus} or {None: "this CPU"}
    for capability, title in capabilities.items():
        if name == "auto" or capability == UNKNOWN:
            continue
        reason = limit(name, cases, capability) or _missing_package(
            name, cases, capability, machine
        )
        if reason is not None:
            yield Problem(
                "runtime.attention",
                name,
                f"it {reason} (on {title})",
                choose_another(cases, capability),
            )


def _missing_package(
    name: str, cases: list[AttentionCase], capability: Capability, machine: Machine
) -> str | None:
    modules = package_modules(name, capability, cases[0].dropout)
    if not modules or machine.modules & set(modules):
        return None
    return f"needs the package of {' or '.join(modules)}, which is not installed"


MACHINE_RULES: tuple[Rule, ...] = (gpus_compute_in_bf16, attention_serves_on_this_machine)


# ---- legal but unwise


def tensor_stays_within_a_node(config: RunConfig | Params, machine: Machine) -> Iterator[Problem]:
    """Tensor-parallel ranks talk in each layer, and between nodes that is slow.

    Source: Narayanan et al. 2021 (Efficient Large-Scale Language Model Training), takeaway 1:
    tensor parallelism up to the GPUs of a server, pipelines across servers.
    """
    tensor, processes = config.parallel.tensor, machine.processes
    if machine.nodes > 1 and processes % tensor:
        yield Problem(
            "parallel.tensor",
            str(tensor),
            f"some layers are shared across nodes, which have {processes} processes each: they "
            "talk several times in each layer, over the network",
            f"write {divisors_near(min(tensor, processes), processes)}, and share the rest by "
            "parallel.pipeline or data",
        )


def half_precision_is_for_gpus(config: RunConfig | Params, machine: Machine) -> Iterator[Problem]:
    """CPUs without products of their own for it convert each number, to fp32 and back."""
    compute = config.precision.compute
    if compute in ("bf16", "fp16") and not machine.gpus:
        yield Problem(
            "precision.compute",
            compute,
            "trains on a CPU here, and most CPUs compute in it more slowly than in fp32",
            "write fp32 for a run on CPUs",
        )


def gpus_run_fused_kernels(runtime: RuntimeConfig, machine: Machine) -> Iterator[Problem]:
    """Triton compiles for newer GPUs only; torch's own operations take the kernels' place."""
    old = _older(machine, OLDEST_FOR_TRITON)
    if runtime.kernels == "fused" and old:
        yield Problem(
            "runtime.kernels",
            "fused",
            f"needs GPUs of compute capability {written(OLDEST_FOR_TRITON)} or later, and "
            f"{_titles(old)}: torch's slower operations run instead",
            "write torch, which says so",
        )


MACHINE_ADVICE: tuple[Rule, ...] = (
    tensor_stays_within_a_node,
    half_precision_is_for_gpus,
    gpus_run_fused_kernels,
)


def _older(machine: Machine, first: tuple[int, int]) -> list[Gpu]:
    return [gpu for gpu in machine.gpus if UNKNOWN < gpu.capability < first]


def _titles(gpus: list[Gpu]) -> str:
    """GPUs and what they have: ``Tesla T4 has 7.5``, each kind once."""
    return ", ".join(dict.fromkeys(f"{gpu.name} has {written(gpu.capability)}" for gpu in gpus))
