"""Names ranks that stand still where no collective of ours shows it (``launch.debug``).

``lib.parallel.monitor`` sees who is missing from a call of ours. A rank may also keep the others
waiting inside torch, in the collectives of a checkpoint: then all have made the same calls.
So a thread of each rank writes every second how many calls its rank has made and which line its
main thread is at, and looks at what the others wrote:

* A rank that has written nothing for ``slow_s`` seconds is stopped, or its machine is lost.
* Where no rank has made a call for ``slow_s`` seconds and none waits in one, the line of each is
  told: those that wait for another stand in the same place, the one that is waited for elsewhere.

Both are told again as often, by one rank; nothing is said before each has made a call, since a
start takes long. Times are by the clock of the rank that looks.
"""

import contextlib
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import torch.distributed as dist

_LONGEST_PAUSE_S = 1.0
_GONE = "gone"


class Board(Protocol):
    """What a pulse needs of the monitor's board."""

    store: dist.Store
    report: Callable[[str], None]
    slow_s: float
    rank: int
    calls: int

    @property
    def waits(self) -> bool:
        """Whether this rank is in a call of ours, waiting for others, who are named there."""
        ...

    def last_call(self, rank: int) -> str:
        """The last call that a rank has made, in words."""
        ...

    def place_of(self, frame: FrameType | None) -> str:
        """File and line of a frame's nearest caller that is ours."""
        ...


def start_pulse(board: Board, size: int) -> None:
    """Starts this rank's thread, which ends when nobody needs ``board`` any more.

    Args:
        board: of this rank; its store is reached by all ranks.
        size: number of ranks.
    """
    key = f"pulse/{board.rank}"
    store, main = board.store, threading.get_ident()
    store.set(key, json.dumps([0, board.calls, "its start", False]))
    # Also at the end of the process: a rank that has left in order is not missed.
    weakref.finalize(board, _leave, store, key)
    arguments = (weakref.ref(board), key, main, size)
    threading.Thread(target=_beat, args=arguments, name="pulse", daemon=True).start()


def _leave(store: dist.Store, key: str) -> None:
    with contextlib.suppress(RuntimeError):  # the store has ended before
        store.set(key, _GONE)


def _beat(reference: "weakref.ref[Board]", key: str, main: int, size: int) -> None:
    seen: dict[int, _Seen] = {}
    beat = 0
    while (board := reference()) is not None:
        beat += 1
        place = board.place_of(sys._current_frames().get(main))
        try:
            board.store.set(key, json.dumps([beat, board.calls, place, board.waits]))
            _look(board, seen, size)
        except RuntimeError:  # the store is gone: the run has ended, and so does this
            return
        pause = min(_LONGEST_PAUSE_S, board.slow_s / 4)
        del board
        time.sleep(pause)


@dataclass
class _Seen:
    """What this rank knows of another one, with the times at which it changed."""

    text: str
    calls: int
    place: str
    waits: bool
    beat_at: float
    call_at: float
    told_at: float = 0.0


def _look(board: Board, seen: dict[int, _Seen], size: int) -> None:
    now = time.monotonic()
    for rank in range(size):
        _update(board, seen, rank, now)
    present = {rank: each for rank, each in seen.items() if each.text != _GONE}
    silent = [rank for rank, each in present.items() if now - each.beat_at > board.slow_s]
    if min((rank for rank in present if rank not in silent), default=None) != board.rank:
        return  # the first rank that lives speaks for all
    for rank in silent:
        each = present[rank]
        if now - each.told_at > board.slow_s:
            each.told_at = now
            board.report(
                f"rank {rank} has not answered for {now - each.beat_at:.0f} s: stopped, or its "
                f"machine is lost; it was at {each.place}; its last call: {board.last_call(rank)}"
            )
    if silent or any(each.waits or each.calls == 0 for each in present.values()):
        return
    quiet_since = max(each.call_at for each in present.values())
    mine = present[board.rank]
    if now - max(quiet_since, mine.told_at) > board.slow_s:
        mine.told_at = now
        places = "; ".join(f"rank {rank} at {each.place}" for rank, each in present.items())
        board.report(f"no rank has made a call for {now - quiet_since:.0f} s: {places}")


def _update(board: Board, seen: dict[int, _Seen], rank: int, now: float) -> None:
    key = f"pulse/{rank}"
    if not board.store.check([key]):
        return  # not started yet
    text = board.store.get(key).decode()
    old = seen.get(rank)
    if old is not None and old.text == text:
        return
    _, calls, place, waits = json.loads(text) if text != _GONE else (0, 0, "", False)
    call_at = old.call_at if old is not None and old.calls == calls else now
    seen[rank] = _Seen(text, calls, place, waits, now, call_at, old.told_at if old else 0.0)
