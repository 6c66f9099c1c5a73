"""The folders of one state directory: names, order, completeness. Knows no tensors.

::

    state/<fingerprint>/
        state.json                           lib.checkpoint.resume
        history.jsonl                        lib.checkpoint.history
        lock                                 lib.checkpoint.lock
        train.log                            every line said (lib.train.pretrain)
        latest_checkpointed_iteration.txt    the iteration to resume from
        iter_0000100/                        one complete checkpoint
            __0_0.distcp ...  .metadata      tensors (torch.distributed.checkpoint)
            state.json                       scalars
            manifest.json                    sizes and sha256 of all the others, written last
        iter_0000200.partial/                a save that was interrupted: debris

A folder counts as a checkpoint only once it was renamed from ``.partial``; before that rename all
its files were synced and its manifest written. Folders are renamed to ``.partial`` before they
are removed, so that a kill in the middle of a removal leaves debris, never half a checkpoint.
"""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.atomic import PARTIAL_SUFFIX, sync_file, write_text_atomically
from lib.errors import UserError

POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
SCALARS = "state.json"
FORMAT = 1
_ITERATION = re.compile(r"iter_(\d{7,})")


class Damaged(Exception):
    """A checkpoint is not what its manifest says; the message names the file and the fault."""


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says about one file."""

    bytes: int
    sha256: str


def iteration_path(directory: Path, iteration: int) -> Path:
    """The folder of the checkpoint of ``iteration``."""
    return directory / f"iter_{iteration:07d}"


def partial_path(path: Path) -> Path:
    """Where ``path`` is built, or taken apart."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def iterations(directory: Path) -> list[int]:
    """The iterations that have a checkpoint folder, whole or damaged, in ascending order."""
    if not directory.is_dir():
        return []
    matches = (_ITERATION.fullmatch(path.name) for path in directory.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def read_pointer(directory: Path) -> int | None:
    """The iteration that the pointer file names, or None where there is no such file.

    Raises:
        Damaged: the file cannot be read, or holds something other than one iteration number.
    """
    path = directory / POINTER
    if not path.exists():
        return None
    try:
        text = path.read_bytes()[:64].decode("ascii", "replace").strip()
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from error
    if not re.fullmatch(r"[0-9]+", text):
        raise Damaged(f"{path} says {text!r}, not an iteration")
    return int(text)


def write_pointer(directory: Path, iteration: int) -> None:
    """Makes ``iteration`` the one to resume from."""
    write_text_atomically(directory / POINTER, f"{iteration}\n")


def write_manifest(folder: Path, iteration: int, files: dict[str, FileRecord]) -> None:
    """Writes the list of a checkpoint's files: its seal, hence the last file written."""
    record = {
        "format": FORMAT,
        "iteration": iteration,
        "files": {
            name: {"bytes": file.bytes, "sha256": file.sha256}
            for name, file in sorted(files.items())
        },
    }
    write_text_atomically(folder / MANIFEST, json.dumps(record, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """The files of a checkpoint, each present and of its right size.

    Raises:
        Damaged: the manifest or a file is missing, unreadable, superfluous or of another size.
    """
    try:
        record = json.loads((folder / MANIFEST).read_bytes())
        if record["format"] != FORMAT:
            raise Damaged(f"{MANIFEST} has format {record['format']}, this version reads {FORMAT}")
        if iteration_path(folder.parent, record["iteration"]).name != folder.name:
            raise Damaged(f"{MANIFEST} is that of iteration {record['iteration']}")
        files = {
            name: FileRecord(int(file["bytes"]), str(file["sha256"]))
            for name, file in record["files"].items()
        }
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{MANIFEST} is not a manifest") from error
    try:
        present = {path.name: path.stat().st_size for path in folder.iterdir()}
    except OSError as error:
        raise Damaged(f"{Path(error.filename).name} cannot be read: {error.strerror}") from error
    for name, file in files.items():
        if name not in present:
            raise Damaged(f"{name} is missing")
        if present[name] != file.bytes:
            raise Damaged(f"{name} has {present[name]} bytes instead of {file.bytes}")
    if unknown := sorted(set(present) - set(files) - {MANIFEST}):
        raise Damaged(f"{unknown[0]} does not belong to it")
    return files


def read_scalars(folder: Path) -> dict[str, object]:
    """The scalars that were saved beside the tensors."""
    try:
        record = json.loads((folder / SCALARS).read_bytes())
        scalars = record["scalars"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / SCALARS} cannot be read ({error}); remove {folder}") from error
    assert isinstance(scalars, dict)
    return scalars


def write_scalars(folder: Path, iteration: int, scalars: dict[str, object]) -> None:
    """Writes the scalars of a checkpoint. Python's JSON gives every float back exactly."""
    record = {"format": FORMAT, "iteration": iteration, "scalars": scalars}
    write_text_atomically(folder / SCALARS, json.dumps(record, indent=2, sort_keys=True) + "\n")


def publish(partial: Path, folder: Path) -> None:
    """Gives a finished folder its final name; one that already has that name makes room."""
    for file in sorted(partial.iterdir()):
        sync_file(file)
    sync_file(partial)
    replaced = folder.with_name(f"{folder.name}.replaced{PARTIAL_SUFFIX}")
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    sync_file(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove(folder: Path) -> None:
    """Removes a checkpoint so that no moment shows half of it under its name."""
    partial = partial_path(folder)
    shutil.rmtree(partial, ignore_errors=True)
    folder.rename(partial)
    shutil.rmtree(partial)


def remove_debris(directory: Path) -> list[str]:
    """Removes what interrupted saves and removals left behind; gives the names removed."""
    if not directory.is_dir():
        return []
    debris = sorted(directory.glob(f"iter_*{PARTIAL_SUFFIX}"))
    debris += sorted(directory.glob(f"{POINTER}{PARTIAL_SUFFIX}"))
    for path in debris:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return [path.name for path in debris]


def kept_iterations(complete: Sequence[int], keep_last: int, keep_every: int | None) -> set[int]:
    """Which of the complete checkpoints stay: the last few, and every so many iterations one."""
    assert keep_last >= 1
    kept = set(sorted(complete)[-keep_last:])
    if keep_every:
        kept |= {iteration for iteration in complete if iteration % keep_every == 0}
    return kept
