"""Watches every collective and transfer of ours, to name the rank that errs (``launch.debug``).

Before a collective each rank writes what it is about to do to a store that all ranks reach: call,
shape, dtype, whether its values are finite, and the line of code it comes from. Then it waits
for the descriptions of the others:

* One that differs in call, shape or dtype is a fault. It is raised on every rank of the group,
  with all descriptions, instead of a hang or a crash inside the collective.
* One that does not come is named after ``slow_s`` seconds, and again as often, with the last call
  that its rank made anywhere, by the rank that has waited longest. A slow rank is no fault, so
  the others wait on, until ``give_up_s``.

Transfers between pipeline stages must not wait here: receives are posted ahead and sends run
beside the work, and a send that waited for its receive could stop a schedule for ever. The n-th
send of a channel belongs to its n-th receive, so each end writes its description and goes on.
Whoever comes second finds the other's and raises on a mismatch before it touches the tensor. The
one that came first may sit in a wait that Python cannot end, so while any end is unmatched a
thread looks for its other one: it reports a mismatch (raised at the next call that is watched) and
names a rank that is late in the same way as above.

A rank may also keep the others waiting outside these calls: see ``lib.parallel.pulse``.

The store does not grow. Whoever has all descriptions of call n of a group knows that all ranks
have read those of n - 1, and deletes its own of n - 1; an end of a transfer is read by the other
end alone, which deletes it.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor

from lib.parallel.groups import Channel, Channels, Group, ParallelGroups
from lib.parallel.pulse import start_pulse

Report = Callable[[str], None]

_ROOT = str(Path(__file__).parents[2]) + "/"
_NO_CALLERS = (str(Path(__file__).parent) + "/", str(Path(torch.__file__).parent) + "/")
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_OF_THREAD_S = 0.0005, 0.05, 0.2


class CollectiveFault(RuntimeError):
    """Ranks that should do the same do not: a bug, named by rank, call and place."""


def watch_groups(
    groups: ParallelGroups,
    store: dist.Store,
    *,
    report: Report,
    slow_s: float = 8.0,
    give_up_s: float = 600.0,
) -> ParallelGroups:
    """The same groups and channels, watched.

    Args:
        groups: of this rank; every rank must watch its own.
        store: reached by all ranks, used for nothing else (a ``PrefixStore`` of its own), and
            new: calls are numbered from 0.
        report: told, as one line, who is late and whose values are not finite. Of several ranks
            that know it, one tells it. Called from another thread too.
        slow_s: seconds after which a missing rank is named, again and again.
        give_up_s: seconds after which waiting for it raises.

    Every watched call raises ``CollectiveFault`` when ranks differ or one never comes.
    """
    board = _Board(store, report, slow_s, give_up_s)
    if groups.world.size > 1:
        start_pulse(board, groups.world.size)
    channels = groups.channels
    return replace(
        groups,
        tp=_watched(groups.tp, board),
        pp=_watched(groups.pp, board),
        dp=_watched(groups.dp, board),
        shards=_watched(groups.shards, board),
        replicas=_watched(groups.replicas, board),
        embedding=_watched(groups.embedding, board),
        world=_watched(groups.world, board),
        channels=None if channels is None else _watched_channels(channels, board),
    )


def _watched(group: Group, board: "_Board") -> Group:
    return group if group.size == 1 else replace(group, watch=_GroupWatch(group, board))


def _watched_channels(channels: Channels, board: "_Board") -> Channels:
    transfers = _Transfers(board)
    ends = {
        name: replace(end, watch=_ChannelWatch(end, transfers, sends=name.endswith("_out")))
        for name, end in vars(channels).items()
    }
    return Channels(**ends)


@dataclass(frozen=True)
class _Entry:
    """What one rank is about to do."""

    rank: int
    group: str
    number: int
    call: str
    shape: tuple[int, ...]
    dtype: str
    finite: bool
    where: str

    @property
    def must_agree(self) -> tuple[str, tuple[int, ...], str]:
        return self.call, self.shape, self.dtype

    def __str__(self) -> str:
        return f"{self.call}, {self.dtype} {list(self.shape)}, at {self.where}"


def _entry_of(text: bytes) -> _Entry:
    fields = json.loads(text)
    return _Entry(**fields | {"shape": tuple(fields["shape"])})


def _place(frame: FrameType | None) -> str:
    """File and line of the nearest caller outside this folder and torch.

    On a GPU the backward pass runs in a thread that has no such caller: the nearest one then.
    """
    nearest = ""
    while frame is not None:
        file = frame.f_code.co_filename
        here = f"{file.removeprefix(_ROOT)}:{frame.f_lineno}"
        if not file.startswith(_NO_CALLERS):
            return here
        if not nearest and file != __file__:
            nearest = here
        frame = frame.f_back
    return nearest


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all().item())


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _disagreement(entries: list[_Entry]) -> str | None:
    """What differs between entries of the same call; None where nothing does."""
    alike: dict[tuple[str, tuple[int, ...], str], list[_Entry]] = {}
    for entry in entries:
        alike.setdefault(entry.must_agree, []).append(entry)
    if len(alike) == 1:
        return None
    kinds = [f"{_ranks([one.rank for one in same])}: {same[0]}" for same in alike.values()]
    first = entries[0]
    return f"ranks differ in call {first.number} of {first.group}: " + "; ".join(kinds)


class _Board:
    """The store, and what a rank knows of all its groups."""

    def __init__(self, store: dist.Store, report: Report, slow_s: float, give_up_s: float) -> None:
        self.store = store
        self.report = report
        self.slow_s = slow_s
        self.give_up_s = give_up_s
        self.rank = dist.get_rank()
        self.calls = 0
        self.is_in_call = False
        self.open_transfers = 0
        self.fault: str | None = None
        self._told_not_finite: set[tuple[str, str, str]] = set()

    def post(self, key: str, entry: _Entry) -> None:
        text = json.dumps(asdict(entry))
        self.store.set(key, text)
        self.store.set(f"last/{self.rank}", text)
        self.calls += 1

    def has(self, key: str) -> bool:
        return self.store.check([key])

    def read(self, key: str) -> _Entry:
        return _entry_of(self.store.get(key))

    def raise_fault(self) -> None:
        if self.fault is not None:
            raise CollectiveFault(self.fault)

    def late(self, ranks: list[int], entry: _Entry, waited: float) -> str:
        """Names the ranks that have not come to the call of ``entry``."""
        have = "has" if len(ranks) == 1 else "have"
        text = (
            f"{_ranks(ranks)} {have} not come to call {entry.number} of {entry.group} ({entry}), "
            f"where rank {entry.rank} has been for {waited:.0f} s"
        )
        for rank in ranks:
            text += f"; last call of rank {rank}: {self.last_call(rank)}"
        return text

    @property
    def waits(self) -> bool:
        """Whether this rank waits for the other side of a call, who is named if late."""
        return self.is_in_call or self.open_transfers > 0

    def last_call(self, rank: int) -> str:
        """The last call that a rank has made, of any group."""
        key = f"last/{rank}"
        last = self.read(key) if self.has(key) else None
        return f"call {last.number} of {last.group} ({last})" if last else "none"

    def place_of(self, frame: FrameType | None) -> str:
        """Where a thread is, by its innermost frame."""
        return _place(frame)

    def tell_not_finite(self, entries: list[_Entry], call: str) -> None:
        """Reports values that are not finite, once per place: overflow is legal in fp16."""
        bad = [entry for entry in entries if not entry.finite]
        if not bad:
            return
        place = (bad[0].group, call, bad[0].where)
        if place not in self._told_not_finite and bad[0].rank == self.rank:
            ranks = _ranks([entry.rank for entry in bad])
            self.report(f"not finite on {ranks}: call {bad[0].number} of {bad[0].group} ({bad[0]})")
        self._told_not_finite.add(place)


class _GroupWatch:
    """Compares the calls of one group."""

    def __init__(self, group: Group, board: _Board) -> None:
        assert group.process_group is not None
        self._ranks = dist.get_process_group_ranks(group.process_group)
        self._name = f"{group.name} ({_ranks(self._ranks)})"
        self._board = board
        self._number = 0

    def __call__(self, call: str, tensor: Tensor) -> None:
        board, number = self._board, self._number
        board.raise_fault()
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        finite, where = _is_finite(tensor), _place(sys._getframe())
        entry = _Entry(board.rank, self._name, number, call, shape, dtype, finite, where)
        board.post(self._key(number, board.rank), entry)
        self._number += 1
        board.is_in_call = True
        self._wait_for_all(entry)
        board.is_in_call = False
        entries = [board.read(self._key(number, rank)) for rank in self._ranks]
        if number > 0:
            board.store.delete_key(self._key(number - 1, board.rank))
        board.fault = board.fault or _disagreement(entries)
        board.raise_fault()
        board.tell_not_finite(entries, call)

    def _key(self, number: int, who: int | str) -> str:
        return f"{self._name}/{number}/{who}"

    def _wait_for_all(self, entry: _Entry) -> None:
        board, started = self._board, time.monotonic()
        missing, notices, speaks = self._ranks, 0, False
        speaker = self._key(entry.number, "speaker")
        pause = _SHORTEST_PAUSE_S
        while missing := [rank for rank in missing if not board.has(self._key(entry.number, rank))]:
            board.raise_fault()
            waited = time.monotonic() - started
            if waited > board.give_up_s:
                raise CollectiveFault(f"gave up: {board.late(missing, entry, waited)}")
            if waited > board.slow_s * (notices + 1):
                # The first one to have waited so long speaks for all.
                speaks = speaks or (notices == 0 and board.store.add(speaker, 1) == 1)
                notices += 1
                if speaks:
                    board.report(board.late(missing, entry, waited))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if speaks:
            board.store.delete_key(speaker)


@dataclass
class _Transfer:
    """One end of a transfer whose other end has not been seen."""

    entry: _Entry
    peer: int
    key_of_peer: str
    since: float
    notices: int = 0


class _Transfers:
    """This rank's ends of transfers that wait for their other end."""

    def __init__(self, board: _Board) -> None:
        self.board = board
        self._open: list[_Transfer] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, transfer: _Transfer) -> None:
        """Takes up one more end; raises a fault that is known by now."""
        with self._lock:
            self._open.append(transfer)
            self._look()
            if self._open and self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="transfers", daemon=True)
                self._thread.start()
        self.board.raise_fault()

    def _follow(self) -> None:
        """Looks until no end is open; the main thread may be in a wait and cannot."""
        while True:
            time.sleep(_PAUSE_OF_THREAD_S)
            with self._lock:
                known = self.board.fault
                try:
                    self._look()
                except RuntimeError:  # the store is gone: its process has ended, and so does this
                    self._open.clear()
                fault = self.board.fault
                if fault is not None and fault != known:
                    self.board.report(fault)
                if not self._open:
                    self._thread = None
                    return

    def _look(self) -> None:
        for transfer in list(self._open):
            if self.board.has(transfer.key_of_peer):
                self._open.remove(transfer)
                other = self.board.read(transfer.key_of_peer)
                self.board.store.delete_key(transfer.key_of_peer)
                pair = sorted((transfer.entry, other), key=lambda entry: entry.rank)
                self.board.fault = self.board.fault or _disagreement(pair)
            else:
                self._note_time(transfer)
        self.board.open_transfers = len(self._open)

    def _note_time(self, transfer: _Transfer) -> None:
        board, waited = self.board, time.monotonic() - transfer.since
        if waited > board.give_up_s:
            self._open.remove(transfer)
            text = board.late([transfer.peer], transfer.entry, waited)
            board.fault = board.fault or f"gave up: {text}"
        elif waited > board.slow_s * (transfer.notices + 1):
            transfer.notices += 1
            board.report(board.late([transfer.peer], transfer.entry, waited))


class _ChannelWatch:
    """Compares the two ends of each transfer of a channel."""

    def __init__(self, channel: Channel, transfers: _Transfers, *, sends: bool) -> None:
        self._channel = channel
        self._transfers = transfers
        self._sends = sends
        self._number = 0

    def __call__(self, call: str, tensor: Tensor) -> None:
        board, name, number = self._transfers.board, self._channel.name, self._number
        board.raise_fault()
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        finite = not self._sends or _is_finite(tensor)  # what is to be received is not there yet
        entry = _Entry(
            board.rank, name, number, call, shape, dtype, finite, _place(sys._getframe())
        )
        mine, other = ("sender", "receiver") if self._sends else ("receiver", "sender")
        board.post(f"{name}/{number}/{mine}", entry)
        self._number += 1
        board.tell_not_finite([entry], "transfer")  # a call's own name holds the micro batch
        self._transfers.add(
            _Transfer(entry, self._channel.peer, f"{name}/{number}/{other}", since=time.monotonic())
        )
