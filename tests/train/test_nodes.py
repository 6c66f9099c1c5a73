"""Which machines train together: what params.yaml, Slurm and the environment say."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.config.operation import LaunchConfig
from lib.errors import UserError
from lib.train.nodes import ONE_NODE, Nodes, expand_node_list, find_nodes

SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_NODELIST": "gpu[005-008]",
}
# A batch script without srun: the job's own figures, and node 0 of it.
BATCH = {
    "SLURM_JOB_ID": "123456",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_JOB_NODELIST": "gpu[005-006]",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


BY_HAND: dict[str, Any] = {"nodes": 2, "node_rank": 1, "rendezvous": "gpu001:29500"}


@pytest.mark.parametrize(
    ("launch", "environ", "expected"),
    [
        ({}, {}, ONE_NODE),
        ({"nodes": 1}, {}, ONE_NODE),
        ({"nodes": 1, "node_rank": 0, "rendezvous": "x:1"}, SRUN, ONE_NODE),
        (BY_HAND, {}, Nodes(2, 1, ("gpu001", 29500))),
        (BY_HAND | {"rendezvous": "[fe80::1]:7"}, {}, Nodes(2, 1, ("fe80::1", 7))),
        (BY_HAND, SRUN | {"SLURM_NODEID": "0"}, Nodes(2, 1, ("gpu001", 29500))),
        (BY_HAND, BATCH, Nodes(2, 1, ("gpu001", 29500))),
        (
            BY_HAND | {"node_rank": None},
            {"DRYDOCK_NODE_RANK": "0"},
            Nodes(2, 0, ("gpu001", 29500)),
        ),
        ({}, SRUN, Nodes(2, 1, ("gpu007", 23456))),
        ({"nodes": 2}, SRUN, Nodes(2, 1, ("gpu007", 23456))),
        ({"rendezvous": "10.0.0.7:29500"}, SRUN, Nodes(2, 1, ("10.0.0.7", 29500))),
        ({}, SRUN | {"SLURM_JOB_ID": "123457"}, Nodes(2, 1, ("gpu007", 23457))),
        ({}, without(SRUN, "SLURM_NODEID"), Nodes(2, 1, ("gpu007", 23456))),
        ({}, BATCH | {"SLURM_STEP_ID": "3"}, Nodes(2, 0, ("gpu005", 23456))),
        (
            {},
            without(SRUN, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
            | {"SLURM_JOB_NUM_NODES": "2", "SLURM_STEP_NODELIST": "a,b"},
            Nodes(2, 1, ("a", 23456)),
        ),
        # One node of a cluster: as without Slurm, however many tasks the job reserves.
        ({}, BATCH | {"SLURM_NNODES": "1", "SLURM_NTASKS": "8"}, ONE_NODE),
        ({}, {"SLURM_NNODES": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}, ONE_NODE),
        ({}, {"SLURM_JOB_ID": "7"}, ONE_NODE),
    ],
)
def test_parameters_come_first_then_slurm_then_one_node(
    launch: dict[str, Any], environ: dict[str, str], expected: Nodes
) -> None:
    assert find_nodes(LaunchConfig(**launch), environ) == expected


@pytest.mark.parametrize(
    ("launch", "environ", "words"),
    [
        ({"nodes": 2, "node_rank": 0}, {}, ["launch.nodes = 2", "launch.rendezvous", "gpu001:"]),
        ({"nodes": 2, "rendezvous": "a:1"}, {}, ["launch.nodes = 2", "DRYDOCK_NODE_RANK=0"]),
        (BY_HAND | {"node_rank": 2}, {}, ["launch.node_rank = 2", "below", "which is 2", "0 to 1"]),
        ({"node_rank": 1}, {}, ["launch.node_rank = 1", "launch.nodes is null"]),
        ({"nodes": 1, "node_rank": 1}, {}, ["launch.node_rank = 1", "launch.nodes is 1"]),
        ({"rendezvous": "a:1"}, {}, ["launch.rendezvous = a:1", "launch.nodes is null"]),
        (
            BY_HAND | {"node_rank": None},
            {"DRYDOCK_NODE_RANK": "7"},
            ["DRYDOCK_NODE_RANK = 7", "0 to 1"],
        ),
        (
            BY_HAND | {"node_rank": None},
            {"DRYDOCK_NODE_RANK": "-1"},
            ["DRYDOCK_NODE_RANK = -1", "whole number"],
        ),
        ({"nodes": 3}, SRUN, ["launch.nodes = 3", "on 2 nodes", "null"]),
        ({}, BATCH, ["SLURM_NNODES = 2", "srun --ntasks-per-node=1", "launch.nodes: 1"]),
        (
            {},
            SRUN | {"SLURM_STEP_NUM_TASKS": "16"},
            ["SLURM_STEP_NUM_TASKS = 16", "2 nodes", "srun --ntasks-per-node=1"],
        ),
        (
            {},
            without(SRUN, "SLURM_STEP_NUM_TASKS") | {"SLURM_NTASKS": "8"},
            ["SLURM_NTASKS = 8", "srun --ntasks-per-node=1"],
        ),
        ({}, without(SRUN, "SLURM_NODEID", "SLURM_PROCID"), ["SLURM_NODEID is not set"]),
        (
            {},
            without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
            ["SLURM_STEP_NODELIST is not set"],
        ),
        ({}, SRUN | {"SLURM_STEP_NODELIST": "gpu[1-"}, ["SLURM_STEP_NODELIST = gpu[1-"]),
        ({}, SRUN | {"SLURM_STEP_NUM_NODES": "two"}, ["SLURM_STEP_NUM_NODES = two", "whole"]),
    ],
)
def test_partial_and_contradictory_settings_are_refused(
    launch: dict[str, Any], environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(UserError) as refusal:
        find_nodes(LaunchConfig(**launch), environ)
    assert [word for word in words if word not in str(refusal.value)] == []


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login1", ["login1"]),
        ("gpu[001-003,007],login1", ["gpu001", "gpu002", "gpu003", "gpu007", "login1"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[01,10]", ["r1n01", "r1n10", "r2n01", "r2n10"]),
        ("a[1]b[2]-ib.cluster.org,c-d", ["a1b2-ib.cluster.org", "c-d"]),
        ("[1-2]x", ["1x", "2x"]),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert expand_node_list(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "a[", "a[]", "a[1-]", "a[x]", "a]", "a b", "a[1[2]]"]
)
def test_what_is_no_node_list(text: str) -> None:
    with pytest.raises(UserError):
        expand_node_list(text)


@given(st.integers(0, 99), st.integers(0, 30), st.integers(1, 5), st.sampled_from(["", "-ib"]))
def test_a_range_is_its_numbers_written_out(
    first: int, length: int, width: int, suffix: str
) -> None:
    numbers = [f"{n:0{width}d}" for n in range(first, first + length + 1)]
    hosts = [f"gpu{n}{suffix}" for n in numbers]
    assert expand_node_list(f"gpu[{numbers[0]}-{numbers[-1]}]{suffix}") == hosts
    assert expand_node_list(",".join(hosts)) == hosts
