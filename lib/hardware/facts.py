"""What the machine says of itself, asked without importing torch; checks read nothing else.

Tests make facts of their own: a machine with less shared memory, or with fewer GPUs.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lib.train.hardware import cpu_name, cuda_device_names, usable_cores

_GPU_FOLDERS = Path("/proc/driver/nvidia/gpus")
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What there is.

    Attributes:
        cpu: name of the processor.
        cores: that this process may use.
        memory_bytes: free memory of the machine.
        shm_bytes: free bytes of /dev/shm; None where there is none.
        disk_bytes: free bytes where the project lies.
        interfaces: names of the network interfaces.
        host_address: of this machine's own name; None if it has none.
        gpus: names of the GPUs that torch will see.
        gpus_present: GPUs that the kernel's driver has, visible or not; None where it is not told.
        gpus_wanted: how many there have to be; None: as many as there are.
        python: its version.
        locked: versions of packages by requirements.lock.
        installed: those that are installed.
        environment: variables.
        time_limit_s: how long ranks may take.
    """

    cpu: str = "CPU"
    cores: int = 1
    memory_bytes: int = 0
    shm_bytes: int | None = None
    disk_bytes: int = 0
    interfaces: tuple[str, ...] = ()
    host_address: str | None = None
    gpus: tuple[str, ...] = ()
    gpus_present: int | None = None
    gpus_wanted: int | None = None
    python: str = ""
    locked: dict[str, str] = field(default_factory=dict)
    installed: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    time_limit_s: float = 60.0


def read_facts(project: Path, gpus_wanted: int | None = None) -> Facts:
    """Asks the machine.

    Args:
        project: folder of the project, with requirements.lock.
        gpus_wanted: how many GPUs there have to be.
    """
    locked = locked_versions(project / "requirements.lock")
    return Facts(
        cpu=cpu_name(),
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().available,
        shm_bytes=shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None,
        disk_bytes=shutil.disk_usage(project).free,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        host_address=_host_address(),
        gpus=cuda_device_names(),
        gpus_present=len(list(_GPU_FOLDERS.iterdir())) if _GPU_FOLDERS.is_dir() else None,
        gpus_wanted=gpus_wanted,
        python=platform.python_version(),
        locked=locked,
        installed=_installed_versions(locked),
        environment=dict(os.environ),
    )


def locked_versions(lock: Path) -> dict[str, str]:
    """Package and version of each line ``name==version``; nothing without the file."""
    if not lock.is_file():
        return {}
    return dict(re.findall(r"^([\w.\-]+)==([\w.!]+)", lock.read_text(), re.MULTILINE))


def _installed_versions(names: dict[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _host_address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
