"""Whether a run starts, continues or starts again: what happens to a state directory, and why.

``state/<fingerprint>/state.json`` remembers what the state was made by:

    fingerprint, parts   the trajectory, whole, so that a difference can be named
    code_hash            the code that trained it last
    finished             whether a model was published from it
    adopted              each time changed code was allowed to go on: old and new hash, iteration
    layout               the layout that trained it last
    began_from           state and iteration whose work it goes on with, where the run got later
                         phases (``lib.checkpoint.added_phases``)
    fresh                whether launch.fresh began it: an interrupted fresh run, run again with
                         the key still set, continues and does not start over for ever
    sha256               of all the others, so that a damaged file is never believed

| state      | code    | `open_state` does                                                  |
|------------|---------|--------------------------------------------------------------------|
| none       | any     | starts; if phases were added, from the state of the run without    |
|            |         | them, as if that were this one and unfinished                      |
| unfinished | same    | continues                                                          |
| unfinished | changed | refuses; on_code_change adopt: continues; fresh: starts again      |
| finished   | same    | continues (nothing left to do, or a longer run)                    |
| finished   | changed | starts again                                                       |
| any        | any     | starts again with launch.fresh, once: see `fresh` below            |

Starting again keeps the old state aside, as ``<fingerprint>.superseded-<n>``. Nothing here needs
torch; rank 0 calls it while it holds the `lock` of the directory.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from lib.atomic import write_text_atomically
from lib.checkpoint import directory as folders
from lib.checkpoint.added_phases import Beginning, find_beginning, take_over
from lib.checkpoint.directory import Damaged
from lib.checkpoint.fingerprint import difference, fingerprint, fingerprint_parts
from lib.checkpoint.lock import LOCK, lock
from lib.config.run_config import RunConfig
from lib.console import say, warn
from lib.errors import UserError

RECORD = "state.json"
FORMAT = 2
_LOCK_WAIT_S = 60.0


@dataclass(frozen=True)
class ResumePolicy:
    """The user's choice, from ``launch``.

    Attributes:
        on_code_change: what to do with an unfinished state when the code has changed.
        fresh: start again whatever there is.
    """

    on_code_change: Literal["refuse", "adopt", "fresh"] = "refuse"
    fresh: bool = False


@dataclass
class StateRecord:
    """What state.json holds; see the module's docstring."""

    fingerprint: str
    parts: dict[str, object]
    code_hash: str
    finished: bool = False
    adopted: list[dict[str, object]] = field(default_factory=list)
    layout: dict[str, object] = field(default_factory=dict)
    began_from: dict[str, object] = field(default_factory=dict)
    fresh: bool = False
    format: int = FORMAT


@dataclass(frozen=True)
class StateDirectory:
    """An opened state directory.

    Attributes:
        path: the directory.
        record: what state.json holds.
        outcome: what opening it came to.
    """

    path: Path
    record: StateRecord
    outcome: Literal["new", "begun", "continued", "adopted", "restarted"]

    def mark_training(self, layout: dict[str, object]) -> None:
        """Records that steps are about to be taken under ``layout``: no longer finished."""
        self.record.finished = False
        self.record.layout = layout
        _write(self.path, self.record)

    def mark_finished(self) -> None:
        """Records that the model was published."""
        self.record.finished = True
        _write(self.path, self.record)


def state_path(root: Path, run_config: RunConfig) -> Path:
    """The state directory of a configuration."""
    return root / fingerprint(run_config)


def open_state(
    root: Path, run_config: RunConfig, code_hash: str, policy: ResumePolicy
) -> StateDirectory:
    """Makes the state directory ready to train in: see the table above.

    Raises:
        UserError: the state is unfinished, the code has changed, and nothing says what to do;
            or state.json is damaged or another configuration's.
    """
    path = state_path(root, run_config)
    new = StateRecord(path.name, fingerprint_parts(run_config), code_hash)
    try:
        old = read_record(path)
        if old is not None:
            return _reopened(path, old, new, policy)
        leftovers = _contents(path)
        if leftovers:  # killed while it was being put aside, or state.json was removed
            warn(f"{path} has no {RECORD}: its contents are put aside")
            _put_aside(path, leftovers)
        new.fresh = policy.fresh
        beginning = None if policy.fresh else find_beginning(root, run_config)
        if beginning is not None:
            return _begun(path, new, beginning, policy)
        return _started(path, new, "new")
    except OSError as error:
        raise UserError(f"{path} cannot be prepared: {error}") from error


def _begun(
    path: Path, new: StateRecord, beginning: Beginning, policy: ResumePolicy
) -> StateDirectory:
    """A new state that goes on from another one's checkpoint, if the code lets it."""
    with lock(beginning.state, _LOCK_WAIT_S):
        old = read_record(beginning.state)
        if old is None or old.fingerprint != beginning.state.name:
            warn(f"{beginning.state / RECORD} is missing or another state's: it is not used")
            return _started(path, new, "new")
        iteration = beginning.iterations()[-1]
        if old.code_hash != new.code_hash:
            if policy.on_code_change == "fresh":
                say(f"{beginning.state} is not used, as the code has changed since")
                return _started(path, new, "new")
            _adopt(beginning.state, old, new, policy, iteration)
        new.adopted = old.adopted
        path.mkdir(parents=True, exist_ok=True)
        new.began_from = {"state": old.fingerprint, "iteration": take_over(beginning, path)}
    say(
        f"phases were added to the run of {beginning.state}: {path} goes on from its iteration "
        f"{iteration}"
    )
    return _started(path, new, "begun")


def _reopened(
    path: Path, old: StateRecord, new: StateRecord, policy: ResumePolicy
) -> StateDirectory:
    if policy.fresh and (old.finished or not old.fresh):
        new.fresh = True
        return _restarted(path, new, "launch.fresh is true")
    if changes := difference(old.parts, new.parts):
        raise UserError(
            f"{path / RECORD} is the state of another configuration ({'; '.join(changes)}); "
            "move that directory away, or set launch.fresh: true"
        )
    if old.code_hash == new.code_hash:
        return StateDirectory(path, old, "continued")
    if old.finished:
        return _restarted(path, new, "the code has changed since this configuration was trained")
    return _on_changed_code(path, old, new, policy)


def _on_changed_code(
    path: Path, old: StateRecord, new: StateRecord, policy: ResumePolicy
) -> StateDirectory:
    """An unfinished state whose code has changed since: the user decides."""
    iteration = _progress(path)
    if iteration is None:
        return _restarted(path, new, "the code has changed and no checkpoint was saved yet")
    if policy.on_code_change == "fresh":
        return _restarted(path, new, "the code has changed and launch.on_code_change is fresh")
    _adopt(path, old, new, policy, iteration)
    old.code_hash = new.code_hash
    _write(path, old)
    say(f"continuing {path} at iteration {iteration} with changed code, as launch asks")
    return StateDirectory(path, old, "adopted")


def _adopt(
    path: Path, old: StateRecord, new: StateRecord, policy: ResumePolicy, iteration: int
) -> None:
    """Notes that changed code goes on with a state.

    Raises:
        UserError: nobody has said that it may.
    """
    if policy.on_code_change != "adopt":
        raise UserError(
            f"the code has changed ({old.code_hash} -> {new.code_hash}) since {path} was trained "
            f"to iteration {iteration}. Two ways on: launch.on_code_change: adopt continues with "
            "the new code and records it in the model; launch.on_code_change: fresh starts again "
            "and keeps the old state aside"
        )
    old.adopted.append({"from": old.code_hash, "to": new.code_hash, "iteration": iteration})


def _restarted(path: Path, new: StateRecord, why: str) -> StateDirectory:
    aside = _put_aside(path, _contents(path))
    say(f"{why}: starting again; the old state is kept in {aside}")
    return _started(path, new, "restarted")


def _started(
    path: Path, new: StateRecord, outcome: Literal["new", "begun", "restarted"]
) -> StateDirectory:
    path.mkdir(parents=True, exist_ok=True)
    _write(path, new)
    return StateDirectory(path, new, outcome)


def _progress(path: Path) -> int | None:
    """The iteration that an unfinished state has reached, as far as its names tell."""
    present = folders.iterations(path)
    try:
        pointer = folders.read_pointer(path)
    except Damaged:
        pointer = None
    return pointer if pointer is not None else (present[-1] if present else None)


def _contents(path: Path) -> list[Path]:
    """All that is in a state directory but the lock, state.json first."""
    if not path.is_dir():
        return []
    entries = sorted(entry for entry in path.iterdir() if entry.name != LOCK)
    return sorted(entries, key=lambda entry: entry.name != RECORD)


def _put_aside(path: Path, contents: Sequence[Path]) -> Path:
    """Moves a state aside, all but the lock, which this process holds.

    state.json goes first: a kill in the middle leaves a directory without one, whose remaining
    contents the next run puts aside too.
    """
    number = 1
    while (aside := path.with_name(f"{path.name}.superseded-{number}")).exists():
        number += 1
    aside.mkdir(parents=True)
    for entry in contents:
        shutil.move(entry, aside / entry.name)
    return aside


def read_record(path: Path) -> StateRecord | None:
    """What a state directory's state.json holds; None where there is none.

    Raises:
        UserError: it is damaged, or another version's.
    """
    file = path / RECORD
    if not file.exists():
        return None
    remedy = f"restore it, or move {path} away to start again"
    try:
        values = json.loads(file.read_bytes())
        found, sha256 = values["format"], values.pop("sha256", None)
        if found != FORMAT:
            raise UserError(f"{file} has format {found}, this version reads {FORMAT}; {remedy}")
        if sha256 != _sha256_of(values):
            raise UserError(f"{file} is damaged: it does not fit its own sha256; {remedy}")
        return StateRecord(**values)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); {remedy}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({error}); {remedy}") from error


def _write(path: Path, record: StateRecord) -> None:
    values = asdict(record)
    text = json.dumps({**values, "sha256": _sha256_of(values)}, indent=2, sort_keys=True) + "\n"
    try:
        write_text_atomically(path / RECORD, text)
    except OSError as error:
        raise UserError(f"{path / RECORD} cannot be written: {error.strerror}") from error


def _sha256_of(values: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
