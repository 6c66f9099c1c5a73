"""Launchers of several nodes, on this machine: results, stops, failures, and who says what."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.processes import wait_until
from tests.train.toy import Toy

QUICK = {"TOY_TORCHRUN": "1"}  # where torchrun itself plays no part
CONTINUE = "run the same command again to continue"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def name_of(node: int) -> str:
    return f"node {node} ({socket.gethostname()})"


def without_waiting(text: str) -> str:
    """What a launcher said, but for how long it waited for the others."""
    return re.sub(r"^node \d of \d: waiting for .*\n", "", text, flags=re.MULTILINE)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., list[Toy]]]:
    """Starts a toy for each node; kills what a failed test leaves behind."""
    toys: list[Toy] = []
    port = free_port()

    def start_nodes(
        *modes: str,
        processes: Sequence[int] = (1, 1),
        ranks: Sequence[int] = (0, 1),
        count: int = 2,
        patience: float = 120,
        at: str = f"127.0.0.1:{port}",
        **environment: str,
    ) -> list[Toy]:
        started = []
        for mode, size, rank in zip(modes, processes, ranks, strict=False):
            node = [str(count), str(rank), at, str(patience)]
            started.append(Toy(tmp_path, [mode, str(size), "1", "60", *node], environment))
        toys.extend(started)
        return started

    yield start_nodes
    for toy in toys:
        toy.end()


@pytest.mark.layouts
def test_node_rank_decides_the_ranks(start: Callable[..., list[Toy]]) -> None:
    second, first = start("environment", "environment", ranks=(1, 0), processes=(2, 2))
    assert [second.finish()[0], first.finish()[0]] == [0, 0]
    files = [first.folder / f"environment.{rank}" for rank in range(4)]
    told = [json.loads(file.read_text()) for file in files]
    assert [(tell["GROUP_RANK"], tell["LOCAL_RANK"]) for tell in told] == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    assert {tell["WORLD_SIZE"] for tell in told} == {"4"}
    assert not list((first.folder / "logs").iterdir())


@pytest.mark.parametrize(
    ("mode", "told", "number", "environment"),
    [("train", 0, signal.SIGUSR1, QUICK), ("together", 1, signal.SIGTERM, {})],
)
def test_stop_on_one_node_saves_on_all(
    start: Callable[..., list[Toy]],
    mode: str,
    told: int,
    number: int,
    environment: dict[str, str],
) -> None:
    toys = start(mode, mode, **environment)
    for toy in toys:
        toy.wait_for_training(2)
    toys[told].process.send_signal(number)
    ends = [toy.finish() for toy in toys]
    assert [ends[told][0], ends[1 - told][0]] == [128 + number, 143]
    for node, (_, out, err) in enumerate(ends):
        assert without_waiting(out) == f"stopped: saved iteration 7; {CONTINUE}\n"
        why = "" if node == told else f"{name_of(told)} was told to stop: "
        if mode == "train" or node == told:  # the workers may agree before the launchers do
            assert err.startswith(f"warning: {why}saving the state for up to 60 s")
        assert "Traceback" not in err
    assert set(toys[0].saved_by()) == {".0", ".1"}
    assert toys[0].nobody_left()
    assert toys[1].nobody_left()


@pytest.mark.layouts
def test_users_error_on_one_node_is_one_line_on_each(start: Callable[..., list[Toy]]) -> None:
    first, second = start("error_of_rank_1", "error_of_rank_1", **QUICK)
    text = "data/tokens: the index is missing; run tokenize_corpus"
    status, out, err = second.finish()
    assert (status, without_waiting(out), err) == (1, "", f"error: {text}\n")
    status, out, err = first.finish()
    assert (status, err) == (1, f"error: {name_of(1)} ended the run: {text}\n")
    assert not list((first.folder / "logs").iterdir())


def test_killed_launcher_ends_the_other_node(start: Callable[..., list[Toy]]) -> None:
    first, second = start("train", "train", **QUICK)
    for toy in (first, second):
        toy.wait_for_training(2)
    second.process.kill()
    status, _, err = first.finish()
    assert status == 1
    loss = f"lost {name_of(1)}: its launcher ended without a word: killed, or the machine failed"
    assert err.splitlines() == [
        f"warning: {loss}: saving the state for up to 60 s",
        f"error: {loss}; saved iteration 7",
    ]
    wait_until(lambda: first.nobody_left() and second.nobody_left())
    assert first.saved_by() == {".0": signal.SIGUSR1, ".1": signal.SIGUSR1}


def test_killed_worker_is_named_on_both_nodes(start: Callable[..., list[Toy]]) -> None:
    first, second = start("chained", "chained")
    first.wait_for_training(2)
    second.wait_for_training(2)[1].kill()
    cause = "rank 1 was ended by SIGKILL"
    status, _, err = second.finish()
    assert (status, err.splitlines()[-1].startswith(f"error: {cause}")) == (1, True)
    status, _, err = first.finish()
    assert status == 1
    assert err.startswith(f"error: {name_of(1)} ended the run: {cause}")
    assert len(err.splitlines()) == 1


def test_missing_node_is_named(start: Callable[..., list[Toy]]) -> None:
    (first,) = start("done", patience=2)
    status, out, err = first.finish()
    assert status == 1
    assert re.match(r"node 0 of 2: waiting for the other nodes at 127.0.0.1:\d+ \(1 s of 2 s", out)
    assert re.match(
        r"error: launch.rendezvous = 127.0.0.1:\d+: waited 2 s for 2 nodes, and node 1 ", err
    )


def test_missing_node_zero_is_named(start: Callable[..., list[Toy]]) -> None:
    (second,) = start("done", ranks=(1,), patience=2)
    status, out, err = second.finish()
    assert status == 1
    assert out.startswith("node 1 of 2: waiting for node 0 at 127.0.0.1:")
    assert "node 0 did not come (Connection refused)" in err


def test_busy_port_is_one_line(start: Callable[..., list[Toy]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = f"127.0.0.1:{server.getsockname()[1]}"
        (first,) = start("done", at=at)
        status, _, err = first.finish()
    assert (status, len(err.splitlines())) == (1, 1)
    assert err.startswith(f"error: launch.rendezvous = {at}: another program uses the port")


def test_nodes_that_disagree_are_refused(start: Callable[..., list[Toy]]) -> None:
    first, other = start("done", "done", processes=(1, 2), count=3)
    status, _, err = other.finish()
    assert (status, "would start 2, node 0 1; all nodes must start as many" in err) == (1, True)
    twins = start("done", "done", ranks=(1, 1), count=3)
    wait_until(lambda: any(twin.process.poll() is not None for twin in twins))
    first.process.terminate()
    ends = sorted((status, err) for status, _, err in (twin.finish() for twin in twins))
    assert [status for status, _ in ends] == [1, 143]
    assert ends[0][1].startswith("error: launch.node_rank = 1: ")
    assert first.finish()[0] == 143


def test_stop_while_the_nodes_meet(start: Callable[..., list[Toy]]) -> None:
    toys = start("done", "done", count=3)
    lines = [toy.process.stdout for toy in toys]
    assert all(line is not None and "waiting" in line.readline() for line in lines)
    time.sleep(1.0)  # so that node 1 has called
    toys[1].process.terminate()
    ends = [toy.finish() for toy in toys]
    assert [status for status, _, _ in ends] == [143, 143]
    assert all("stopped:" in out and "had not met yet" in out for _, out, _ in ends)


def network_namespaces() -> str | None:
    """Why this machine cannot be split into two networks; None when it can."""
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        return "two networks on one machine need root and the program ip (iproute2)"
    name = f"drydock-probe-{os.getpid()}"
    made = subprocess.run([ip, "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run([ip, "netns", "delete", name], capture_output=True, check=False)
    return None if made.returncode == 0 else f"ip netns add: {made.stderr.strip()}"


@pytest.fixture
def two_networks() -> Iterator[list[str]]:
    """Two network namespaces joined by a cable: 10.77.0.1 and 10.77.0.2."""
    if reason := network_namespaces():
        pytest.skip(reason)
    names = [f"drydock-{os.getpid()}-{node}" for node in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip(
            "-n",
            names[0],
            "link",
            "add",
            "cable",
            "type",
            "veth",
            "peer",
            "cable",
            "netns",
            names[1],
        )
        for node, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.0.{node + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.layouts
def test_two_networks(two_networks: list[str], tmp_path: Path) -> None:
    toys = []
    for node, name in enumerate(two_networks):
        arguments = ["sum", "1", "1", "60", "2", str(node), "10.77.0.1:29500", "120"]
        inside = ["ip", "netns", "exec", name]
        toys.append(Toy(tmp_path, arguments, {"GLOO_SOCKET_IFNAME": "cable"}, inside))
    try:
        ends = [toy.finish() for toy in toys]
        assert [(status, err) for status, _, err in ends] == [(0, ""), (0, "")]
        assert (tmp_path / "sum.1").read_text() == "3.0"
    finally:
        for toy in toys:
            toy.end()
