"""What an exception of torch, NCCL, gloo or Triton means on a machine, and what to try.

Libraries tell the cause in words of their own, deep in a traceback. Here are the words to look
for, the most telling first.
"""

import re
from dataclasses import dataclass

from lib.train.memory_crash import SIGNS

_LONGEST_LINE = 200
# Our own functions on a stack, of faulthandler or a traceback; try_... says what was being tried.
_OWN_FUNCTION = re.compile(r'File ".*lib/hardware/\w+\.py", line \d+,? in (\w+)')


@dataclass(frozen=True)
class Cause:
    """What an exception comes to.

    Attributes:
        seen: what happened.
        meaning: what that means.
        remedy: what to try.
    """

    seen: str
    meaning: str
    remedy: str


# Pattern, meaning, remedy.
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"Address already in use|EADDRINUSE|address already in use",
        "another program listens at the port where the processes would meet",
        "end that program (`ss -ltnp` names it), or choose another port (MASTER_PORT, "
        "launch.rendezvous)",
    ),
    (
        r"Unable to find address for|[Nn]o socket interface|Unable to find interface"
        r"|no interface found|No such device",
        "the network interface that is asked for does not exist here, or has no address",
        "unset GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or name an interface that `ip -br addr` "
        "shows as UP",
    ),
    (
        r"/dev/shm|shared memory segment|Bus error|exit code -7\b|No space left on device",
        "shared memory is too small: processes of one machine exchange data through /dev/shm",
        "give the container more (`docker run --shm-size=16g` or `--ipc=host`), and remove files "
        "that dead processes left in /dev/shm",
    ),
    (
        r"Name or service not known|gaierror|getaddrinfo|Temporary failure in name resolution",
        "this machine's own name has no address, which gloo and torch ask for",
        "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface to use",
    ),
    (
        r"driver version is insufficient|driver on your system is too old|CUDA_ERROR_SYSTEM_DRIVER",
        "the driver is older than the CUDA that torch was built for",
        "update the NVIDIA driver, or install a torch build for an older CUDA",
    ),
    (
        r"no kernel image is available|not compatible with the current PyTorch",
        "torch was not built for this kind of GPU",
        "install a torch build that names its compute capability (torch.cuda.get_arch_list())",
    ),
    (
        r"invalid device ordinal|out of range.*device",
        "there are fewer GPUs than processes",
        "ask for as many processes as `nvidia-smi -L` lists, and look at CUDA_VISIBLE_DEVICES",
    ),
    (
        SIGNS,
        "the GPU's memory is taken, by other programs most likely",
        "end the programs that `nvidia-smi` lists",
    ),
    (
        r"Failed to find C compiler|Python\.h|fatal error: .*\.h: No such file",
        "Triton builds its kernels with a C compiler and Python's headers, which are missing",
        "install gcc and python3-dev, or set CC; until then runtime.kernels: torch works",
    ),
    (
        r"uncorrectable ECC|CUDA_ERROR_ECC|unspecified launch failure|illegal memory access"
        r"|fallen off the bus|Xid",
        "the GPU reported a fault while it computed",
        "look for Xid messages in `dmesg`, reset or exchange the GPU, and check it once more",
    ),
    (
        r"did not finish within|[Tt]imed out|Timeout",
        "a process waits for another that never answers: a blocked port or interface, or a link "
        "between GPUs that loses data",
        "run once more with NCCL_DEBUG=INFO; try GLOO_SOCKET_IFNAME=lo on one machine, another "
        "interface on several, and NCCL_P2P_DISABLE=1: if that helps, switch off ACS and the IOMMU",
    ),
    (
        r"exit code -9\b",
        "the system killed a process, for want of memory most likely",
        "raise the container's memory limit; `dmesg` names what the out-of-memory killer ended",
    ),
    (
        r"exit code -(4|11|6)\b",
        "a process crashed in native code: libraries that do not fit each other, or the driver",
        "install what requirements.lock names in a fresh environment, and update the driver",
    ),
    (
        r"NCCL error|ncclSystemError|ncclInternalError|unhandled (system|cuda) error",
        "NCCL could not set up its connections",
        "run once more with NCCL_DEBUG=INFO, whose last WARN line names the cause; try "
        "NCCL_P2P_DISABLE=1, then NCCL_SHM_DISABLE=1, to find which transport is at fault",
    ),
    (
        r"libcuda|libcudart|CUDA driver|Found no NVIDIA driver|cuInit|CUDA (unknown )?error",
        "the CUDA driver does not work here",
        "see that `nvidia-smi` works for this user and in this container (`docker run --gpus all`)",
    ),
)


def explain(error: BaseException) -> Cause:
    """What an exception means, by what it says.

    Args:
        error: of any library; of ``run_on_ranks`` too, with the tracebacks of its ranks.
    """
    text = f"{type(error).__name__}: {error}"
    for pattern, meaning, remedy in _KNOWN:
        if found := re.search(pattern, text):
            return Cause(_telling_line(text, found.start()) + _where(text), meaning, remedy)
    return Cause(
        _telling_line(text, len(text.rstrip())) + _where(text),
        "this is no fault that is known here",
        "search for this line; with NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL the "
        "libraries say more",
    )


def _telling_line(text: str, place: int) -> str:
    """The line at a place of a text, cut to a length that can be shown."""
    begin = text.rfind("\n", 0, place) + 1
    line = text[begin:].split("\n", 1)[0].strip()
    line = line.removesuffix("; it stands at").rstrip(".")
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..."


def _where(text: str) -> str:
    """What was being tried, where the text has a stack of our own."""
    names = [name for name in _OWN_FUNCTION.findall(text) if not name.startswith("_")]
    names = [name for name in names if name.startswith("try_")] or names
    return f" (in {names[0].removeprefix('try_').replace('_', ' ')})" if names else ""
