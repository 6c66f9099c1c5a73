"""Tokenising by many processes: the same bytes whoever works, dies, or is killed and comes back."""

import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from lib.data import tokenize
from lib.data.tokenize import tokenize_corpus
from lib.data.tokenizer import load_tokenizer, save_tokenizer
from lib.data.tokens_manifest import TOKENS_PREFIX
from lib.errors import UserError
from tests.data.children import started_processes
from tests.data.raw_example import file_hashes
from tests.data.tiny_tokenizer import save_tiny
from tests.data.tokenizing_example import Watcher, documents_of, many_texts, small_shards, task_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny(folder)
    return folder


@pytest.fixture
def many(tmp_path, monkeypatch):
    return small_shards(tmp_path, monkeypatch)


@pytest.fixture
def processes(monkeypatch):
    """However small the corpus is, processes tokenise it."""
    monkeypatch.setattr(tokenize, "_BYTES_PER_WORKER", 1)


def test_the_same_bytes_for_any_number_of_processes(folder, many, tmp_path, monkeypatch):
    results = []
    for workers in (None, 1, 3):
        monkeypatch.setattr(tokenize, "_BYTES_PER_WORKER", 1 if workers else 2**40)
        watcher = Watcher()
        output = tmp_path / f"{workers}"
        manifest = tokenize_corpus(task_of(many, folder, output, workers=workers), watcher)
        assert (watcher.begun, watcher.documents) == (0, len(many_texts()))
        results.append((file_hashes(output), manifest))
    assert results[0] == results[1] == results[2]
    tokenizer = load_tokenizer(folder)
    texts = [text for text in many_texts() if text]
    assert documents_of(output) == [[*tokenizer.encode(t), tokenizer.eod_id] for t in texts]
    assert started_processes() == []
    assert not (tmp_path / "3.partial").exists()


RUN_AND_DIE = """
import os, sys
from pathlib import Path
from lib.data.options import TokensOptions
from lib.data.tokenize import TokenizingTask, tokenize_corpus
raw, tokenizer, output, documents = sys.argv[1:]
class Watcher:
    done = 0
    def begin(self, done):
        print(done.documents)
        sys.stdout.flush()
    def advance(self, done):
        self.done += done.documents
        if self.done >= int(documents):
            os.kill(os.getpid(), 9)
task = TokenizingTask(Path(raw), Path(tokenizer), Path(output), TokensOptions())
tokenize_corpus(task, Watcher())
"""


def test_killed_runs_go_on_and_give_the_same_bytes(folder, many, tmp_path):
    """kill -9 again and again, each time a little further; nothing is published before its time."""
    project = Path(__file__).parents[2]
    begun = []
    for documents in (80, 90, 10):
        command = [sys.executable, "-c", RUN_AND_DIE, many, folder, tmp_path / "t", str(documents)]
        done = subprocess.run(
            list(map(str, command)), cwd=project, capture_output=True, text=True, check=False
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (tmp_path / "t").exists()
        begun.append(int(done.stdout))
    assert begun[0] == 0 < begun[1] < begun[2]
    last = Watcher()
    tokenize_corpus(task_of(many, folder, tmp_path / "t"), last)
    assert last.begun >= begun[2]
    assert last.begun + last.documents == len(many_texts())
    tokenize_corpus(task_of(many, folder, tmp_path / "whole"), Watcher())
    assert file_hashes(tmp_path / "t") == file_hashes(tmp_path / "whole")
    assert not (tmp_path / "t.partial").exists()


def stop_after(documents):
    def stop(done):
        if done >= documents:
            raise KeyboardInterrupt

    return Watcher(stop)


@pytest.mark.parametrize("damage", ["tokens", "lengths", "journal", "key"])
def test_what_a_power_cut_damaged_is_done_again(folder, many, tmp_path, damage):
    """Zeros where the disk lost a page, a line cut short, other options: none gets through."""
    task = task_of(many, folder, tmp_path / "t", workers=1)
    with pytest.raises(KeyboardInterrupt):
        tokenize_corpus(task, stop_after(200))
    work = tmp_path / "t.partial/00-of-01"
    if damage == "journal":
        content = (work / "journal.jsonl").read_bytes()
        (work / "journal.jsonl").write_bytes(content[: content.rindex(b'"sha256"')])
    elif damage == "key":
        task = task_of(many, folder, tmp_path / "t", workers=1, append_eod=False)
    else:
        paths = {
            "tokens": tmp_path / f"t.partial/out/{TOKENS_PREFIX}.bin",
            "lengths": work / "lengths",
        }
        content = bytearray(paths[damage].read_bytes())
        half = len(content) // 2
        content[half:] = bytes(len(content) - half)
        paths[damage].write_bytes(content)
    watcher = Watcher()
    tokenize_corpus(task, watcher)
    assert (watcher.begun == 0) == (damage == "key")
    tokenize_corpus(
        task_of(many, folder, tmp_path / "whole", append_eod=damage != "key"), Watcher()
    )
    assert file_hashes(tmp_path / "t") == file_hashes(tmp_path / "whole")


def test_two_runs_never_write_the_same(folder, many, tmp_path):
    task = task_of(many, folder, tmp_path / "t")

    def second(_documents):
        with pytest.raises(UserError, match="another process works on this"):
            tokenize_corpus(task, Watcher())

    tokenize_corpus(task, Watcher(second))
    tokenize_corpus(task_of(many, folder, tmp_path / "whole"), Watcher())
    assert file_hashes(tmp_path / "t") == file_hashes(tmp_path / "whole")


def test_reading_waits_for_writing(folder, many, processes, tmp_path, monkeypatch):
    """However slow the processes are, only a few frames are in memory."""
    read_frames = tokenize._read_frames
    read = written = most = 0

    def counted(raw, some):
        nonlocal read, most
        for frame in read_frames(raw, some):
            read += 1
            most = max(most, read - written)
            yield frame

    def wrote(_documents):
        nonlocal written
        written += 1

    monkeypatch.setattr(tokenize, "_read_frames", counted)
    tokenize_corpus(task_of(many, folder, tmp_path / "t", workers=1), Watcher(wrote))
    assert written == read > 20
    assert most <= 5
    monkeypatch.setattr(tokenize, "_WAITING_BYTES", 1)
    read = written = most = 0
    tokenize_corpus(task_of(many, folder, tmp_path / "t", workers=1), Watcher(wrote))
    assert most <= 2, "frames too large for the memory wait for each other"


def test_a_process_that_dies_ends_the_stage_with_its_cause(folder, many, processes, tmp_path):
    def kill(documents):
        if documents > 100:
            os.kill(started_processes()[0].pid, signal.SIGKILL)

    task = task_of(many, folder, tmp_path / "t", workers=2)
    with pytest.raises(UserError, match=r"killed by SIGKILL.*run again"):
        tokenize_corpus(task, Watcher(kill))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "t.partial"]
    assert started_processes() == []
    watcher = Watcher()
    tokenize_corpus(task, watcher)
    assert watcher.begun > 0
    assert watcher.begun + watcher.documents == len(many_texts())


def test_a_death_is_told_while_an_older_frame_still_works(
    folder, many, processes, tmp_path, monkeypatch
):
    """A document that takes an hour must not hide for an hour that another process is dead."""
    monkeypatch.setattr(tokenize, "_SECONDS", 0.01)
    answers = [Future(), Future()]
    answers[1].set_exception(UserError("a worker process was killed"))

    class Pool(tokenize.NoProcesses):
        def submit(self, item):
            return answers.pop(0) if answers else super().submit(item)

    monkeypatch.setattr(tokenize, "ProcessPool", lambda encode, workers: Pool(encode))
    with pytest.raises(UserError, match="was killed"):
        tokenize_corpus(task_of(many, folder, tmp_path / "t"), Watcher())


def test_an_error_in_a_process_is_the_stages_error(folder, many, processes, tmp_path):
    """The tokenizer changes under a process that has not read it yet: its message arrives."""
    broken = tmp_path / "tokenizer"
    save_tokenizer(broken, load_tokenizer(folder))
    task = task_of(many, broken, tmp_path / "t", workers=1)

    class Remover(Watcher):
        def begin(self, done):
            (broken / "tokenizer.json").unlink()

    with pytest.raises(UserError, match=r"tokenizer\.json: not there"):
        tokenize_corpus(task, Remover())
    assert not (tmp_path / "t").exists()
    assert started_processes() == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tokenizer_that_changes_meanwhile_is_noticed(many, tmp_path, monkeypatch, workers):
    save_tiny(tmp_path / "tokenizer", 300)
    monkeypatch.setattr(tokenize, "_BYTES_PER_WORKER", 1 if workers else 2**40)

    class Changer(Watcher):
        def begin(self, done):
            save_tiny(tmp_path / "tokenizer", 301)

    with pytest.raises(UserError, match="changed while"):
        tokenize_corpus(task_of(many, tmp_path / "tokenizer", tmp_path / "t", workers=1), Changer())
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_damaged_shard_publishes_nothing(folder, many, tmp_path, place):
    """A frame that no longer opens, or a sound one of another text: the file is named."""
    shard = sorted(many.glob("*.zst"))[3]
    content = bytearray(shard.read_bytes())
    content[40 if place == "first" else -1] ^= 1
    shard.write_bytes(bytes(content))
    task = task_of(many, folder, tmp_path / "t", workers=1)
    with pytest.raises(UserError, match=r"corpus-00003.*download_corpus"):
        tokenize_corpus(task, Watcher())
    assert not (tmp_path / "t").exists()
