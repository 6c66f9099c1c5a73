"""What launchers tell each other over three nodes: all goes through node 0, and who is at fault."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from lib.train.nodes import Nodes
from lib.train.peers import Connection, Kind, Peers, Verdict

NAMES = ["gpu0", "gpu1", "gpu2"]


def connected() -> tuple[Connection, Connection]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return Connection(near), Connection(far)


def peers(rank: int, links: dict[int, Connection]) -> Peers:
    return Peers(Nodes(3, rank, ("127.0.0.1", 1)), NAMES, links)


@pytest.fixture
def three() -> Iterator[list[Peers]]:
    (first, one), (second, two) = connected(), connected()
    nodes = [peers(0, {1: first, 2: second}), peers(1, {0: one}), peers(2, {0: two})]
    yield nodes
    for node in nodes:
        node.close()


def exchange(nodes: list[Peers]) -> None:
    """Loopback delivers at once: node 0 first passes on, then the others have it."""
    for _ in range(2):
        for node in nodes:
            node.poll()


def test_stop_on_one_reaches_all_but_itself(three: list[Peers]) -> None:
    three[1].tell("stop")
    exchange(three)
    assert [node.stop for node in three] == [1, None, 1]
    assert three[2].why_stop() == "node 1 (gpu1) was told to stop"
    assert not three[2].hopeless()


def test_the_node_at_fault_is_named_by_the_others(three: list[Peers]) -> None:
    three[2].tell("failing")
    exchange(three)
    assert [node.hopeless() for node in three] == [True, True, False]
    three[2].settle(Verdict(Kind.USER_ERROR, "data/tokens: no index"))
    named = Verdict(Kind.PEER_FAILED, "node 2 (gpu2) ended the run: data/tokens: no index")
    for node in three[:2]:  # what a worker says whose peer is gone does not hide the cause
        assert node.settle(Verdict(Kind.DRAGGED, "rank 0 failed: closed by peer")) == named


@pytest.mark.parametrize("kind", [Kind.USER_ERROR, Kind.FAILED, Kind.FINISHED, Kind.STOPPED])
def test_own_knowledge_stands(three: list[Peers], kind: Kind) -> None:
    three[1].settle(Verdict(Kind.FAILED, "rank 1 was ended by SIGKILL"))
    own = Verdict(kind, "as it was here")
    assert three[0].settle(own) == own


def test_all_dragged_say_what_they_saw(three: list[Peers]) -> None:
    for rank in (1, 2):
        three[rank].tell("verdict", Verdict(Kind.DRAGGED, "connection reset"))
    exchange(three)
    told = three[0].settle(Verdict(Kind.DRAGGED, "rank 0 failed: connection closed"))
    assert told == Verdict(Kind.FAILED, "rank 0 failed: connection closed")


def test_abandoned_on_one_is_no_failure_elsewhere(three: list[Peers]) -> None:
    three[1].settle(Verdict(Kind.ABANDONED, "a second Ctrl-C"))
    told = three[0].settle(Verdict(Kind.DRAGGED, "closed by peer"))
    assert told == Verdict(Kind.ABANDONED, "node 1 (gpu1): a second Ctrl-C")


def test_lost_node_is_named_on_all(three: list[Peers]) -> None:
    three[1].close()
    exchange(three)
    assert (list(three[0].lost), list(three[2].lost)) == ([1], [1])
    saved = three[2].settle(Verdict(Kind.STOPPED, "saved iteration 7"))
    assert saved.kind is Kind.PEER_FAILED
    assert saved.text.startswith("lost node 1 (gpu1): its launcher ended without a word")
    assert saved.text.endswith("; saved iteration 7")


def test_leaving_after_a_verdict_is_no_loss(three: list[Peers]) -> None:
    three[1].settle(Verdict(Kind.FINISHED, ""))
    three[1].close()
    exchange(three)
    assert three[0].lost == {}
    assert three[0].missing()


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"x" * (1 << 18)])
def test_a_stranger_on_the_port_is_sent_away(noise: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    link = Connection(far)
    near.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        near.sendall(noise)
    for _ in range(1000):
        assert link.receive() is None
    assert link.broken == "it sends what no launcher of this program sends"
    near.close()
    link.close()
