"""What NVIDIA's management library tells of GPUs and their links; nothing where it is missing.

No check fails for want of it: every question that it does not answer gives None or nothing.
Devices are those of the CUDA driver (which honours CUDA_VISIBLE_DEVICES), found by PCI address.
"""

import ctypes
from dataclasses import dataclass

_MOST_LINKS = 18
_NVLINK_SPEED_FIELD = 90  # NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, one direction of one link
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_NVLINK_PEERS = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_UNCORRECTED, _SINCE_BOOT = 1, 0
_PCI_BYTES, _TEXT_BYTES = 32, 96
# GB/s of one lane in one direction by generation.
_PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}
_THROTTLES = {
    0x8: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True)
class GpuState:
    """What is known of a GPU; None: not told.

    Attributes:
        links: NVLinks that are up.
        link_gb_per_s: of one NVLink, one direction.
        switched: the links go to switches, so each peer gets all of them.
        pcie_gb_per_s: of the PCIe slot, one direction.
        ecc_errors: uncorrected ones since the driver was loaded.
        throttled: why it runs slower than it might.
        temperature: degrees Celsius.
    """

    links: int = 0
    link_gb_per_s: float = 0.0
    switched: bool = False
    pcie_gb_per_s: float | None = None
    ecc_errors: int | None = None
    throttled: tuple[str, ...] = ()
    temperature: int | None = None

    def peer_gb_per_s(self) -> float | None:
        """What the link to a peer should carry in one direction: all links, or one, or PCIe."""
        if self.links:
            return self.link_gb_per_s * (self.links if self.switched else 1)
        return self.pcie_gb_per_s


class _FieldValue(ctypes.Structure):
    """``nvmlFieldValue_t``."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency_us", ctypes.c_longlong),
        ("kind", ctypes.c_uint),
        ("status", ctypes.c_uint),
        ("value", ctypes.c_ulonglong),
    )


class Nvml:
    """The library, and the GPUs that CUDA sees here."""

    def __init__(self) -> None:
        self._library = _loaded("libnvidia-ml.so.1", "nvmlInit_v2")
        self._driver = _loaded("libcuda.so.1", "cuInit", 0)

    def driver_version(self) -> str | None:
        """The driver's version, such as 580.65.06."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        if self._library is None:
            return None
        if self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(_TEXT_BYTES)) != 0:
            return None
        return text.value.decode(errors="replace")

    def driver_cuda(self) -> tuple[int, int] | None:
        """The newest CUDA that the driver serves, such as (13, 0)."""
        version = ctypes.c_int(0)
        if self._driver is None or self._driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
        return version.value // 1000, version.value % 1000 // 10

    def state(self, index: int) -> GpuState:
        """The state of a GPU.

        Args:
            index: as CUDA counts.
        """
        handle = self._handle(index)
        if handle is None:
            return GpuState()
        links = self._links(handle)
        reasons = self._number(
            "nvmlDeviceGetCurrentClocksThrottleReasons", handle, of=ctypes.c_ulonglong
        )
        return GpuState(
            links=len(links),
            link_gb_per_s=self._link_speed(handle),
            switched=bool(links) and all(kind == _SWITCH for kind in links),
            pcie_gb_per_s=self._pcie_speed(handle),
            ecc_errors=self._number(
                "nvmlDeviceGetTotalEccErrors",
                handle,
                _UNCORRECTED,
                _SINCE_BOOT,
                of=ctypes.c_ulonglong,
            ),
            throttled=tuple(name for bit, name in _THROTTLES.items() if (reasons or 0) & bit),
            temperature=self._number("nvmlDeviceGetTemperature", handle, 0),
        )

    def are_linked(self, one: int, other: int) -> bool:
        """Whether NVLink joins two GPUs, directly or through switches."""
        handles = self._handle(one), self._handle(other)
        if None in handles:
            return False
        return self._number("nvmlDeviceGetP2PStatus", *handles, _NVLINK_PEERS) == 0

    def _links(self, handle: ctypes.c_void_p) -> list[int | None]:
        """What is at the other end of each NVLink that is up."""
        up = [
            link
            for link in range(_MOST_LINKS)
            if self._number("nvmlDeviceGetNvLinkState", handle, link) == 1
        ]
        return [self._number("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) for link in up]

    def _link_speed(self, handle: ctypes.c_void_p) -> float:
        asked = getattr(self._library, "nvmlDeviceGetFieldValues", None)
        field = _FieldValue(field=_NVLINK_SPEED_FIELD)
        if asked is None or asked(handle, 1, ctypes.byref(field)) != 0 or field.status != 0:
            return 0.0
        # Only the low half: the kind is an unsigned int, and the rest may hold anything.
        return (field.value & 0xFFFFFFFF) / 1e3

    def _pcie_speed(self, handle: ctypes.c_void_p) -> float | None:
        generation = self._number("nvmlDeviceGetMaxPcieLinkGeneration", handle)
        width = self._number("nvmlDeviceGetMaxPcieLinkWidth", handle)
        if generation is None or width is None:
            return None
        return _PCIE_LANE.get(generation, max(_PCIE_LANE.values())) * width

    def _handle(self, index: int) -> ctypes.c_void_p | None:
        device, address = ctypes.c_int(0), ctypes.create_string_buffer(_PCI_BYTES)
        handle = ctypes.c_void_p()
        if self._library is None or self._driver is None:
            return None
        if self._driver.cuDeviceGet(ctypes.byref(device), index) != 0:
            return None
        if self._driver.cuDeviceGetPCIBusId(address, _PCI_BYTES, device) != 0:
            return None
        asked = self._library.nvmlDeviceGetHandleByPciBusId_v2(address, ctypes.byref(handle))
        return handle if asked == 0 else None

    def _number(
        self,
        function: str,
        *arguments: object,
        of: type[ctypes.c_uint | ctypes.c_ulonglong] = ctypes.c_uint,
    ) -> int | None:
        """What a function of the library writes to its last argument; None if it fails."""
        asked = getattr(self._library, function, None)  # older libraries lack some
        number = of(0)
        if asked is None or asked(*arguments, ctypes.byref(number)) != 0:
            return None
        return number.value


def _loaded(name: str, start: str, *arguments: int) -> ctypes.CDLL | None:
    """A library that starts; None if it is missing or does not."""
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return None
    return library if getattr(library, start)(*arguments) == 0 else None
