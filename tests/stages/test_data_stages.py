"""prepare_tokenizer and tokenize_corpus as a person runs them: separate processes, real files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lib.data.indexed_dataset import IndexedDataset
from lib.data.tokenizer import load_tokenizer
from tests.data.raw_example import write_raw
from tests.data.tiny_tokenizer import TRAINING_TEXT, gpt2_files, save_tiny

PROJECT = Path(__file__).parents[2]
TEXTS = [TRAINING_TEXT, "A second document.\r\n", "<|endoftext|> third"] * 4


def stage(name, folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", f"stages.{name}", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path):
    write_raw(tmp_path / "data/raw/web", TEXTS)
    write_params(tmp_path, tokenizer={"vocab_size": 300})
    return tmp_path


def write_params(folder, **sections):
    """With one corpus, ``web``, unless the sections say otherwise."""
    sections = {"corpora": {"web": {}}, "tokens": {}} | sections
    text = "".join(f"{name}: {json.dumps(options)}\n" for name, options in sections.items())
    (folder / "params.yaml").write_text(text)


def test_both_stages_end_to_end(folder):
    done = stage("prepare_tokenizer", folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "300 ids" in done.stdout
    done = stage("tokenize_corpus", folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "12 documents" in done.stdout
    assert "bytes per token" in done.stdout
    tokenizer = load_tokenizer(folder / "data" / "tokenizer")
    dataset = IndexedDataset(folder / "data/tokens/web/corpus_text_document")
    found = [tokenizer.decode(dataset[i].tolist()) for i in range(len(dataset))]
    assert found == TEXTS
    assert all(dataset[i][-1] == tokenizer.eod_id for i in range(len(dataset)))


def test_running_again_gives_the_same_bytes(folder):
    def outputs():
        for name in ("prepare_tokenizer", "tokenize_corpus"):
            assert stage(name, folder).returncode == 0
        files = [p for d in ("tokenizer", "tokens/web") for p in (folder / "data" / d).iterdir()]
        return {p.name: p.read_bytes() for p in files}

    first = outputs()
    assert len(first) == 6
    assert outputs() == first
    assert [path.name for path in (folder / "data/tokens").iterdir()] == ["web"]


def test_several_corpora_have_one_tokenizer(folder):
    """Trained on all of them, in whatever order params.yaml has them, and on no other folder."""
    write_raw(folder / "data/raw/german", ["der die das und " * 20, "das ist der Text"] * 3)

    def trained_on(*names):
        write_params(folder, corpora={name: {} for name in names}, tokenizer={"vocab_size": 280})
        done = stage("prepare_tokenizer", folder)
        assert done.returncode == 0
        return load_tokenizer(folder / "data/tokenizer").fingerprint, done.stderr

    alone, warning = trained_on("web")
    assert warning == (
        "warning: of no corpus in params.yaml, and not read: data/raw/german; "
        "remove what you do not need\n"
    )
    both, warning = trained_on("german", "web")
    assert warning == ""
    assert trained_on("web", "german") == (both, "")
    assert both != alone
    done = stage("tokenize_corpus", folder)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "--corpus is missing: there are several; name one of web, german" in done.stderr
    done = stage("tokenize_corpus", folder, "--corpus", "german")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in (folder / "data/tokens").iterdir()] == ["german"]


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ({"vocab_size": 5000}, "error: tokenizer.vocab_size = 5000"),
        ({"kind": "tokenizer_json", "path": "none.json"}, "none.json"),
        ({"vocabsize": 5000}, "tokenizer.vocabsize"),
        ({"kind": "gpt2"}, "vocab_file"),
    ],
)
def test_mistakes_are_one_clear_error(folder, tokenizer, message):
    write_params(folder, tokenizer=tokenizer)
    done = stage("prepare_tokenizer", folder)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "data" / "tokenizer").exists()


def test_a_given_tokenizer_needs_no_corpus(folder):
    vocab, merges = gpt2_files()
    write_params(
        folder,
        tokenizer={"kind": "gpt2", "vocab_file": str(vocab), "merges_file": str(merges)},
    )
    done = stage("prepare_tokenizer", folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert load_tokenizer(folder / "data" / "tokenizer").encode("Hello world") == [15496, 995]


@pytest.mark.parametrize("name", ["prepare_tokenizer", "tokenize_corpus"])
def test_damaged_corpus_publishes_nothing(folder, name):
    save_tiny(folder / "data" / "tokenizer")
    before = (folder / "data" / "tokenizer" / "tokenizer.json").read_bytes()
    shard = folder / "data/raw/web/corpus-00000.jsonl.zst"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    done = stage(name, folder)
    assert done.returncode == 1
    assert done.stderr.startswith("error: data/raw/web/corpus-00000.jsonl.zst")
    assert "Traceback" not in done.stderr
    assert not (folder / "data/tokens/web").exists()
    assert (folder / "data" / "tokenizer" / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGKILL, -9),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.layouts),
    ],
)
def test_stopping_the_stage_leaves_no_process_and_no_output(tmp_path, number, status):
    write_raw(tmp_path / "data/raw/web", ["some words of text, " * 1000] * 2000)
    save_tiny(tmp_path / "data" / "tokenizer")
    write_params(tmp_path, tokens={"workers": 2})
    process = subprocess.Popen(
        [sys.executable, "-m", "stages.tokenize_corpus"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    part = tmp_path / "data/tokens/web.partial/out/corpus_text_document.bin"
    deadline = time.monotonic() + 60
    while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE] == []
    assert not (tmp_path / "data/tokens/web").exists()


@pytest.mark.parametrize("name", ["prepare_tokenizer", "tokenize_corpus"])
def test_help_teaches(name, tmp_path):
    done = stage(name, tmp_path, "--help")
    assert done.returncode == 0
    assert "end_of_document" in done.stdout or "append_eod" in done.stdout
    assert "Writes data/" in done.stdout
