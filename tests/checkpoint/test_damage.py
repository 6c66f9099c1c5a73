"""Damage of every kind to every file of a state: found, named, and never believed.

One small state is saved once; each case works on a copy. What is asked each time: a resume takes
whole data or refuses in one line.
"""

import json
import pickle
import shutil
import struct
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as dcp_metadata

from lib.atomic import sha256_of
from lib.checkpoint import directory as folders
from lib.checkpoint.directory import Damaged, FileRecord
from lib.checkpoint.history import History
from lib.checkpoint.inspect import TensorReader, read_checkpoint
from lib.checkpoint.metadata import read_metadata
from lib.checkpoint.resume import ResumePolicy, open_state, read_record
from lib.errors import UserError
from tests.checkpoint.examples import run_config
from tests.checkpoint.saved import example, load, save

OLD, NEW = 3, 5
FILES = ("__0_0.distcp", ".metadata", "state.json", "manifest.json")
ROWS = [{"kind": "train", "iteration": n, "loss": 5.0 / n} for n in range(1, NEW + 1)]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A state directory with two checkpoints, a record and a history."""
    root = tmp_path_factory.mktemp("pristine")
    state = open_state(root, run_config(), "code-1", ResumePolicy())
    state.mark_training({"tensor": 1, "data": 1})
    save(state.path, OLD, NEW)
    history = History(state.path)
    for row in ROWS:
        history.append(row)
    return state.path


@pytest.fixture
def state(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / pristine.name)


def newest(state):
    return state / f"iter_{NEW:07d}"


@contextmanager
def flipped(path, bit):
    """One bit of a file inverted, and put right again."""
    original = path.read_bytes()
    data = bytearray(original)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(original)


def cut(path, length):
    path.write_bytes(path.read_bytes()[:length])


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


KINDS = {
    "cut by two bytes": lambda path: cut(path, path.stat().st_size - 2),
    "cut to nothing": lambda path: cut(path, 0),
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros of the same size": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "removed": Path.unlink,
    "a folder": replace_by_folder,
    "unreachable": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_older_checkpoint_taken(state, capsys, name, kind):
    KINDS[kind](newest(state) / name)
    assert load(state) == OLD
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert f"iter_{NEW:07d} is damaged" in warnings[0]
    assert name in warnings[0] or name == "manifest.json"
    facts = read_checkpoint(newest(state), hashed=True)
    assert facts.damage
    assert name in " ".join(facts.damage) or name == "manifest.json"


@pytest.mark.parametrize("name", ["extra", "__1_0.distcp", ".metadata.tmp", "folder/"])
def test_a_file_too_many_is_damage(state, capsys, name):
    extra = newest(state) / name
    extra.mkdir() if name.endswith("/") else extra.write_bytes(b"")
    assert load(state) == OLD
    assert name.strip("/") in capsys.readouterr().err


@settings(max_examples=30)
@given(data=st.data())
def test_one_flipped_bit_in_any_file_is_found(pristine, data):
    path = newest(pristine) / data.draw(st.sampled_from(FILES))
    bit = data.draw(st.integers(0, 8 * path.stat().st_size - 1))
    with flipped(path, bit):
        assert read_checkpoint(newest(pristine), hashed=True).damage
        assert load(pristine) == OLD  # load compares every tensor of what it took


@pytest.mark.parametrize("name", FILES)
def test_when_no_checkpoint_is_whole_it_refuses_in_one_line(state, name):
    for iteration in (OLD, NEW):
        cut(folders.iteration_path(state, iteration) / name, 7)
    with pytest.raises(UserError, match=r"^no checkpoint in [^\n]* is whole[^\n]*$"):
        load(state)


@settings(max_examples=20)
@given(data=st.data())
def test_a_flipped_bit_in_the_pointer_loads_a_whole_checkpoint(pristine, data):
    path = pristine / folders.POINTER
    with flipped(path, data.draw(st.integers(0, 8 * path.stat().st_size - 1))):
        assert load(pristine) in (OLD, NEW)


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_the_last_newline_of_a_file_that_is_only_text_says_nothing(state, capsys, name):
    path = newest(state) / name
    cut(path, path.stat().st_size - 1)
    assert load(state) == (NEW if name == "manifest.json" else OLD)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_pointer_loads_the_newest_whole_checkpoint(state, capsys, kind):
    KINDS[kind](state / folders.POINTER)
    assert load(state) == NEW
    assert folders.POINTER in capsys.readouterr().err or kind == "a byte more"


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"removed", "unreachable"}))
def test_a_damaged_record_is_refused_by_name(state, kind):
    KINDS[kind](state / "state.json")
    before = sorted(state.rglob("*"))
    with pytest.raises(UserError, match=r"^[^\n]*state\.json [^\n]*move [^\n]* away[^\n]*$"):
        open_state(state.parent, run_config(), "code-1", ResumePolicy())
    assert sorted(state.rglob("*")) == before


@pytest.mark.parametrize("kind", ["removed", "unreachable"])
def test_a_state_without_its_record_is_put_aside_whole(state, capsys, kind):
    KINDS[kind](state / "state.json")
    opened = open_state(state.parent, run_config(), "code-1", ResumePolicy())
    assert (opened.outcome, load(opened.path)) == ("new", None)
    assert "put aside" in capsys.readouterr().err
    assert load(state.with_name(f"{state.name}.superseded-1")) == NEW


@settings(max_examples=100)
@given(data=st.data())
def test_one_flipped_bit_in_the_record_is_refused(pristine, data):
    path = pristine / "state.json"
    bit = data.draw(st.integers(0, 8 * path.stat().st_size - 1))
    with flipped(path, bit), pytest.raises(UserError, match=r"state\.json"):
        read_record(pristine)


@pytest.mark.parametrize("kind", ["cut by two bytes", "cut to nothing", "a byte more"])
def test_a_history_that_was_cut_off_is_mended(state, kind):
    KINDS[kind](state / "history.jsonl")
    history = History(state)
    history.truncate(NEW)
    rows = {"cut by two bytes": ROWS[:-1], "cut to nothing": [], "a byte more": ROWS}[kind]
    assert history.rows("train", NEW) == rows


@pytest.mark.parametrize("kind", ["zeros of a line", "a folder"])
def test_a_damaged_history_is_refused_by_name(state, kind):
    path = state / "history.jsonl"
    if kind == "a folder":
        replace_by_folder(path)
    else:
        lines = path.read_bytes().splitlines()
        path.write_bytes(b"\n".join([lines[0], bytes(20), *lines[2:], b""]))
    with pytest.raises(UserError, match=r"^[^\n]*history\.jsonl[^\n]*$"):
        History(state).truncate(NEW)


def reseal(folder):
    """What somebody does who crafts a checkpoint: a manifest that fits the changed files."""
    files = {
        path.name: FileRecord(path.stat().st_size, sha256_of(path))
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    folders.write_manifest(folder, int(folder.name[5:]), files)


class Exploit:
    """Its pickle touches a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


# What else a pickle can do: change a class that it may name, or ask for memory without end.
CHANGES_A_CLASS = b"\x80\x04cpathlib\nPosixPath\nN}\x8c\x06anchor\x8c\x04evils\x86b."
CRAFTED = {
    "calls a function": None,
    "changes a class": CHANGES_A_CLASS,
    "asks for a huge array": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"x.",
    "asks for a huge memo": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "imports by extension code": b"\x80\x02\x82\x01.",
    "reads outside": b"\x80\x04cos\nsystem\n(\x8c\x04true\x85R.",
    "fetches an attribute": b"\x80\x04cbuiltins\ngetattr\n(ctorch\nSize\n\x8c\x05countt\x85R.",
    "holds only a number": b"\x80\x04K\x01.",
    "is no pickle": b"hello",
}


@pytest.mark.parametrize("craft", CRAFTED)
def test_a_crafted_description_is_refused_and_runs_nothing(state, capsys, craft):
    mark = state / "mark"
    data = CRAFTED[craft] or pickle.dumps(Exploit(mark))
    anchor = Path.anchor
    (newest(state) / ".metadata").write_bytes(data)
    reseal(newest(state))
    assert load(state) == OLD
    assert ".metadata" in capsys.readouterr().err
    with pytest.raises(Damaged, match=r"\.metadata"):
        read_metadata(newest(state))
    for hashed in (True, False):
        facts = read_checkpoint(newest(state), hashed=hashed)
        assert [fault for fault in facts.damage if ".metadata" in fault]
    assert Path.anchor is anchor
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_crafted_tensor_bytes_are_refused_and_run_nothing(state):
    mark = state / "mark"
    path = newest(state) / "__0_0.distcp"
    crafted = pickle.dumps(Exploit(mark))
    pickle.loads(crafted)  # noqa: S301
    assert mark.exists(), "the exploit does not even work"
    mark.unlink()
    torch.save(Exploit(mark), state / "saved")
    for payload in (crafted, (state / "saved").read_bytes()):
        for place in read_metadata(newest(state)).storage_data.values():
            data = bytearray(path.read_bytes())
            data[place.offset : place.offset + place.length] = payload.ljust(place.length, b"\0")
            path.write_bytes(data[: path.stat().st_size])
        reseal(newest(state))
        with pytest.raises(UserError, match=r"^checkpoint [^\n]* cannot be read[^\n]*$"):
            load(state)
        reader = TensorReader(newest(state))
        for name in example(NEW).keys() - {"empty"}:  # of which there is nothing to read
            with pytest.raises(UserError, match="cannot be read"):
                reader.read(name)
    assert not mark.exists()


@settings(max_examples=100)
@given(data=st.data())
def test_an_unverified_description_never_breaks_the_reader(pristine, data):
    """With --no-verify the description is read whatever its checksum."""
    original = (newest(pristine) / ".metadata").read_bytes()
    place = data.draw(st.integers(0, len(original) - 1))
    piece = data.draw(st.binary(min_size=1, max_size=8))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / ".metadata").write_bytes(
            original[:place] + piece + original[place + len(piece) :]
        )
        fault = ""
        try:
            read_metadata(Path(folder))
        except Damaged as damage:
            fault = str(damage)
        assert not fault or (".metadata" in fault and "\n" not in fault)


def test_a_description_with_a_hole_is_refused(state):
    metadata = read_metadata(newest(state))
    entry = metadata.state_dict_metadata["model.weight"]
    entry.chunks[0].sizes = torch.Size([16, 5])
    (newest(state) / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(Damaged, match="does not have all of"):
        read_metadata(newest(state))


@pytest.mark.parametrize(
    "reduced",
    [
        lambda member, _: (type(member), (member.value,)),
        lambda member, _: (getattr, (type(member), member.name)),  # Python 3.11.0 to 3.11.3
    ],
)
def test_a_checkpoint_is_read_however_python_pickles_an_enum(tmp_path, monkeypatch, reduced):
    kind = type(next(iter(vars(dcp_metadata)["_MEM_FORMAT_ENCODING"])))
    monkeypatch.setattr(kind, "__reduce_ex__", reduced)
    save(tmp_path, NEW)
    assert load(tmp_path) == NEW


def test_scalars_that_are_none_are_named(state):
    path = newest(state) / "state.json"
    for scalars in ("[]", '{"scalars": 5}', json.dumps({"scalars": None})):
        path.write_text(scalars)
        reseal(newest(state))
        assert read_checkpoint(newest(state), hashed=True).damage == ("state.json cannot be read",)
