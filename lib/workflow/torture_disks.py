"""Disks that are full or read-only, made with what the machine allows.

A small tmpfs or a read-only bind mount lives in a mount namespace of its own (``unshare``), so
nothing else on the machine sees it; root needs no user namespace for it, others need one. Where
neither is allowed, a limit of file sizes stands in for the full disk, and file modes for the
read-only folder, which root is not bound by: then that one cannot be tried.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lib.workflow.torture_processes import Scene

# The arguments: size in bytes, folder to put the tmpfs over, where its contents go in the end,
# step after which the disk fills up (0: it is full from the start), the command.
_ON_SMALL_DISK = """
size=$1 folder=$2 after=$3 step=$4 filler=; shift 4
cp -a "$folder" "$after.before" && mount -t tmpfs -o "size=$size" tmpfs "$folder" || exit 99
cp -a "$after.before/." "$folder" || exit 99
if [ "$step" -gt 0 ]; then
  ( until grep -qs "\\"iteration\\": $step," "$folder"/*/history.jsonl; do sleep 0.01; done
    dd if=/dev/zero of="$folder/ballast" bs=4096 2> "$after.dd" ) &
  filler=$!
else
  dd if=/dev/zero of="$folder/ballast" bs=4096 2> "$after.dd"
fi
"$@"
status=$?
[ -z "$filler" ] || kill "$filler" 2> "$after.kill"
rm -f "$folder/ballast"
cp -a "$folder" "$after" || exit 99
exit $status
"""
_ON_READ_ONLY_FOLDER = """
folder=$1; shift
mount --bind "$folder" "$folder" && mount -o remount,ro,bind "$folder" || exit 99
exec "$@"
"""
_WITH_SMALL_FILES = (
    "import os, resource, sys; size = int(sys.argv[1]); "
    "resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)); os.execvp(sys.argv[2], sys.argv[2:])"
)


def namespace() -> tuple[str, ...] | None:
    """The command that runs another where it may mount, or None where the machine forbids it."""
    for command in (("unshare", "--mount"), ("unshare", "--map-root-user", "--mount")):
        with tempfile.TemporaryDirectory(prefix="drydock-mount-") as folder:
            mount = ["mount", "-t", "tmpfs", "-o", "size=65536", "tmpfs", folder]
            try:
                done = subprocess.run([*command, *mount], capture_output=True, check=False)
            except OSError:
                return None
            if done.returncode == 0:
                return command
    return None


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, each rounded up to pages as a tmpfs holds them."""
    return sum(
        -(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file()
    )


def small_disk(scene: Scene, within: Sequence[str], free: int, *, fills_at: int) -> tuple[str, ...]:
    """A wrapper that puts the states on a tmpfs with so many bytes free, which then fills up.

    Args:
        scene: the scene; `take_over` must follow once the command has ended.
        within: from `namespace`.
        free: bytes left beside what is there.
        fills_at: the step after which nothing is left of them; 0: before the start.
    """
    states = scene.state.parent
    arguments = (size_of(states) + free, states, _after(scene), fills_at)
    return (*within, "sh", "-c", _ON_SMALL_DISK, "sh", *map(str, arguments))


def take_over(scene: Scene) -> None:
    """Puts what the tmpfs held in the end in the place of the states."""
    states = scene.state.parent
    states.rename(states.with_name("state.before"))
    _after(scene).rename(states)


def _after(scene: Scene) -> Path:
    return scene.project.parent / "after"


def small_files(size: int) -> tuple[str, ...]:
    """A wrapper under which no file can grow beyond so many bytes: writes fail in the middle."""
    return (sys.executable, "-c", _WITH_SMALL_FILES, str(size))


def read_only(folder: Path, within: Sequence[str]) -> tuple[str, ...]:
    """A wrapper under which a folder is read-only, for root too."""
    return (*within, "sh", "-c", _ON_READ_ONLY_FOLDER, "sh", str(folder))


def modes_bind() -> bool:
    """Whether file modes bind this user: not root."""
    return os.geteuid() != 0
