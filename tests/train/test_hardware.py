"""What the machine offers, against what the system and torch say."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lib.errors import UserError
from lib.train import hardware
from lib.train.hardware import (
    UNKNOWN,
    Gpu,
    choose_threads,
    cuda_device_names,
    cuda_devices,
    installed,
    usable_cores,
)


def test_cuda_devices_are_those_that_torch_sees() -> None:
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    assert list(cuda_device_names()) == names


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("cuda: Optional[str] = None\n", False),
        ("cuda: Optional[str] = '13.0'\n", True),
        ("cuda = '12.8'\n", True),
        ("cudart = '1'\ncuda: Optional[str] = None\n", False),
    ],
)
def test_build_of_torch_is_read_from_its_version_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, answer: bool
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "version.py").write_text(f"__version__ = '2'\n{line}")

    class Found:
        origin = str(package / "__init__.py")

    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda _name: Found())
    assert hardware._torch_is_built_for_cuda() is answer


def test_usable_cores_are_those_of_the_mask() -> None:
    assert usable_cores() <= len(os.sched_getaffinity(0))
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mask)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, mask)


def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setattr(hardware, "usable_cores", lambda: 8)
    assert [choose_threads(None, processes) for processes in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert choose_threads(5, 2) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [choose_threads(None, 2), choose_threads(5, 2)] == [3, 5]
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert choose_threads(None, 2) == 4


@pytest.mark.parametrize("value", ["many", "0", "-2", "2.5", "x,4"])
def test_threads_that_are_no_number_are_one_line(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert choose_threads(5, 2) == 5
    with pytest.raises(UserError, match=f"OMP_NUM_THREADS = {value}: must be"):
        choose_threads(None, 2)


def a_driver() -> SimpleNamespace:
    """With two devices, of which the second does not say what it can."""

    def put(number: Any, value: int) -> int:
        number._obj.value = value
        return 0

    def name(text: Any, _size: int, device: Any) -> int:
        text.value = f"GPU {device.value}".encode()
        return 0

    def attribute(number: Any, which: int, device: Any) -> int:
        put(number, {75: 8, 76: 6}[which])
        return int(device.value)  # an error of the second

    return SimpleNamespace(
        cuInit=lambda _flags: 0,
        cuDeviceGetCount=lambda count: put(count, 2),
        cuDeviceGet=put,
        cuDeviceGetName=name,
        cuDeviceGetAttribute=attribute,
        cuDeviceTotalMem_v2=lambda size, device: put(size, 2**33) + int(device.value),
    )


def test_the_driver_says_what_devices_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_torch_is_built_for_cuda", lambda: True)
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda _name: a_driver())
    assert cuda_devices() == (Gpu("GPU 0", (8, 6), 2**33), Gpu("GPU 1", UNKNOWN, 0))
    assert hardware.cuda_memory_bytes() == 2**33


def test_packages_are_found_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("one_pkg/__init__.py", "one_pkg/inner/__init__.py", "one_pkg/leaf.py", "two.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / file).write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    wanted = {"one_pkg.inner", "one_pkg.leaf", "two"}
    assert installed([*wanted, "one_pkg.other", "two.inner", "no_such_package.x"]) == wanted
