"""How checks are run, what exceptions mean, and the record."""

import json
import time

import pytest

from lib.hardware import findings as findings_module
from lib.hardware.causes import explain
from lib.hardware.facts import Facts
from lib.hardware.findings import Check, Finding, as_record, ceilings, fine, run_checks
from tests.train.test_memory_crash import LINES


def test_a_check_that_raises_ends_no_other():
    def bad(_facts):
        yield fine("first", "well")
        raise RuntimeError("Address already in use")

    checks = [Check("bad", bad), Check("good", lambda _facts: [fine("good", "well")])]
    findings = run_checks(checks, Facts())
    assert [(f.name, f.status) for f in findings][-2:] == [("bad", "failed"), ("good", "ok")]
    assert "MASTER_PORT" in findings[-2].remedy


def test_a_check_that_hangs_is_told(monkeypatch):
    told = []
    monkeypatch.setattr(findings_module, "_SPARE_S", 0.0)
    monkeypatch.setattr(findings_module, "_give_up", lambda *what: told.append(what))
    checks = [Check("fast", lambda _facts: []), Check("slow", lambda _facts: time.sleep(0.5) or [])]
    run_checks(checks, Facts(time_limit_s=0.1))
    assert told == [("slow", 0.1)]


# As libraries wrote them.
@pytest.mark.parametrize(
    ("text", "word"),
    [
        (
            "The server socket has failed to listen on any local network address. port: 29500, "
            "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
            "another port",
        ),
        (
            "[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: no0",
            "ip -br",
        ),
        ("Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
        (
            "Error while creating shared memory segment /dev/shm/nccl-0pt (size 9637888)",
            "--shm-size",
        ),
        ("rank 1 of 2 died with exit code -7", "--shm-size"),
        ("rank 0 of 2 did not finish within 60 s; it stands at\n", "NCCL_P2P_DISABLE"),
        ("rank 1 of 2 died with exit code -9", "memory limit"),
        ("rank 1 of 2 died with exit code -11", "fresh environment"),
        ("CUDA error: no kernel image is available for execution on the device", "torch build"),
        ("The NVIDIA driver on your system is too old (found version 11040).", "driver"),
        ("CUDA error: invalid device ordinal", "CUDA_VISIBLE_DEVICES"),
        ("Failed to find C compiler. Please specify via CC environment variable.", "gcc"),
        ("NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error", "NCCL_DEBUG=INFO"),
        ("CUDA error: uncorrectable ECC error encountered", "Xid"),
        ("Found no NVIDIA driver on your system.", "nvidia-smi"),
        ("something else", "TORCH_DISTRIBUTED_DEBUG"),
    ],
)
def test_what_libraries_say_is_explained(text, word):
    cause = explain(RuntimeError(f"rank 0 raised\nTraceback\n{text}\nand more"))
    assert word in cause.remedy
    assert cause.meaning


def test_the_telling_line_and_place_are_shown():
    text = (
        "measure_traffic failed:\nrank 1 of 2 did not finish within 60 s; it stands at\n"
        '  File "/x/torch/d.py", line 9 in wait\n'
        '  File "/x/lib/hardware/traffic.py", line 99 in _exchange\n'
        '  File "/x/lib/hardware/traffic.py", line 50 in try_all_gather\n'
        '  File "/x/lib/hardware/traffic.py", line 40 in measure_traffic\n'
    )
    wanted = "rank 1 of 2 did not finish within 60 s (in all gather)"
    assert explain(AssertionError(text)).seen == wanted
    lines = text.splitlines()
    innermost_last = "\n".join([*lines[:2], *lines[:1:-1]])
    assert explain(AssertionError(innermost_last)).seen == wanted
    assert len(explain(RuntimeError("x" * 5000)).seen) < 250


@pytest.mark.parametrize("line", LINES)
def test_memory_that_is_out_is_never_taken_for_another_fault(line):
    cause = explain(RuntimeError(f"rank 0 raised\nTraceback\n{line}"))
    assert cause.meaning.startswith("the GPU's memory is taken")


def test_ceilings_are_of_the_slowest_device_and_of_one_kind():
    findings = [
        fine("a", "", "cuda", product_tflops=700.0, copy_gb_per_s=3.0),
        fine("b", "", "cuda", product_tflops=650.0, attention_tflops=400.0),
        fine("c", "", "cuda", attention_tflops=500.0, pair_gb_per_s=9.0),
        fine("d", "", "cpu", product_tflops=0.1, link_gb_per_s=1.0, latency_us=90.0),
    ]
    on_gpus = {"product_tflops": 650.0, "copy_gb_per_s": 3.0, "attention_tflops": 500.0}
    assert ceilings(findings, "cuda") == on_gpus | {"link_gb_per_s": None, "latency_us": None}
    assert ceilings(findings, "cpu")["latency_us"] == 90.0


def test_the_record_is_json_and_keeps_no_variables():
    finding = Finding(name="n", status="slow", seen="s", meaning="m", remedy="r")
    facts = Facts(gpus=("GPU",), environment={"SECRET": "word"})
    record = json.loads(json.dumps(as_record([finding], facts)))
    assert "SECRET" not in json.dumps(record)
    assert record["device"] == "cuda"
    assert set(record["ceilings"]) >= {"product_tflops", "latency_us"}
    assert record["findings"][0]["remedy"] == "r"
    assert record["machine"]["gpus"] == ["GPU"]
