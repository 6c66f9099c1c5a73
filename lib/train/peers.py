"""What the launchers of several nodes tell each other while they train. Torch-free.

The launchers form a star around that of node 0, which passes everything on; ``lib.train.meeting``
makes the connections. A message is one line of JSON: who it is of, what it is about, a text.

    stop      a signal asked this node's launcher to stop the run
    failing   a worker of this node has failed; how, the verdict will say
    verdict   how the run ended here, once no worker of this node is left
    lost      the connection to this node broke before its verdict (node 0 says so of others)

torchrun and the collectives notice that a peer is gone, but not why, some only after minutes, and
only where they wait for one. Here every launcher knows at once, and which of them is at fault.
"""

import contextlib
import json
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from lib.train.nodes import Nodes

_LONGEST_LINE = 1 << 16
_POLL_SECONDS = 0.05
# A machine that answers nothing for so long is taken for dead. Not less: the data may go over a
# network of its own, and training need not end where this one fails for a minute.
SILENCE_S = 120
_PROBES = 3
_NO_LAUNCHER = "it sends what no launcher of this program sends"
# How long a node that ended because of another waits for that one to say what was wrong.
_VERDICT_WAIT_S = 30.0


class Kind(StrEnum):
    """How a run ended on a node."""

    FINISHED = "finished"
    STOPPED = "stopped"  # told to stop, and its workers told what they saved
    ABANDONED = "abandoned"  # told to stop, before its workers could save
    USER_ERROR = "user error"
    FAILED = "failed"
    DRAGGED = "dragged"  # failed or was ended over another node
    PEER_FAILED = "peer failed"  # as DRAGGED, once it is known over what


@dataclass(frozen=True)
class Verdict:
    """How a run ended on a node, and the line that says it."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Message:
    """One line between launchers."""

    node: int
    about: str
    text: str = ""
    kind: Kind | None = None


class Connection:
    """One end of a connection between launchers; never waits."""

    def __init__(self, link: socket.socket) -> None:
        _watch_for_silence(link)
        link.settimeout(0.0)
        self._link = link
        self._unread = b""
        self._records: deque[dict[str, object]] = deque()
        self.broken: str | None = None  # why nothing more will come, once all is read

    def send(self, record: Mapping[str, object]) -> None:
        """Sends one line. A broken connection shows when it is read."""
        with contextlib.suppress(OSError):
            self._link.sendall(json.dumps(record).encode() + b"\n")

    def receive(self) -> dict[str, object] | None:
        """The next line that has come, if one has; sets ``broken`` after the last of all."""
        if not self._records and self.broken is None:
            self.broken = self._read()
        return self._records.popleft() if self._records else None

    def _read(self) -> str | None:
        """Reads what has come; gives the reason when that was all."""
        try:
            part = self._link.recv(_LONGEST_LINE)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            part = b""
        except OSError:
            return f"no answer for {SILENCE_S} s: the machine or the network failed"
        if not part:
            return "its launcher ended without a word: killed, or the machine failed"
        *lines, self._unread = (self._unread + part).split(b"\n")
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                return _NO_LAUNCHER
            if not isinstance(record, dict):  # not one of ours, though it found the port
                return _NO_LAUNCHER
            self._records.append(record)
        return _NO_LAUNCHER if len(self._unread) > _LONGEST_LINE else None

    def close(self) -> None:
        """Closes this end."""
        self._link.close()


def _watch_for_silence(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause = SILENCE_S // (_PROBES + 1)
    settings = {
        "TCP_KEEPIDLE": pause,
        "TCP_KEEPINTVL": pause,
        "TCP_KEEPCNT": _PROBES,
        "TCP_USER_TIMEOUT": SILENCE_S * 1000,
        "TCP_NODELAY": 1,
    }
    for name, value in settings.items():
        option = getattr(socket, name, None)  # not every system has every one
        if option is not None:
            link.setsockopt(socket.IPPROTO_TCP, option, value)


class Peers:
    """The other launchers of a run; with one node there are none, and nothing ever comes.

    Attributes:
        stop: the node that asked for a stop, if one did.
        failing: the first other node that had a worker fail, if one had.
        verdicts: how the run ended on the nodes where it has ended.
        lost: why nothing is heard any more, by node.
    """

    def __init__(self, nodes: Nodes, names: list[str], links: dict[int, Connection]) -> None:
        self.nodes = nodes
        self.stop: int | None = None
        self.failing: int | None = None
        self.verdicts: dict[int, Verdict] = {}
        self.lost: dict[int, str] = {}
        self._names = names
        self._links = links
        self._told: set[str] = set()

    def name(self, node: int) -> str:
        """A node as people know it, such as ``node 1 (gpu002)``."""
        return f"node {node} ({self._names[node]})"

    def hopeless(self) -> bool:
        """Whether another node is out of the run, so that nothing can be saved together."""
        dead = (Kind.ABANDONED, Kind.USER_ERROR, Kind.FAILED, Kind.DRAGGED)
        ended = any(verdict.kind in dead for verdict in self.verdicts.values())
        return ended or self.failing is not None

    def missing(self) -> bool:
        """Whether another node has left, be it in peace."""
        return bool(self.verdicts or self.lost)

    def why_stop(self) -> str | None:
        """Why this node should save and stop as well, if it should."""
        if self.stop is not None:
            return f"{self.name(self.stop)} was told to stop"
        for node, verdict in self.verdicts.items():
            if verdict.kind is Kind.STOPPED:
                return f"{self.name(node)} has stopped"
        return self._loss() if self.lost else None

    def tell(self, about: str, verdict: Verdict | None = None) -> None:
        """Tells the others something, once."""
        if about in self._told:
            return
        self._told.add(about)
        kind, text = (verdict.kind, verdict.text) if verdict else (None, "")
        self._pass_on(Message(self.nodes.rank, about, text, kind))

    def poll(self) -> None:
        """Takes in what has come; node 0 passes it on."""
        for node, link in list(self._links.items()):
            while (record := link.receive()) is not None:
                sender = node if self.nodes.rank == 0 else record.get("node")
                if not isinstance(sender, int) or not 0 <= sender < self.nodes.count:
                    continue
                message = _message(sender, record)
                self._take(message)
                if self.nodes.rank == 0:
                    self._pass_on(message, node)
            if link.broken is not None:
                del self._links[node]
                link.close()
                if node not in self.verdicts:
                    message = Message(node, "lost", link.broken)
                    self._take(message)
                    self._pass_on(message)

    def _take(self, message: Message) -> None:
        if message.about == "stop" and self.stop is None:
            self.stop = message.node
        elif message.about == "failing" and self.failing is None:
            self.failing = message.node
        elif message.about == "verdict" and message.kind is not None:
            self.verdicts[message.node] = Verdict(message.kind, message.text)
        elif message.about == "lost":
            self.lost[message.node] = message.text

    def _pass_on(self, message: Message, sender: int | None = None) -> None:
        for node, link in self._links.items():
            if node != sender:
                link.send(message.__dict__)

    def settle(self, own: Verdict) -> Verdict:
        """Tells the others how the run ended here, and gives what a person here must know."""
        self.tell("verdict", own)
        deadline = time.monotonic() + _VERDICT_WAIT_S
        self.poll()
        while own.kind is Kind.DRAGGED and self._links and time.monotonic() < deadline:
            if self._culprit() is not None or len(self.verdicts) == self.nodes.count - 1:
                break
            time.sleep(_POLL_SECONDS)
            self.poll()
        return self._explained(own)

    def _culprit(self) -> int | None:
        for kind in (Kind.USER_ERROR, Kind.FAILED, Kind.ABANDONED):
            for node, verdict in self.verdicts.items():
                if verdict.kind is kind:
                    return node
        return None

    def _explained(self, own: Verdict) -> Verdict:
        asked = self.stop is not None or "stop" in self._told
        if own.kind is Kind.STOPPED and self.lost and not asked:
            return Verdict(Kind.PEER_FAILED, f"{self._loss()}; {own.text}")
        if own.kind is not Kind.DRAGGED:
            return own
        culprit = self._culprit()
        if culprit is not None:
            name, theirs = self.name(culprit), self.verdicts[culprit]
            if theirs.kind is Kind.ABANDONED:
                return Verdict(Kind.ABANDONED, f"{name}: {theirs.text}")
            return Verdict(Kind.PEER_FAILED, f"{name} ended the run: {theirs.text}")
        if self.lost:
            return Verdict(Kind.PEER_FAILED, f"{self._loss()}; the newest checkpoint stands")
        return Verdict(Kind.FAILED, own.text)

    def _loss(self) -> str:
        node, reason = next(iter(self.lost.items()))
        return f"lost {self.name(node)}: {reason}"

    def close(self) -> None:
        """Closes the connections."""
        for link in self._links.values():
            link.close()


def _message(node: int, record: dict[str, object]) -> Message:
    about, text, kind = record.get("about"), record.get("text"), record.get("kind")
    known = Kind(kind) if isinstance(kind, str) and kind in set(Kind) else None
    return Message(node, str(about), str(text), known)
