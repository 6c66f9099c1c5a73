"""Checks of what the machine says of itself: sizes, versions, variables, ports. Torch-free."""

import errno
import socket
from collections.abc import Iterable

from lib.hardware.facts import Facts
from lib.hardware.findings import Check, Finding, fine, not_applicable

_GB = 1e9
_LEAST_MEMORY, _LEAST_DISK = 4 * _GB, 10 * _GB
# NCCL lays a segment of some 10 MB for each pair of GPUs that cannot reach each other directly.
_LEAST_SHM_PER_GPU, _SHM_PER_PAIR = 16 * 2**20, 32 * 2**20
_LEAST_SHM = 16 * 2**20
# A run needs these; the other packages of the lock are for data, the workflow and the tests.
_NEEDED = ("torch", "triton", "numpy", "pydantic", "safetensors")
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SLOWING_VARIABLES = {
    "NCCL_P2P_DISABLE": "GPUs send everything through host memory, several times slower",
    "NCCL_SHM_DISABLE": "GPUs that cannot reach each other directly send by the network",
    "NCCL_NVLS_DISABLE": "NVSwitch does not add numbers up itself",
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for each kernel of the GPU",
    "TORCH_DISTRIBUTED_DEBUG": "torch checks each collective",
}


def check_sizes(facts: Facts) -> Iterable[Finding]:
    """Cores, memory, shared memory and disk."""
    yield fine("CPU", f"{facts.cpu}, {facts.cores} usable cores", cores=float(facts.cores))
    yield _size(
        "memory",
        facts.memory_bytes,
        _LEAST_MEMORY,
        "tokenising and loading a model may be killed for want of memory",
        "end other programs, or raise the container's memory limit",
    )
    yield _size(
        "disk",
        facts.disk_bytes,
        _LEAST_DISK,
        "a corpus, its tokens and checkpoints may not fit",
        "make room, or move the project (state/ and data/) to a larger disk",
    )
    yield _shared_memory(facts)


def _size(name: str, size: float, least: float, meaning: str, remedy: str) -> Finding:
    seen = f"{size / _GB:.1f} GB free"
    if size >= least:
        return fine(name, seen)
    return Finding(name=name, status="warning", seen=seen, meaning=meaning, remedy=remedy)


def _shared_memory(facts: Facts) -> Finding:
    name, free, gpus = "shared memory (/dev/shm)", facts.shm_bytes, len(facts.gpus)
    if free is None:
        return not_applicable(name, "this system has none")
    seen = f"{free / 2**20:,.0f} MiB free"
    least = _LEAST_SHM_PER_GPU * gpus if gpus > 1 else _LEAST_SHM
    wanted = _SHM_PER_PAIR * gpus**2 if gpus > 1 else _LEAST_SHM
    if free >= wanted:
        return fine(name, seen)
    return Finding(
        name=name,
        status="failed" if gpus > 1 and free < least else "warning",
        seen=f"{seen}, {wanted / 2**20:,.0f} MiB wanted for {max(1, gpus)} GPUs",
        meaning="NCCL keeps its buffers between processes there, and ends with a bus error or a "
        "system error when they do not fit",
        remedy="`docker run --shm-size=16g` or `--ipc=host`; else `mount -o remount,size=16g "
        "/dev/shm`; remove what dead processes left there",
    )


def check_versions(facts: Facts) -> Iterable[Finding]:
    """Python and packages against requirements.lock."""
    minor = tuple(int(part) for part in facts.python.split(".")[:2])
    if (3, 11) <= minor <= (3, 12):
        yield fine("Python", facts.python)
    else:
        yield Finding(
            name="Python",
            status="warning",
            seen=facts.python,
            meaning="the project is tested with 3.11 and 3.12",
            remedy="make setup PYTHON=/path/to/python3.12",
        )
    for name in _NEEDED:
        yield _version(name, facts.installed.get(name), facts.locked.get(name))
    missing = sorted(set(facts.locked) - set(facts.installed) - set(_NEEDED))
    if missing:
        shown = ", ".join(missing[:4]) + (" ..." if len(missing) > 4 else "")
        yield not_applicable("other packages", f"{len(missing)} not installed: {shown}")


def _version(name: str, found: str | None, locked: str | None) -> Finding:
    setup = "make setup, which installs what requirements.lock names"
    if found is None:
        return Finding(
            name=name,
            status="failed" if name != "triton" else "warning",
            seen="is not installed",
            meaning="training needs it" if name != "triton" else "fused kernels need it",
            remedy=setup,
        )
    # A local tag (2.13.0+cu130) names a build, not another version.
    if locked is None or found.split("+")[0] == locked:
        return fine(name, found)
    return Finding(
        name=name,
        status="warning",
        seen=f"{found}, requirements.lock has {locked}",
        meaning="other versions may work, but results were not compared on them",
        remedy=setup,
    )


def check_gpu_count(facts: Facts) -> Iterable[Finding]:
    """The GPUs that torch will see, against those present and those asked for."""
    name, seen = "number of GPUs", len(facts.gpus)
    text = f"{seen} visible to torch"
    present = facts.gpus_present or 0
    wanted = facts.gpus_wanted or 0
    if present > seen:
        text += f", {present} in the machine"
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    meaning, remedy = _why_fewer(facts, visible)
    if wanted > seen:
        missing = f"{text}, {wanted} asked for"
        yield Finding(name=name, status="failed", seen=missing, meaning=meaning, remedy=remedy)
    elif present > seen and (seen == 0 or visible is not None):  # a container may get a part
        yield Finding(name=name, status="warning", seen=text, meaning=meaning, remedy=remedy)
    elif seen == 0:
        yield not_applicable(name, "no GPU: training runs on the CPU")
    else:
        yield fine(name, text)


def _why_fewer(facts: Facts, visible: str | None) -> tuple[str, str]:
    if visible is not None:
        return (
            f"CUDA_VISIBLE_DEVICES = {visible!r} hides GPUs; an empty or a wrong entry hides all "
            "that follow",
            "unset it, or list what `nvidia-smi -L` shows",
        )
    if "+cpu" in facts.installed.get("torch", ""):
        return (
            "this torch is the build without CUDA",
            "install torch's CUDA build: rm -r .venv, make setup",
        )
    return (
        "the driver, or the container, does not give the GPU to this process",
        "see that `nvidia-smi` lists it here; in a container `docker run --gpus all`; `dmesg` says "
        "if it has fallen off the bus",
    )


def check_environment(facts: Facts) -> Iterable[Finding]:
    """Variables that make runs fail or slow."""
    problems = [*_interfaces(facts), *_slowing(facts), *_threads(facts)]
    yield from problems or [fine("environment variables", "none that disturbs")]


def _interfaces(facts: Facts) -> Iterable[Finding]:
    for variable in _INTERFACE_VARIABLES:
        value = facts.environment.get(variable, "")
        if value and not names_an_interface(value, facts.interfaces):
            yield Finding(
                name=variable,
                status="failed",
                seen=f"{value!r}; this machine has {', '.join(facts.interfaces)}",
                meaning="it names no network interface of this machine, so processes cannot meet",
                remedy=f"unset {variable}, or name one of these (`ip -br addr` shows which are UP)",
            )


def names_an_interface(value: str, interfaces: Iterable[str]) -> bool:
    """Whether a value, by NCCL's rules, leaves an interface.

    Names are beginnings, joined by commas; ``=`` in front wants whole names, ``^`` excludes them.
    """
    excludes, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    names = value.lstrip("^=").split(",")

    def matches(interface: str) -> bool:
        return any(interface == name if exact else interface.startswith(name) for name in names)

    return any(matches(interface) != excludes for interface in interfaces)


def _slowing(facts: Facts) -> Iterable[Finding]:
    for variable, effect in _SLOWING_VARIABLES.items():
        value = facts.environment.get(variable, "")
        if facts.gpus and value not in ("", "0", "OFF", "INFO"):
            yield Finding(
                name=variable,
                status="warning",
                seen=f"is {value}",
                meaning=effect,
                remedy=f"unset {variable}, unless a fault is being looked for",
            )


def _threads(facts: Facts) -> Iterable[Finding]:
    value = facts.environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if value and not (value.isdecimal() and int(value) > 0):
        yield Finding(
            name="OMP_NUM_THREADS",
            status="failed",
            seen=f"is {value!r}",
            meaning="it is no number of threads",
            remedy="unset it: each process then gets its share of the cores",
        )
    elif value and int(value) * max(1, len(facts.gpus)) > facts.cores:
        yield Finding(
            name="OMP_NUM_THREADS",
            status="warning",
            seen=f"{value} for each of {max(1, len(facts.gpus))} processes, {facts.cores} cores",
            meaning="more threads than cores wait for each other",
            remedy="unset it: each process then gets its share of the cores",
        )


def check_ports(facts: Facts) -> Iterable[Finding]:
    """Whether processes can meet: a name, a free port, a connection to oneself."""
    port = facts.environment.get("MASTER_PORT", "")
    address = facts.environment.get("MASTER_ADDR", "localhost")
    if port.isdecimal() and address in ("localhost", "127.0.0.1", "::1", facts.host_address):
        yield _listening("MASTER_PORT", int(port))
    yield _listening("loopback", 0)
    if facts.host_address is None:
        yield Finding(
            name="own host name",
            status="warning",
            seen="has no address",
            meaning="gloo and torch look it up where no interface is named",
            remedy="add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    else:
        yield fine("own host name", f"is {facts.host_address}")


def _listening(name: str, port: int) -> Finding:
    """Listens at a port of loopback (0: any that is free) and calls it."""
    try:
        with socket.create_server(("127.0.0.1", port)) as door:
            door.settimeout(2.0)
            with socket.create_connection(door.getsockname(), timeout=2.0):
                door.accept()[0].close()
            return fine(name, f"port {door.getsockname()[1]} can be used")
    except (OSError, OverflowError) as error:
        busy = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        return Finding(
            name=name,
            status="failed",
            seen=f"port {port}: {'is in use' if busy else error}",
            meaning="another program listens there, and processes cannot meet at this port"
            if busy
            else "this machine cannot connect to itself, or the port is not allowed",
            remedy=f"end that program (`ss -ltnp 'sport = :{port}'` names it), or choose another "
            "port"
            if busy
            else "see firewall rules and that `ip addr show lo` is UP; choose a port of 1024-65535",
        )


MACHINE_CHECKS = (
    Check("cores, memory and disk", check_sizes),
    Check("versions", check_versions),
    Check("number of GPUs", check_gpu_count),
    Check("environment variables", check_environment),
    Check("ports", check_ports),
)
