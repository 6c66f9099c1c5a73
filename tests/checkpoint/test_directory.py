"""Names and completeness of checkpoint folders, without tensors."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.checkpoint import directory as folders
from lib.checkpoint.directory import Damaged, FileRecord


def make(directory, iteration, text="data"):
    folder = folders.iteration_path(directory, iteration)
    folder.mkdir(parents=True)
    (folder / "a").write_text(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    folders.write_manifest(folder, iteration, {"a": FileRecord(len(text), digest)})
    return folder


def test_names_follow_megatron(tmp_path):
    assert folders.iteration_path(tmp_path, 100).name == "iter_0000100"
    assert folders.iteration_path(tmp_path, 12345678).name == "iter_12345678"
    for name in ("iter_0000003", "iter_12345678", "iter_0000001.partial", "iter_x", "release"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000009").write_text("a file")
    assert folders.iterations(tmp_path) == [3, 12345678]
    assert folders.iterations(tmp_path / "nowhere") == []


@pytest.mark.parametrize(("text", "value"), [("5\n", 5), ("0000005", 5), (" 7 ", 7), ("0", 0)])
def test_pointer(tmp_path, text, value):
    assert folders.read_pointer(tmp_path) is None
    (tmp_path / folders.POINTER).write_text(text)
    assert folders.read_pointer(tmp_path) == value


@pytest.mark.parametrize("text", ["", "abc", "-1", "1.5", "1e3", "5 6", "\x00\x00", "release"])
def test_pointer_that_is_no_iteration(tmp_path, text):
    (tmp_path / folders.POINTER).write_text(text)
    with pytest.raises(Damaged, match="latest_checkpointed_iteration"):
        folders.read_pointer(tmp_path)


def test_written_pointer_is_plain_text(tmp_path):
    folders.write_pointer(tmp_path, 1200)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1200\n"


def spoil_manifest(folder, change):
    record = json.loads((folder / "manifest.json").read_text())
    change(record)
    (folder / "manifest.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda f: (f / "a").unlink(), "a is missing"),
        (lambda f: (f / "a").write_text("dat"), "3 bytes instead of 4"),
        (lambda f: (f / "b").write_text(""), "b does not belong"),
        (lambda f: (f / "manifest.json").unlink(), "cannot be read"),
        (lambda f: (f / "manifest.json").write_text('{"format": 1'), "not a manifest"),
        (lambda f: (f / "manifest.json").write_text("[]"), "not a manifest"),
        (lambda f: spoil_manifest(f, lambda r: r.pop("files")), "not a manifest"),
        (lambda f: spoil_manifest(f, lambda r: r.update(format=2)), "format 2"),
        (lambda f: spoil_manifest(f, lambda r: r.update(iteration=6)), "iteration 6"),
    ],
)
def test_a_folder_that_is_not_as_its_manifest_says(tmp_path, spoil, complaint):
    folder = make(tmp_path, 5)
    assert folders.read_manifest(folder)["a"].bytes == 4
    spoil(folder)
    with pytest.raises(Damaged, match=complaint):
        folders.read_manifest(folder)


@given(
    complete=st.sets(st.integers(1, 60)),
    keep_last=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 12),
)
def test_kept_iterations(complete, keep_last, keep_every):
    kept = folders.kept_iterations(sorted(complete), keep_last, keep_every)
    assert kept <= complete
    for iteration in complete:
        newer = sum(other > iteration for other in complete)
        wanted = newer < keep_last or (keep_every is not None and iteration % keep_every == 0)
        assert (iteration in kept) == wanted


def test_publishing_over_an_existing_folder_replaces_it(tmp_path):
    folder = make(tmp_path, 5, "old")
    partial = folders.partial_path(folder)
    partial.mkdir()
    (partial / "a").write_text("new")
    folders.publish(partial, folder)
    assert (folder / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000005"]


def test_debris_is_removed_and_named(tmp_path):
    make(tmp_path, 5)
    for name in ("iter_0000006.partial", "iter_0000005.replaced.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("")
    (tmp_path / f"{folders.POINTER}.partial").write_text("")
    assert folders.remove_debris(tmp_path) == [
        "iter_0000005.replaced.partial",
        "iter_0000006.partial",
        f"{folders.POINTER}.partial",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000005"]
    assert folders.remove_debris(tmp_path) == []
    assert folders.remove_debris(tmp_path / "nowhere") == []


def test_scalars_come_back_exactly(tmp_path):
    scalars = {"loss": 0.1 + 0.2, "tiny": 5e-324, "n": 2**60, "name": "x", "nested": {"a": [1.5]}}
    folders.write_scalars(tmp_path, 5, scalars)
    assert folders.read_scalars(tmp_path) == scalars
