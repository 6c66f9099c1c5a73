"""The launchers of several nodes meet before any of them starts torchrun. Torch-free.

Node 0 listens at the rendezvous and the others call there. When all have come, node 0 tells them
the port of torchrun's store, and the connections stay open for ``lib.train.peers``.

That the launchers meet first, in the open, is what makes the messages good: a node that does not
come, a busy port, and nodes that disagree are noticed before seconds are spent on imports, and by
the one that can name them.
"""

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from lib.console import say, warn
from lib.errors import UserError
from lib.train.nodes import Nodes
from lib.train.peers import Connection, Kind, Peers, Verdict

_SECONDS_BEFORE_FIRST_LINE = 1.0
_SECONDS_BETWEEN_LINES = 30.0
_SECONDS_BETWEEN_CALLS = 0.5
_POLL_SECONDS = 0.05


class MeetingOver(Exception):
    """The run ended before it began: a node was told to stop."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.text)
        self.verdict = verdict


@dataclass(frozen=True)
class Met:
    """What the nodes agreed on.

    Attributes:
        peers: the other launchers.
        store_port: where torchrun's store is to listen on node 0.
        reservation: keeps that port free for it, on node 0.
    """

    peers: Peers
    store_port: int
    reservation: socket.socket | None = None

    def close(self) -> None:
        """Ends the connections and the reservation."""
        self.peers.close()
        if self.reservation is not None:
            self.reservation.close()


def is_loopback(host: str) -> bool:
    """Whether an address reaches this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def meet(nodes: Nodes, processes: int, timeout_s: float, stopped: Callable[[], bool]) -> Met:
    """Waits until the launchers of all nodes have come together.

    Args:
        nodes: which of how many this is; with one node there is nobody to wait for.
        processes: how many this node is about to start; all must say the same.
        timeout_s: how long to wait for the others.
        stopped: whether this launcher was told to stop meanwhile.

    Raises:
        UserError: the others did not come, disagree, or the port is in use.
        MeetingOver: a node was told to stop.
    """
    if nodes.count == 1:
        return Met(Peers(nodes, [""], {}), 0)
    patience = _Patience(nodes, timeout_s, stopped)
    if nodes.rank == 0:
        with _listener(nodes) as door:
            return _Host(nodes, processes, door).welcome_all(patience)
    return _call(nodes, processes, patience)


class _Patience:
    """Waits a little, again and again: says so now and then, and gives up in the end."""

    def __init__(self, nodes: Nodes, timeout_s: float, stopped: Callable[[], bool]) -> None:
        self._nodes, self._timeout_s, self._stopped = nodes, timeout_s, stopped
        self._begin = time.monotonic()
        self._next_line = self._begin + _SECONDS_BEFORE_FIRST_LINE

    def wait(self, missing: list[int], seconds: float, reason: str = "") -> None:
        """Waits so many seconds for the missing nodes.

        Raises:
            UserError: the time is up.
            MeetingOver: this launcher was told to stop.
        """
        now = time.monotonic()
        waited = now - self._begin
        names = ", ".join(str(node) for node in missing)
        address, count = self._nodes.address(), self._nodes.count
        if self._stopped():
            raise MeetingOver(Verdict(Kind.ABANDONED, "the nodes had not met yet"))
        if waited >= self._timeout_s:
            raise UserError(
                f"launch.rendezvous = {address}: waited {self._timeout_s:g} s for {count} nodes, "
                f"and node {names} did not come{reason}; start the same command on every node, "
                "and see that node 0 is where launch.rendezvous says and that they reach it there"
            )
        if now >= self._next_line:
            self._next_line = now + _SECONDS_BETWEEN_LINES
            what = f"node 0 at {address}" if self._nodes.rank else f"the other nodes at {address}"
            missed = "" if self._nodes.rank else f", node {names} missing"
            say(
                f"node {self._nodes.rank} of {count}: waiting for {what} "
                f"({waited:.0f} s of {self._timeout_s:g} s{missed})"
            )
        time.sleep(seconds)


def _listener(nodes: Nodes) -> socket.socket:
    assert nodes.rendezvous is not None
    host, port = nodes.rendezvous
    # Everywhere but on loopback all interfaces: a machine's own name is often an address of its
    # loopback in /etc/hosts, at which no other machine would find it.
    try:
        if is_loopback(host):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        busy = "another program uses the port on this machine; end it, or choose another port"
        reason = busy if error.errno == errno.EADDRINUSE else f"{error.strerror}"
        raise UserError(f"launch.rendezvous = {nodes.address()}: {reason}") from None


class _Host:
    """Node 0 while it waits for the others."""

    def __init__(self, nodes: Nodes, processes: int, door: socket.socket) -> None:
        self._nodes, self._processes, self._door = nodes, processes, door
        self._door.settimeout(0.0)
        self._strangers: list[Connection] = []
        self._guests: dict[int, Connection] = {}
        self._names = {0: socket.gethostname()}

    def welcome_all(self, patience: _Patience) -> Met:
        """Waits for all, and tells them where torchrun's store will be."""
        try:
            while missing := sorted(set(range(self._nodes.count)) - set(self._names)):
                self._let_in()
                self._check_guests()
                patience.wait(missing, _POLL_SECONDS)
        except MeetingOver as over:
            self._tell_all({"node": 0, "about": "verdict", **over.verdict.__dict__})
            raise
        except UserError as error:
            self._tell_all({"about": "refused", "text": str(error)})
            raise
        reservation = _reserve_port()
        port = reservation.getsockname()[1]
        names = [self._names[node] for node in range(self._nodes.count)]
        self._tell_all({"about": "welcome", "store_port": port, "names": names})
        return Met(Peers(self._nodes, names, self._guests), port, reservation)

    def _tell_all(self, record: dict[str, object]) -> None:
        for guest in self._guests.values():
            guest.send(record)

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._door.accept()
                self._strangers.append(Connection(link))
        for stranger in list(self._strangers):
            hello = stranger.receive()
            if hello is not None:
                self._greet(stranger, hello)
            elif stranger.broken is not None:
                stranger.close()
            else:
                continue
            self._strangers.remove(stranger)

    def _greet(self, stranger: Connection, hello: dict[str, object]) -> None:
        node, name = hello.get("rank"), str(hello.get("name"))
        if hello.get("about") != "hello" or not isinstance(node, int):
            stranger.close()
            return
        refusal = self._refusal(hello, node, name)
        if refusal is None:
            self._guests[node] = stranger
            self._names[node] = name
            return
        warn(refusal)
        stranger.send({"about": "refused", "text": refusal})
        stranger.close()

    def _refusal(self, hello: dict[str, object], node: int, name: str) -> str | None:
        who, nodes = f"node {node} ({name})", self._nodes
        if hello.get("nodes") != nodes.count:
            return (
                f"launch.nodes: {who} says {hello.get('nodes')}, node 0 says {nodes.count}; all "
                "nodes must say the same"
            )
        if hello.get("processes") != self._processes:
            return (
                f"launch.processes: {who} would start {hello.get('processes')}, node 0 "
                f"{self._processes}; all nodes must start as many: write launch.processes, or use "
                "nodes with as many GPUs"
            )
        if node in self._names:
            return (
                f"launch.node_rank = {node}: {name} says so, but {self._names[node]} is that node "
                "already; give each node a number of its own"
            )
        return None

    def _check_guests(self) -> None:
        for node, guest in list(self._guests.items()):
            record = guest.receive()
            if record is not None:
                text = f"node {node} ({self._names[node]}): {record.get('text')}"
                raise MeetingOver(Verdict(Kind.ABANDONED, text))
            if guest.broken is not None:  # it may come again
                guest.close()
                del self._guests[node], self._names[node]


def _reserve_port() -> socket.socket:
    """Takes a free port for torchrun's store, which can listen at it all the same.

    Linux lets a second socket bind a port whose first one does not listen, where both set
    SO_REUSEADDR, as torch does; to all others the port is taken, so that no race can lose it.
    """
    reservation = socket.socket(socket.AF_INET)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("", 0))
    return reservation


def _call(nodes: Nodes, processes: int, patience: _Patience) -> Met:
    """Calls node 0 until it answers, and waits there for the others."""
    assert nodes.rendezvous is not None
    hello = {
        "about": "hello",
        "rank": nodes.rank,
        "nodes": nodes.count,
        "processes": processes,
        "name": socket.gethostname(),
    }
    reason = ""
    while True:
        try:
            link = Connection(socket.create_connection(nodes.rendezvous, timeout=2.0))
        except OSError as error:
            reason = f" ({error.strerror or error})"
        else:
            link.send(hello)
            try:
                met = _await_welcome(nodes, link, patience)
            except MeetingOver as over:
                link.send({"node": nodes.rank, "about": "verdict", **over.verdict.__dict__})
                raise
            if met is not None:
                return met
            link.close()
            reason = " (it closed the connection)"
        patience.wait([0], _SECONDS_BETWEEN_CALLS, reason)


def _await_welcome(nodes: Nodes, link: Connection, patience: _Patience) -> Met | None:
    """What node 0 answers once all are there; None when it hangs up."""
    while link.broken is None:
        while (record := link.receive()) is not None:
            about, port, names = record.get("about"), record.get("store_port"), record.get("names")
            if about == "refused":
                raise UserError(str(record.get("text")))
            if about == "verdict":
                raise MeetingOver(Verdict(Kind.ABANDONED, f"node 0: {record.get('text')}"))
            if about == "welcome" and isinstance(port, int) and isinstance(names, list):
                return Met(Peers(nodes, [str(name) for name in names], {0: link}), port)
        patience.wait([0], _POLL_SECONDS, " (it waits for others, too)")
    return None
