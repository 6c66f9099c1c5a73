"""Loading on one rank: round trips, pointers, damage, tensors that do not fit."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from lib.atomic import sha256_of
from lib.checkpoint import directory as folders
from lib.checkpoint import loading
from lib.errors import UserError
from tests.checkpoint.saved import assert_is, blank, load, load_latest, save, save_tensors

POINTER = "latest_checkpointed_iteration.txt"


def test_round_trip_is_exact_and_in_place(tmp_path):
    save(tmp_path, 3)
    tensors = blank()
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    assert load_latest(tmp_path, tensors).iteration == 3
    assert_is(tensors, 3)
    assert places == {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_files_of_a_checkpoint(tmp_path):
    save(tmp_path, 3)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"iter_0000003", POINTER}
    assert (tmp_path / POINTER).read_text() == "3\n"
    files = {path.name for path in (tmp_path / "iter_0000003").iterdir()}
    assert files == {".metadata", "__0_0.distcp", "state.json", "manifest.json"}
    manifest = folders.read_manifest(tmp_path / "iter_0000003")
    assert set(manifest) == files - {"manifest.json"}
    for name, record in manifest.items():
        assert record.sha256 == sha256_of(tmp_path / "iter_0000003" / name)


def test_parameters_are_filled_through_their_memory(tmp_path):
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save_tensors(tmp_path, 1, dict(source.named_parameters()), {}, 1)
    load_latest(tmp_path, {name: p.detach() for name, p in target.named_parameters()})
    assert torch.equal(source.weight, target.weight)
    assert torch.equal(source.bias, target.bias)


def test_nothing_to_load(tmp_path, capsys):
    assert load(tmp_path) is None
    assert load(tmp_path / "nowhere") is None
    assert capsys.readouterr().err == ""


def test_rotation_after_saves(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5, 6, keep_last=2, keep_every=3)
    assert folders.iterations(tmp_path) == [3, 5, 6]
    assert load(tmp_path) == 6


def test_saving_an_iteration_again_replaces_it(tmp_path):
    save(tmp_path, 4)
    save_tensors(tmp_path, 4, {"other": torch.ones(2)}, {}, 2)
    target = {"other": torch.zeros(2)}
    assert load_latest(tmp_path, target).iteration == 4
    assert target["other"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("pointer", "expected", "warning"),
    [
        ("3\n", 3, ""),
        ("2\n", 2, "the newer checkpoint"),
        ("9\n", 3, "names iteration 9, which has no checkpoint"),
        ("", 3, "not an iteration"),
        ("abc", 3, "not an iteration"),
        ("-1", 3, "not an iteration"),
        (None, 3, "is missing"),
    ],
)
def test_table_of_pointers(tmp_path, capsys, pointer, expected, warning):
    save(tmp_path, 1, 2, 3)
    capsys.readouterr()
    (tmp_path / POINTER).unlink()
    if pointer is not None:
        (tmp_path / POINTER).write_text(pointer)
    assert load(tmp_path) == expected
    errors = capsys.readouterr().err
    assert warning in errors
    assert bool(errors) == bool(warning)


@pytest.mark.parametrize("pointer", ["9", "", "abc"])
def test_a_pointer_without_any_checkpoint_is_refused(tmp_path, pointer):
    (tmp_path / POINTER).write_text(pointer)
    with pytest.raises(UserError, match="there is none else"):
        load(tmp_path)


def test_no_checkpoint_after_max_iteration_is_taken(tmp_path, capsys):
    save(tmp_path, 10, 20, 30)
    assert load(tmp_path, max_iteration=30) == 30
    assert load(tmp_path, max_iteration=29) == 20
    assert load(tmp_path, max_iteration=20) == 20
    assert capsys.readouterr().err == ""
    assert load(tmp_path, max_iteration=9) is None
    assert "training starts at iteration 0" in capsys.readouterr().err


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped tensor": lambda f: flip(f / "__0_0.distcp"),
    "cut tensor": lambda f: os.truncate(f / "__0_0.distcp", 100),
    "no tensors": lambda f: (f / "__0_0.distcp").unlink(),
    "flipped metadata": lambda f: flip(f / ".metadata"),
    "no metadata": lambda f: (f / ".metadata").unlink(),
    "other scalars": lambda f: (f / "state.json").write_text('{"scalars": {"n": 9}}'),
    "no manifest": lambda f: (f / "manifest.json").unlink(),
    "zeroed manifest": lambda f: (f / "manifest.json").write_bytes(bytes(200)),
    "empty folder": lambda f: [path.unlink() for path in f.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_previous_taken(tmp_path, capsys, damage):
    save(tmp_path, 1, 2, 3)
    DAMAGE[damage](tmp_path / "iter_0000003")
    assert load(tmp_path) == 2
    warning = capsys.readouterr().err
    assert "iter_0000003 is damaged" in warning
    assert warning.count("warning") == 1
    DAMAGE[damage](tmp_path / "iter_0000002")
    DAMAGE[damage](tmp_path / "iter_0000001")
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole"):
        load(tmp_path)


def test_debris_of_an_interrupted_save_is_removed_at_start(tmp_path, capsys):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "iter_0000001", tmp_path / "iter_0000002.partial")
    assert load(tmp_path) == 1
    assert "iter_0000002.partial" in capsys.readouterr().err
    assert folders.iterations(tmp_path) == [1]
    assert not (tmp_path / "iter_0000002.partial").exists()


def test_debris_is_removed_at_the_next_save(tmp_path):
    (tmp_path / "iter_0000007.partial").mkdir(parents=True)
    (tmp_path / "iter_0000007.partial" / "__0_0.distcp").write_text("half")
    save(tmp_path, 7)
    assert load(tmp_path) == 7


def test_tensors_that_do_not_fit_are_named_and_nothing_is_loaded(tmp_path):
    save(tmp_path, 1)
    found = loading.find_latest(tmp_path)
    for change, complaint in (
        ({"new": torch.zeros(2)}, "new is missing"),
        ({"model.weight": torch.zeros(5, 17)}, r"model.weight has shape \(17, 5\) instead"),
        ({"half": torch.zeros(3, 4)}, "half is torch.bfloat16 instead of torch.float32"),
    ):
        tensors = blank() | change
        with pytest.raises(UserError, match=complaint):
            loading.load_tensors(found, tensors)
        assert all(not tensor.any() for tensor in tensors.values())
    fewer = blank()
    del fewer["model.weight"]
    with pytest.raises(UserError, match=r"model\.weight has no place in this model"):
        loading.load_tensors(found, fewer)


def test_other_ranks_random_streams_need_no_place(tmp_path):
    save(tmp_path, 1)
    tensors = blank()
    del tensors["random.rank_00000.cpu"]
    assert load_latest(tmp_path, tensors).iteration == 1
