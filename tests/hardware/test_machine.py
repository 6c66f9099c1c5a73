"""Checks of facts: machines that lack something are told so, with what to try."""

import dataclasses
import os
import socket

import pytest

from lib.hardware.facts import Facts, locked_versions, read_facts
from lib.hardware.machine import (
    check_environment,
    check_gpu_count,
    check_ports,
    check_sizes,
    check_versions,
    names_an_interface,
)

GOOD = Facts(
    cpu="a CPU",
    cores=8,
    memory_bytes=64 * 10**9,
    shm_bytes=16 * 2**30,
    disk_bytes=10**12,
    interfaces=("lo", "eth0", "ib0"),
    host_address="10.0.0.7",
    python="3.12.1",
    locked={"torch": "2.13.0", "triton": "3.7.1", "dvc": "3.0"},
    installed={
        "torch": "2.13.0+cu130",
        "triton": "3.7.1",
        "numpy": "2",
        "pydantic": "2",
        "safetensors": "0.8",
    },
)
TWO_GPUS = dataclasses.replace(GOOD, gpus=("GPU", "GPU"), gpus_present=2)


def but(facts=GOOD, **changes):
    return dataclasses.replace(facts, **changes)


def of(check, facts):
    return {finding.name: finding for finding in check(facts)}


def the_trouble(check, facts):
    """The one finding that is not well; it says what it means and what to try."""
    troubles = [f for f in check(facts) if f.status not in ("ok", "not applicable")]
    assert len(troubles) == 1, troubles
    (trouble,) = troubles
    assert trouble.meaning
    assert trouble.remedy
    assert trouble.remedy in trouble.advice()
    return trouble


@pytest.mark.parametrize("facts", [GOOD, TWO_GPUS], ids=["cpu", "gpus"])
@pytest.mark.parametrize(
    "check", [check_sizes, check_versions, check_gpu_count, check_environment, check_ports]
)
def test_nothing_is_wrong_with_a_good_machine(check, facts):
    findings = list(check(facts))
    assert findings
    assert {finding.status for finding in findings} <= {"ok", "not applicable"}


def test_this_machine_is_read(pytestconfig):
    facts = read_facts(pytestconfig.rootpath)
    assert facts.cores >= 1
    assert facts.memory_bytes > 0
    assert facts.disk_bytes > 0
    assert "lo" in facts.interfaces
    assert facts.installed["torch"].startswith(facts.locked["torch"].split(".")[0])
    assert facts.environment == dict(os.environ)


def test_versions_come_from_the_lock(tmp_path):
    lock = tmp_path / "requirements.lock"
    assert locked_versions(lock) == {}
    lock.write_text("# a comment==1\ntorch==2.13.0\nruamel.yaml==0.18\nresult-pkg==1.0.post1\n")
    wanted = {"torch": "2.13.0", "ruamel.yaml": "0.18", "result-pkg": "1.0.post1"}
    assert locked_versions(lock) == wanted


@pytest.mark.parametrize(
    ("facts", "mebibytes", "status"),
    [
        (GOOD, 8, "warning"),
        (TWO_GPUS, 16, "failed"),
        (TWO_GPUS, 64, "warning"),  # docker's default: enough only where no pair needs a segment
    ],
)
def test_too_little_shared_memory(facts, mebibytes, status):
    trouble = the_trouble(check_sizes, but(facts, shm_bytes=mebibytes * 2**20))
    assert trouble.name == "shared memory (/dev/shm)"
    assert trouble.status == status
    assert f"{mebibytes} MiB free" in trouble.seen
    assert "--shm-size" in trouble.remedy


def test_more_gpus_need_more_shared_memory():
    small = but(TWO_GPUS, shm_bytes=256 * 2**20)
    assert of(check_sizes, small)["shared memory (/dev/shm)"].status == "ok"
    small = but(small, gpus=("GPU",) * 8)
    assert of(check_sizes, small)["shared memory (/dev/shm)"].status == "warning"


def test_little_memory_and_disk_are_told():
    assert the_trouble(check_sizes, but(memory_bytes=10**9)).name == "memory"
    assert the_trouble(check_sizes, but(disk_bytes=10**9)).name == "disk"


def test_another_version_is_a_warning_and_none_a_failure():
    other = but(installed=GOOD.installed | {"torch": "2.11.0"})
    assert the_trouble(check_versions, other).status == "warning"
    without = but(installed={k: v for k, v in GOOD.installed.items() if k != "torch"})
    trouble = the_trouble(check_versions, without)
    assert (trouble.name, trouble.status) == ("torch", "failed")
    assert of(check_versions, GOOD)["other packages"].seen == "1 not installed: dvc"
    assert the_trouble(check_versions, but(python="3.13.0")).name == "Python"


@pytest.mark.parametrize(
    ("facts", "status", "word"),
    [
        (but(TWO_GPUS, gpus_wanted=4), "failed", "nvidia-smi"),
        (but(gpus_wanted=1, installed={"torch": "2.13.0+cpu"}), "failed", "CUDA build"),
        (
            but(gpus_present=2, gpus_wanted=1, environment={"CUDA_VISIBLE_DEVICES": ""}),
            "failed",
            "unset",
        ),
        (but(gpus_present=2), "warning", "nvidia-smi"),
        (
            but(TWO_GPUS, gpus_present=8, environment={"CUDA_VISIBLE_DEVICES": "0,1"}),
            "warning",
            "unset",
        ),
    ],
)
def test_a_missing_gpu(facts, status, word):
    trouble = the_trouble(check_gpu_count, facts)
    assert trouble.status == status
    assert word in trouble.remedy


def test_a_container_may_have_a_part_of_the_gpus():
    assert of(check_gpu_count, but(TWO_GPUS, gpus_present=8))["number of GPUs"].status == "ok"


def test_a_blocked_port():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        blocked = but(environment={"MASTER_PORT": str(port)})
        trouble = the_trouble(check_ports, blocked)
        assert (trouble.name, trouble.status) == ("MASTER_PORT", "failed")
        assert f"port {port}: is in use" in trouble.seen
        assert "ss -ltnp" in trouble.remedy
        elsewhere = but(environment={"MASTER_PORT": str(port), "MASTER_ADDR": "10.9.9.9"})
        assert "MASTER_PORT" not in of(check_ports, elsewhere)
    assert of(check_ports, blocked)["MASTER_PORT"].status == "ok"


def test_a_port_that_is_none():
    assert the_trouble(check_ports, but(environment={"MASTER_PORT": "99999"})).status == "failed"


def test_a_host_without_an_address():
    assert the_trouble(check_ports, but(host_address=None)).name == "own host name"


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_an_interface_that_is_not_there(variable):
    trouble = the_trouble(check_environment, but(environment={variable: "eno1"}))
    assert (trouble.name, trouble.status) == (variable, "failed")
    assert "lo, eth0, ib0" in trouble.seen


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("eth0", True),
        ("eth", True),
        ("=eth", False),
        ("=eth0", True),
        ("bond,ib", True),
        ("^lo", True),
        ("^lo,eth,ib", False),
        ("^=eth", True),
        ("eno1", False),
    ],
)
def test_names_of_interfaces_follow_nccls_rules(value, answer):
    assert names_an_interface(value, GOOD.interfaces) is answer


def test_variables_that_slow_gpus_down():
    variables = {"NCCL_P2P_DISABLE": "1"}
    assert the_trouble(check_environment, but(TWO_GPUS, environment=variables)).status == "warning"
    assert {f.status for f in check_environment(but(environment=variables))} == {"ok"}
    harmless = {"NCCL_P2P_DISABLE": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"}
    assert {f.status for f in check_environment(but(TWO_GPUS, environment=harmless))} == {"ok"}


@pytest.mark.parametrize(
    ("value", "facts", "status"),
    [("0", GOOD, "failed"), ("many", GOOD, "failed"), ("5", TWO_GPUS, "warning")],
)
def test_odd_numbers_of_threads(value, facts, status):
    trouble = the_trouble(check_environment, but(facts, environment={"OMP_NUM_THREADS": value}))
    assert trouble.status == status
    fits = but(facts, environment={"OMP_NUM_THREADS": "4,2"})
    assert {f.status for f in check_environment(fits)} == {"ok"}
