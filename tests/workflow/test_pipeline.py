"""What reruns what: the real pipeline, tiny and on two corpora, changed in one way after another.

One scratch copy serves all tests, in the order in which they stand; each leaves it up to date.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.atomic import sha256_of
from lib.workflow.scratch import (
    apply_preset,
    run_module,
    run_pipeline,
    scratch_copy,
    workflow_environment,
)

# One worker, or each would make a project of its own.
pytestmark = pytest.mark.xdist_group("project")

ROOT = Path(__file__).resolve().parents[2]
TRAINED = ["validate_config", "pretrain", "evaluate", "export_model"]
DOWNLOADS, TOKENS = (
    [f"{stage}@{name}" for name in ("stdlib", "own")]
    for stage in ("download_corpus", "tokenize_corpus")
)
OWN = "{source: files, paths: [own.jsonl], deduplicate: false}"
TWO_CORPORA = f"corpora: {{stdlib: {{}}, own: {OWN}}}\n"


@pytest.fixture(scope="module")
def project() -> Iterator[Path]:
    with scratch_copy(ROOT) as copy:
        apply_preset(copy, "smoke")
        texts = [path.read_text() for path in sorted((copy / "lib").rglob("*.py"))[:80]]
        lines = [json.dumps({"text": text}) + "\n" for text in texts if text]
        (copy / "own.jsonl").write_text("".join(lines))
        set_params(copy, TWO_CORPORA)
        yield copy


@pytest.fixture(scope="module")
def first_run(project: Path) -> list[str]:
    return run_pipeline(project).stages


def set_params(project: Path, text: str) -> None:
    """Applies ``text`` as a preset."""
    (project / "params" / "change.yaml").write_text(text)
    apply_preset(project, "change")


def changed_stages(project: Path) -> set[str]:
    """The stages that ``dvc repro`` would run for a change of their own inputs."""
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "status", "--json"],
        cwd=project,
        env=workflow_environment(project),
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout))


@pytest.mark.timeout(900)  # three minutes on two free cores; waits for busy ones
def test_life_of_a_project(
    project: Path, first_run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(first_run[:2]) == set(DOWNLOADS)
    assert first_run[2] == "prepare_tokenizer"
    assert set(first_run[3:5]) == set(TOKENS)
    assert first_run[5:] == TRAINED
    weights = project / "model" / "model.safetensors"
    original = sha256_of(weights)

    set_params(project, "launch: {stop_timeout_s: 500}\nruntime: {log_interval: 4}\n")
    assert changed_stages(project) == set(), "how to run is nobody's dependency"

    capsys.readouterr()
    set_params(project, "optimizer: {lr: 1.0e-3}\n")
    assert run_pipeline(project).stages == TRAINED
    assert "starting at iteration 0" in capsys.readouterr().out, "never another's weights"
    assert sha256_of(weights) != original

    set_params(project, "optimizer: {lr: 2.0e-3}\n")
    assert run_pipeline(project).stages == [], "old parameters: results come from the run cache"
    assert sha256_of(weights) == original

    capsys.readouterr()
    set_params(project, "training: {train_iters: 26}\n")
    assert run_pipeline(project).stages == TRAINED
    assert "continuing from iteration 20 of 26" in capsys.readouterr().out
    table = (project / "results" / "train.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in table[1:]] == [str(step) for step in range(1, 27)]

    params = project / "params.yaml"
    as_run = params.read_text()
    set_params(project, "evaluate: {num_samples: 1}\n")
    assert changed_stages(project) == {"evaluate"}
    set_params(project, "export: {dtype: bf16}\n")
    assert changed_stages(project) == {"evaluate", "export_model"}
    params.write_text(as_run)


def test_corpora_come_and_go(project: Path, first_run: list[str]) -> None:
    """DVC leaves the folders of a corpus that is gone: whoever reads all of them must run again."""
    assert first_run
    set_params(project, "corpora: {stdlib: {}}\n")
    assert changed_stages(project) == {"prepare_tokenizer", "validate_config"}
    set_params(project, TWO_CORPORA.replace("false", "true"))
    changed = changed_stages(project)
    assert "download_corpus@own" in changed
    assert not [name for name in changed if name.endswith("@stdlib")]
    set_params(project, TWO_CORPORA)
    assert changed_stages(project) == set()


def test_big_data_is_on_disk_once(project: Path, first_run: list[str]) -> None:
    """Outputs are hard links into DVC's cache."""
    assert first_run
    tokens, text = "data/tokens/stdlib/corpus_text_document.bin", "data/raw/stdlib/corpus-00000"
    for name in (tokens, f"{text}.jsonl.zst"):
        assert (project / name).stat().st_nlink > 1
    assert (project / "model" / "model.safetensors").stat().st_nlink > 1


@pytest.mark.layouts
def test_compiled_code_is_no_change_and_a_comment_is(project: Path, first_run: list[str]) -> None:
    """An edit of lib/train reruns pretrain and what follows, never the data stages."""
    assert first_run
    run_module(project, "compileall", "-q", "lib", "stages")
    assert changed_stages(project) == set()
    loop = project / "lib" / "train" / "loop.py"
    text = loop.read_text()
    loop.write_text(f"{text}# a comment\n")
    assert changed_stages(project) == {"pretrain"}
    loop.write_text(text)
    assert changed_stages(project) == set()


@pytest.mark.layouts
def test_lost_output_comes_back_from_the_cache(project: Path, first_run: list[str]) -> None:
    assert first_run
    shutil.rmtree(project / "data" / "tokens")
    assert run_pipeline(project).stages == []
    assert (project / "data" / "tokens" / "stdlib" / "manifest.json").is_file()
