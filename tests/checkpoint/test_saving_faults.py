"""What a checkpoint must survive on one rank: hostile files, full disks, kills."""

import errno
import os
import pickle
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from lib.atomic import sha256_of
from lib.checkpoint import directory as folders
from lib.checkpoint import saving, torch_files
from lib.checkpoint.directory import FileRecord
from lib.checkpoint.metadata import read_metadata
from lib.errors import UserError
from tests.checkpoint.saved import example, load, save, save_tensors, snapshot


class Exploit:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def reseal(folder):
    """What an attacker would do: a manifest that fits the changed files."""
    files = {
        path.name: FileRecord(path.stat().st_size, sha256_of(path))
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    folders.write_manifest(folder, int(folder.name[5:]), files)


def test_a_crafted_metadata_pickle_runs_nothing(tmp_path, capsys):
    save(tmp_path, 1, 2)
    mark = tmp_path / "mark"
    folder = tmp_path / "iter_0000002"
    data = pickle.dumps(Exploit(mark))
    pickle.loads(data)  # noqa: S301
    assert mark.exists(), "the exploit does not even work"
    mark.unlink()
    (folder / ".metadata").write_bytes(data)
    reseal(folder)
    assert load(tmp_path) == 1
    assert "which is not allowed" in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize("name", ["torch.load", "torch.hub.load", "builtins.eval", "os.system"])
def test_names_outside_the_list_are_refused(tmp_path, name):
    save(tmp_path, 1)
    module, attribute = name.rsplit(".", 1)
    folder = tmp_path / "iter_0000001"
    (folder / ".metadata").write_bytes(f"c{module}\n{attribute}\n.".encode())
    with pytest.raises(folders.Damaged, match=f"asks for {name}"):
        read_metadata(folder)


def test_a_checkpoint_with_byte_entries_is_refused(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "iter_0000001"
    for path in folder.iterdir():
        path.unlink()
    mark = tmp_path / "mark"
    state = example(1) | {"extra": Exploit(mark)}
    with pytest.warns(UserWarning, match=r"torch\.distributed is"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    folders.write_scalars(folder, 1, {"n": 1})
    reseal(folder)
    with pytest.raises(folders.Damaged, match="extra, which is not a tensor"):
        read_metadata(folder)
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole"):
        load(tmp_path)
    assert not mark.exists()


def test_metadata_that_points_outside_its_folder_is_refused(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "iter_0000001"
    metadata = read_metadata(folder)
    for place in metadata.storage_data.values():
        place.relative_path = "../../elsewhere/__0_0.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(folders.Damaged, match="points to"):
        read_metadata(folder)


def test_metadata_is_what_torch_reads(tmp_path):
    save(tmp_path, 1)
    data = (tmp_path / "iter_0000001" / ".metadata").read_bytes()
    theirs = pickle.loads(data)  # noqa: S301
    ours = read_metadata(tmp_path / "iter_0000001")
    assert ours == theirs


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "step", ["write_scalars", "write_manifest", "publish", "write_pointer", "mkdir", "hash"]
)
def test_a_full_disk_at_any_step_costs_only_the_new_checkpoint(tmp_path, monkeypatch, step):
    save(tmp_path, 1, 2)
    before = snapshot(tmp_path)
    with monkeypatch.context() as patch:
        if step == "mkdir":
            patch.setattr(Path, "mkdir", full)
        elif step == "hash":
            patch.setattr("lib.checkpoint.ranks.sha256_of", full)
        else:
            patch.setattr(folders, step, full)
        with pytest.raises(UserError, match=r"No space left on device.*bytes needed.*free"):
            save(tmp_path, 3)
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "iter_0000003").exists()
    assert not list(tmp_path.glob("*.partial"))
    assert load(tmp_path) == 2
    save(tmp_path, 3)
    assert load(tmp_path) == 3


def test_a_file_size_limit_while_tensors_are_written(tmp_path):
    save(tmp_path, 1)
    before = snapshot(tmp_path)
    large = {"large": torch.zeros(1 << 20)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(UserError, match=r"could not be saved: File too large; .*needed"):
            save_tensors(tmp_path, 2, large, {}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert snapshot(tmp_path) == before
    assert load(tmp_path) == 1


def test_a_fault_of_any_writing_thread_is_heard(tmp_path, monkeypatch):
    """torch's own writing threads would leave a hole in the checkpoint and say nothing."""
    monkeypatch.setattr(torch_files, "_BYTES_PER_FILE", 1)
    monkeypatch.setattr(saving, "file_threads", lambda: 3)
    save(tmp_path, 1)
    names = {path.name for path in (tmp_path / "iter_0000001").glob("*.distcp")}
    assert names == {"__0_0.distcp", "__0_10.distcp", "__0_20.distcp"}
    assert load(tmp_path) == 1
    before, create = snapshot(tmp_path), FileSystem.create_stream
    for ill in sorted(names):
        monkeypatch.setattr(
            FileSystem,
            "create_stream",
            lambda self, path, mode, ill=ill: (
                full() if ill in str(path) else create(self, path, mode)
            ),
        )
        with pytest.raises(UserError, match="No space left on device"):
            save(tmp_path, 2)
        assert snapshot(tmp_path) == before


def test_too_little_space_is_found_before_anything_is_written(tmp_path, monkeypatch):
    save(tmp_path, 1)
    before = snapshot(tmp_path)
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 5000, 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"bytes needed, 5,000 free"):
        save(tmp_path, 2)
    assert snapshot(tmp_path) == before


def test_bytes_needed_bounds_what_is_written(tmp_path):
    tensors = {f"t{n}": torch.randn(100 + n, 7) for n in range(40)}
    folder = save_tensors(tmp_path, 1, tensors, {}, 1)
    written = sum(path.stat().st_size for path in folder.iterdir())
    payload = sum(tensor.numel() * 4 for tensor in tensors.values())
    assert payload < written < saving.bytes_needed(tensors) < 2 * payload + 200_000


def test_a_failed_save_over_an_existing_iteration_keeps_it(tmp_path, monkeypatch):
    save(tmp_path, 2)
    monkeypatch.setattr(folders, "write_manifest", full)
    with pytest.raises(UserError):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert load(tmp_path) == 2


def test_rotation_trouble_is_only_a_warning(tmp_path, monkeypatch, capsys):
    save(tmp_path, 1)
    monkeypatch.setattr(folders, "remove", full)
    save(tmp_path, 2, keep_last=1)
    assert "could not be removed" in capsys.readouterr().err
    assert load(tmp_path) == 2


def save_for_ever(directory, started):
    """A child's life: save iteration after iteration until it is killed."""
    os.write(started, b"x")
    iteration = (load(directory) or 0) + 1
    while True:
        save(directory, iteration, keep_last=2)
        os.write(started, b"x")
        iteration += 1


def test_a_kill_at_any_moment_costs_at_most_the_save_in_progress(tmp_path, capfd):
    """Killed (SIGKILL) again and again at random moments of saving, loading and rotating."""
    moments = random.Random(5)
    reached = 0
    for _ in range(10):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_for_ever(tmp_path, write_end)
            finally:
                os._exit(1)
        os.close(write_end)
        saves = -1
        for _ in range(1 + moments.randrange(2)):  # it has started, or has saved once more
            assert os.read(read_end, 1) == b"x"
            saves += 1
        time.sleep(moments.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child failed by itself"
        while os.read(read_end, 1):
            saves += 1
        os.close(read_end)
        found = load(tmp_path) or 0
        assert found in (reached + saves, reached + saves + 1)
        assert len(folders.iterations(tmp_path)) <= 4
        reached = found
    assert reached >= 4
    assert "damaged" not in capfd.readouterr().err
