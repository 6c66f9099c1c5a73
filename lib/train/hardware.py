"""What this machine offers, asked without importing torch (which takes seconds).

CUDA devices are counted by the driver's own library: it honours CUDA_VISIBLE_DEVICES, MIG slices
and containers exactly as torch will, which files under /dev and nvidia-smi do not, and it makes
no context, so it takes no memory on the device. Without the library there is no device to use.
"""

import ctypes
import importlib.util
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lib.errors import UserError

_NAME_BYTES = 256
# CUdevice_attribute: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
UNKNOWN = (0, 0)


@dataclass(frozen=True)
class Gpu:
    """A CUDA device.

    Attributes:
        name: as the driver says it.
        capability: compute capability, major and minor; ``UNKNOWN`` if the driver is silent.
        memory_bytes: all of it; 0 if the driver is silent.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int = 0


@dataclass(frozen=True)
class Machine:
    """What a machine has, or what a run takes of it.

    Attributes:
        gpus: its CUDA devices; of a run those that its processes get, none on the CPU.
        modules: of packages of attention, those that are installed.
        processes: of the run, on each node.
        nodes: machines like this one.
    """

    gpus: tuple[Gpu, ...] = ()
    modules: frozenset[str] = frozenset()
    processes: int = 1
    nodes: int = 1


def cuda_device_names() -> tuple[str, ...]:
    """Names of the CUDA devices that torch will see here, in its order."""
    return tuple(gpu.name for gpu in cuda_devices())


def cuda_devices() -> tuple[Gpu, ...]:
    """The CUDA devices that torch will see here, in its order."""
    if not _torch_is_built_for_cuda():
        return ()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(
        Gpu(
            _device_name(driver, index),
            _device_capability(driver, index),
            _device_memory(driver, index),
        )
        for index in range(count.value)
    )


def installed(modules: Iterable[str]) -> frozenset[str]:
    """Which of some modules are installed; their packages, which import torch, stay unread."""
    return frozenset(name for name in modules if _is_installed(name))


def _is_installed(module: str) -> bool:
    top, _, rest = module.partition(".")
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if found is None or not rest:
        return found is not None
    inside = Path(*rest.split("."))
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    return any(
        (folder / inside).is_dir() or (folder / inside.with_suffix(".py")).is_file()
        for folder in folders
    )


def cuda_memory_bytes() -> int:
    """Memory of the smallest CUDA device that torch will see here; 0 if there is none."""
    return min((gpu.memory_bytes for gpu in cuda_devices() if gpu.memory_bytes), default=0)


def _device_name(driver: ctypes.CDLL, index: int) -> str:
    device = ctypes.c_int(0)
    name = ctypes.create_string_buffer(_NAME_BYTES)
    if driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return "unknown"
    if driver.cuDeviceGetName(name, _NAME_BYTES, device) != 0:
        return "unknown"
    return name.value.decode(errors="replace")


def _device_capability(driver: ctypes.CDLL, index: int) -> tuple[int, int]:
    device, major, minor = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_int(0)
    if driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return UNKNOWN
    for number, attribute in ((major, _CAPABILITY_MAJOR), (minor, _CAPABILITY_MINOR)):
        if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device) != 0:
            return UNKNOWN
    return major.value, minor.value


def _device_memory(driver: ctypes.CDLL, index: int) -> int:
    device, size = ctypes.c_int(0), ctypes.c_size_t(0)
    if driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return 0
    return size.value if driver.cuDeviceTotalMem_v2(ctypes.byref(size), device) == 0 else 0


def _torch_is_built_for_cuda() -> bool:
    """Reads torch's version file: the CPU build cannot use a device, however many there are."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    version = Path(found.origin).with_name("version.py")
    return bool(re.search(r"^cuda\b.*=\s*['\"]", version.read_text(), re.MULTILINE))


def usable_cores() -> int:
    """Cores that this process may use: its CPU mask, or less where a container has a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, _container_quota()))


def _container_quota() -> int:
    limit = Path("/sys/fs/cgroup/cpu.max")
    if not limit.is_file():
        return 1 << 20
    quota, period = limit.read_text().split()
    return 1 << 20 if quota == "max" else max(1, int(quota) // int(period))


def choose_threads(requested: int | None, processes: int) -> int:
    """CPU threads of each process: as asked for, else as the environment says, else a share.

    torchrun would set 1 by default, at which a laptop trains at a fraction of its speed.

    Raises:
        UserError: the environment's OMP_NUM_THREADS is no number of threads.
    """
    if requested is not None:
        return requested
    # OpenMP takes a list, a number for each level of nested parallel regions: the first counts.
    chosen = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not chosen:
        return max(1, usable_cores() // processes)
    if not re.fullmatch(r"\+?[0-9]+", chosen) or int(chosen) < 1:
        raise UserError(
            f"OMP_NUM_THREADS = {os.environ['OMP_NUM_THREADS']}: must be a whole number of at "
            "least 1, or several joined by commas; correct it, unset it or give launch.threads"
        )
    return int(chosen)


def cpu_name() -> str:
    """The processor's model name."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", information.read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()
