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
from lib.data.manifest import RawManifest, write_manifest
from lib.data.shards import write_shards
from lib.data.shuffle import EncodedDocument
from lib.data.tokenizer import load_tokenizer
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


def write_raw(folder, texts):
    raw = folder / "data" / "raw"
    raw.mkdir(parents=True)
    lines = [json.dumps({"text": t, "source": "s", "line": None}) + "\n" for t in texts]
    documents = [
        EncodedDocument(line=line.encode(), text_bytes=len(text.encode()))
        for line, text in zip(lines, texts, strict=True)
    ]
    manifest = RawManifest(
        source="files",
        documents=len(texts),
        text_bytes=sum(len(text.encode()) for text in texts),
        rejected={},
        options={},
        versions={},
        shards=write_shards(documents, raw, 10**6),
    )
    write_manifest(raw, manifest)


@pytest.fixture
def folder(tmp_path):
    write_raw(tmp_path, TEXTS)
    write_params(tmp_path, tokenizer={"vocab_size": 300})
    return tmp_path


def write_params(folder, **sections):
    text = "".join(f"{name}: {json.dumps(options)}\n" for name, options in sections.items())
    if "tokens" not in sections:
        text += "tokens: {}\n"
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
    dataset = IndexedDataset(folder / "data" / "tokens" / "corpus_text_document")
    found = [tokenizer.decode(dataset[i].tolist()) for i in range(len(dataset))]
    assert found == TEXTS
    assert all(dataset[i][-1] == tokenizer.eod_id for i in range(len(dataset)))


def test_running_again_gives_the_same_bytes(folder):
    def outputs():
        for name in ("prepare_tokenizer", "tokenize_corpus"):
            assert stage(name, folder).returncode == 0
        files = [p for d in ("tokenizer", "tokens") for p in (folder / "data" / d).iterdir()]
        return {p.name: p.read_bytes() for p in files}

    first = outputs()
    assert len(first) == 5
    assert outputs() == first


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
    shard = folder / "data" / "raw" / "corpus-00000.jsonl.zst"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    done = stage(name, folder)
    assert done.returncode == 1
    assert done.stderr.startswith("error: data/raw/corpus-00000.jsonl.zst")
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in (folder / "data").iterdir()) == ["raw", "tokenizer"]
    assert (folder / "data" / "tokenizer" / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_stopping_the_stage_leaves_no_process_and_no_output(tmp_path, number, status):
    write_raw(tmp_path, ["some words of text, " * 1000] * 2000)
    save_tiny(tmp_path / "data" / "tokenizer")
    (tmp_path / "params.yaml").write_text("tokens: {workers: 2}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "stages.tokenize_corpus"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    part = tmp_path / "data" / "tokens.partial" / "corpus_text_document.bin.partial"
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
    assert not (tmp_path / "data" / "tokens").exists()


@pytest.mark.parametrize("name", ["prepare_tokenizer", "tokenize_corpus"])
def test_help_teaches(name, tmp_path):
    done = stage(name, tmp_path, "--help")
    assert done.returncode == 0
    assert "end_of_document" in done.stdout or "append_eod" in done.stdout
    assert "Writes data/" in done.stdout
