"""Speeds, copies, attention and NVML: verdicts on figures and libraries that are made up."""

import ctypes
from dataclasses import replace

import pytest
import torch

from lib.hardware import gpus, nvml
from lib.hardware.attention import judge_backends
from lib.hardware.nvml import GpuState, Nvml
from lib.hardware.speed import Rates, judge_rates, judge_state, measure_rates
from lib.layers.attention_limits import AttentionCase

CPU = torch.device("cpu")
H200 = "NVIDIA H200"


def rates(index, product, copy=3800.0, kind=H200):
    return Rates(f"cuda:{index}", kind, product, copy)


def verdicts(measured):
    return [finding.status for finding in judge_rates(measured)]


def test_a_slow_gpu_is_named():
    findings = list(judge_rates([rates(0, 700.0), rates(1, 610.0), rates(2, 690.0, 3000.0)]))
    assert [finding.status for finding in findings] == ["ok", "slow", "slow"]
    assert "product at 87% of the best NVIDIA H200" in findings[1].seen
    assert "copy at 79%" in findings[2].seen
    assert findings[1].name == "speed of cuda:1"


def test_gpus_are_compared_with_their_own_kind_and_with_the_datasheet():
    assert verdicts([rates(0, 700.0), rates(1, 60.0, 800.0, "Another")]) == ["ok", "ok"]
    assert verdicts([rates(0, 300.0), rates(1, 300.0)]) == ["slow", "slow"]
    assert verdicts([Rates("CPU", "a CPU", 0.01, 1.0)]) == ["ok"]


def test_a_cpu_is_measured():
    found = measure_rates(CPU, "a CPU")
    assert found.product_tflops > 0
    assert found.copy_gb_per_s > 0


def test_what_the_driver_complains_of():
    assert judge_state("cuda:0", GpuState(ecc_errors=0)) is None
    assert judge_state("cuda:0", GpuState()) is None
    assert judge_state("cuda:0", GpuState(ecc_errors=2)).status == "warning"
    assert judge_state("cuda:0", GpuState(throttled=("power brake",))).status == "slow"


def test_copies_are_compared(monkeypatch):
    right = gpus.try_copy(CPU, CPU, "direct")
    assert (right.status, right.name) == ("ok", "copy cpu to cpu")
    monkeypatch.setattr(gpus, "seconds_of", lambda _run, _device: 1.0)  # nothing is copied
    wrong = gpus.try_copy(CPU, CPU, "direct")
    assert wrong.status == "failed"
    assert "IOMMU" in wrong.remedy


CASE = AttentionCase(256, 2, 4, 4, 32, "bf16", 0.0, documents=False, deterministic=False)


def judged(timer, capability=(9, 0)):
    findings = judge_backends(CASE, capability, timer, "")
    return {finding.name.removeprefix("attention: "): finding for finding in findings}


def test_backends_are_timed_and_wrong_ones_told():
    def timer(name, _case):
        if name in ("cudnn", "sdpa"):
            raise ArithmeticError("wrong output, off by 0.5 of its size")
        return 2.0

    found = judged(timer)
    assert found["cudnn"].status == "warning"
    assert found["sdpa"].status == "failed"
    assert "off by 0.5" in found["sdpa"].seen
    # 6 S per token and element of the queries, of 512 tokens and 128 elements, in 2 ms.
    wanted = 6 * 256 * 512 * 128 / 2e-3 / 1e12
    assert found["flash"].figures["attention_tflops"] == pytest.approx(wanted)
    assert judged(timer, None)["flash"].status == "not applicable"


class Library:
    """A libcuda and NVML in one: two GPUs with 3 links to switches at 25 GB/s."""

    def __init__(self, **answers):
        self.answers = {
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetNvLinkRemoteDeviceType": 2,
            "nvmlDeviceGetP2PStatus": 0,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x41,
            "nvmlDeviceGetTemperature": 40,
            "cuDriverGetVersion": 13000,
        } | answers

    def __getattr__(self, name):
        if name in ("cuDeviceGet", "cuDeviceGetPCIBusId", "nvmlDeviceGetHandleByPciBusId_v2"):
            return lambda *_arguments: 0
        if name == "nvmlDeviceGetNvLinkState":
            return lambda _handle, link, out: self.write(out, int(link < 3))
        if name == "nvmlDeviceGetFieldValues":
            return self.field
        if self.answers.get(name) is None:
            raise AttributeError(name)
        return lambda *arguments: self.write(arguments[-1], self.answers[name])

    def write(self, out, value):
        out._obj.value = value
        return 0

    def field(self, _handle, count, out):
        assert (count, out._obj.field, ctypes.sizeof(out._obj)) == (1, 90, 40)
        out._obj.value = 25000 | (7 << 32)
        return 0


def with_library(monkeypatch, **answers):
    monkeypatch.setattr(nvml, "_loaded", lambda *_names: Library(**answers))
    return Nvml()


def test_links_and_health_are_read(monkeypatch):
    found = with_library(monkeypatch)
    state = found.state(0)
    wanted = GpuState(
        links=3,
        link_gb_per_s=25.0,
        switched=True,
        pcie_gb_per_s=16 * 3.94,
        ecc_errors=0,
        throttled=("too hot (hardware)",),
        temperature=40,
    )
    assert state == wanted
    assert state.peer_gb_per_s() == 75.0
    assert replace(state, switched=False).peer_gb_per_s() == 25.0
    assert replace(state, links=0).peer_gb_per_s() == pytest.approx(63.04)
    assert found.are_linked(0, 1)
    assert found.driver_cuda() == (13, 0)


def test_a_library_that_lacks_functions_tells_nothing(monkeypatch):
    names = ("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetP2PStatus", "cuDriverGetVersion")
    found = with_library(monkeypatch, **dict.fromkeys(names[:2]), cuDriverGetVersion=12080)
    assert found.state(0).ecc_errors is None
    assert not found.are_linked(0, 1)
    assert found.driver_cuda() == (12, 8)


def test_without_the_libraries_nothing_is_told(monkeypatch):
    monkeypatch.setattr(nvml, "_loaded", lambda *_names: None)
    found = Nvml()
    assert (found.driver_version(), found.driver_cuda()) == (None, None)
    assert found.state(0) == GpuState()
    assert not found.are_linked(0, 1)
