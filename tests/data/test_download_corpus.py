"""The stage as a user runs it: a process of its own, in a folder of its own."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lib.data.manifest import read_manifest
from lib.data.shards import iter_raw_documents
from tests.data.half_server import Site, serving

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
COMMAND = [sys.executable, "-m", "stages.download_corpus"]
CONTENT = b"".join(b'{"text": "document %d"}\n' % number for number in range(100_000))


def run_stage(folder: Path, *arguments: str, **corpus: object) -> subprocess.CompletedProcess[str]:
    (folder / "params.yaml").write_text(json.dumps({"corpora": {"web": corpus}}))
    return run(folder, *arguments)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "data/raw/web").iterdir()}


def test_default_corpus_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    first = run_stage(tmp_path)
    assert first.returncode == 0, first.stderr
    before = contents(tmp_path)
    assert run_stage(tmp_path).returncode == 0
    assert contents(tmp_path) == before
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["raw"]
    manifest = read_manifest(tmp_path / "data/raw/web")
    assert sum(1 for _ in iter_raw_documents(tmp_path / "data/raw/web")) == manifest.documents
    assert manifest.documents > 500
    assert f"{manifest.documents:,} documents" in first.stdout
    assert "kept out: " in first.stdout


def test_help_teaches(tmp_path: Path) -> None:
    text = run_stage(tmp_path, "--help").stdout
    for word in (
        "python_stdlib",
        "files",
        "url",
        "huggingface",
        "data/raw/NAME",
        "--corpus",
        "--params",
    ):
        assert word in text
    assert "\x08" not in text


def test_bad_record_stops_in_one_line_and_the_old_corpus_stands(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert run_stage(tmp_path, source="files", paths=["*.jsonl"]).returncode == 0
    before = contents(tmp_path)
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n{"text": \n')
    done = run_stage(tmp_path, source="files", paths=["*.jsonl"], on_bad_record="stop")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: b.jsonl:2: no valid JSON")
    assert contents(tmp_path) == before
    assert [path.name for path in (tmp_path / "data").rglob("*/")] == ["raw", "web"]
    skipped = run_stage(tmp_path, source="files", paths=["*.jsonl"])
    assert skipped.returncode == 0
    assert "kept out: 1 malformed_json" in skipped.stdout
    assert skipped.stderr.startswith("warning: left out b.jsonl:2: ")


def test_wrong_parameters_are_named_with_their_line(tmp_path: Path) -> None:
    done = run_stage(tmp_path, source="files")
    assert done.returncode == 1
    assert "params.yaml:1: corpora.web.paths = (missing)" in done.stderr
    assert "Traceback" not in done.stderr


def test_several_corpora_have_a_folder_each(tmp_path: Path) -> None:
    texts = {"a": ["one", "two", "one"], "b_2": ["three"]}
    for name, lines in texts.items():
        (tmp_path / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    settings = {"source": "files", "txt_documents": "line"}
    corpora = {name: settings | {"paths": [f"{name}.txt"]} for name in texts}
    corpora["a"]["deduplicate"] = True
    (tmp_path / "params.yaml").write_text(json.dumps({"corpora": corpora}))
    for name, kept in (("a", {"one", "two"}), ("b_2", {"three"})):
        done = run(tmp_path, "--corpus", name)
        assert (done.returncode, done.stderr) == (0, "")
        folder = tmp_path / "data/raw" / name
        assert {document.text for document in iter_raw_documents(folder)} == kept
        assert ("kept out: 1 duplicate" in done.stdout) == (name == "a")
    done = run(tmp_path, "--corpus", "c")
    said = "error: --corpus c: no such corpus in the section corpora; it has a, b_2\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.layouts) for n in (signal.SIGTERM, signal.SIGINT))],
)
def test_killed_download_goes_on_in_the_next_run(tmp_path: Path, number: signal.Signals) -> None:
    hold = threading.Event()
    with serving(Site(CONTENT, hold=hold)) as site:
        urls = [{"url": site.url, "sha256": hashlib.sha256(CONTENT).hexdigest()}]
        corpus = {"source": "url", "urls": urls}
        (tmp_path / "params.yaml").write_text(json.dumps({"corpora": {"web": corpus}}))
        process = subprocess.Popen(
            COMMAND, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 60
        while not _received(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        hold.set()
        code = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}[number]
        assert process.returncode == code
        assert "Traceback" not in errors
        assert not (tmp_path / "data/raw/web").exists()
        have = _received(tmp_path)
        assert 0 < have <= len(CONTENT) // 2
        done = run_stage(tmp_path, **corpus)
        assert done.returncode == 0, done.stderr
        assert site.ranges == [None, f"bytes={have}-"]
    assert sum(1 for _ in iter_raw_documents(tmp_path / "data/raw/web")) == 100_000


def _received(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("data/download/*.partial"))


@pytest.mark.parametrize("supports_ranges", [True, False])
def test_download_that_keeps_breaking_never_makes_a_corpus(
    tmp_path: Path, supports_ranges: bool
) -> None:
    with serving(Site(CONTENT, breaks=10**9, supports_ranges=supports_ranges)) as site:
        urls = [{"url": site.url, "sha256": "0" * 64}]
        # Without pauses between its attempts, so that giving up takes no half a minute.
        quick = "import lib.data.fetch as f; f._PAUSE_S = 0; import stages.download_corpus as s; "
        (tmp_path / "params.yaml").write_text(
            json.dumps({"corpora": {"web": {"source": "url", "urls": urls}}})
        )
        done = subprocess.run(
            [sys.executable, "-c", quick + "s.main()"],
            cwd=tmp_path,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: http://127.0.0.1:")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data/raw/web").exists()


def test_stage_starts_without_heavy_libraries() -> None:
    code = (
        "import sys, stages.download_corpus; "
        "print([name for name in ('torch', 'datasets', 'pyarrow', 'tokenizers') "
        "if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
