"""The source huggingface, in a process of its own against a hub on this machine, or none."""

import json
import os
import subprocess
import sys
from pathlib import Path

from lib.data.manifest import read_manifest
from lib.data.shards import iter_raw_documents
from tests.data.local_hub import COMMIT, NAME, hub

ROOT = Path(__file__).parents[2]
ROWS: list[dict[str, object]] = [
    {"text": f"document {number}", "id": number} for number in range(100)
]
ROWS[3] = {"text": None, "id": 3}


def run_stage(
    folder: Path, environment: dict[str, str], **settings: object
) -> subprocess.CompletedProcess[str]:
    corpus = {"source": "huggingface", "dataset": NAME, "revision": COMMIT} | settings
    (folder / "params.yaml").write_text(json.dumps({"corpora": {"web": corpus}}))
    return subprocess.run(
        [sys.executable, "-m", "stages.download_corpus"],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "home")}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_rows_are_streamed_at_the_pinned_revision(tmp_path: Path) -> None:
    content = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    with hub(content) as (endpoint, asked):
        done = run_stage(tmp_path, {"HF_ENDPOINT": endpoint}, max_documents=10)
        assert done.returncode == 0, done.stderr
        assert [path for path in asked if "main" in path] == []
        wrong = run_stage(tmp_path, {"HF_ENDPOINT": endpoint}, text_key="body")
    documents = sorted(iter_raw_documents(tmp_path / "data/raw/web"), key=lambda d: d.line or 0)
    expected = [number for number in range(11) if number != 3]
    assert [(d.text, d.line) for d in documents] == [
        (f"document {number}", number + 1) for number in expected
    ]
    assert {document.source for document in documents} == {f"{NAME}@{COMMIT}"}
    assert read_manifest(tmp_path / "data/raw/web").rejected == {"not_text": 1}
    assert wrong.returncode == 1
    assert "none of its 100 rows has the column 'body'" in wrong.stderr
    assert "its columns are: text, id" in wrong.stderr


def test_without_network_there_is_one_clear_error(tmp_path: Path) -> None:
    done = run_stage(tmp_path, {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert f"the data set {NAME}" in errors[0]
    assert "check the network" in errors[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data/raw/web").exists()
