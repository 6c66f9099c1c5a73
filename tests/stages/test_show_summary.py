"""The summary of a run: whole, after a step that went wrong, and with files missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib.errors import UserError
from stages.show_summary import first_sample, read_figures
from tests.checkpoint.examples import run_config

ROOT = Path(__file__).resolve().parents[2]
TRAIN = {"step": 20, "loss": 3.25, "consumed_tokens": 1280, "tokens_per_second": 1234.5}
EVALUATED = {
    "split": "test",
    "loss": 3.5,
    "perplexity": 33.125,
    "bits_per_byte": 1.5,
    "unigram_entropy": 6.5,
    "syntax_share": 0.25,
}
FILES = ["model/run_config.json", "results/train.json", "results/evaluate.json"]
FILES += ["results/samples.md"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "results"):
        (tmp_path / folder).mkdir()
    texts = [run_config().to_json(), json.dumps(TRAIN | {"validation_loss": 3.375})]
    texts += [json.dumps(EVALUATED), "# Samples\n\n~~~~\ndef one():\n    pass\n~~~~\n"]
    for name, text in zip(FILES, texts, strict=True):
        (tmp_path / name).write_text(text)
    return tmp_path


def show(project: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "stages.show_summary"],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_whole_run(project: Path) -> None:
    done = show(project)
    assert (done.returncode, done.stderr) == (0, "")
    figures = (
        "1,280 (0.50 epochs)",
        "3.2500 nats",
        "3.3750 nats",
        "33.12",
        "25%",
        "1,234 tokens/s",
    )
    for text in (*figures, "def one():\n    pass\n", "make plots"):
        assert text in done.stdout


def test_the_export_is_named_where_there_is_one(project: Path) -> None:
    assert dict(read_figures())["export"] == "none (export.format)"
    (project / "model_hf").mkdir()
    (project / "model_hf" / "config.json").write_text("{}")
    assert dict(read_figures())["export"].startswith("model_hf/")


@pytest.mark.parametrize("name", ["loss", "validation_loss", "tokens_per_second"])
@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_a_figure_of_a_step_that_went_wrong(project: Path, name: str, value: float | None) -> None:
    text = json.dumps(TRAIN | {name: value})
    (project / "results" / "train.json").write_text(text)
    assert [figure for _title, figure in read_figures()].count("not finite") == 1


def test_several_corpora_have_a_loss_each(project: Path) -> None:
    losses = {"loss/code": 2.25, "bits_per_byte/code": 1.0, "loss/web": 4.5}
    (project / "results" / "evaluate.json").write_text(json.dumps(EVALUATED | losses))
    titles = [title for title, _figure in read_figures()]
    place = titles.index("test loss") + 1
    assert read_figures()[place : place + 2] == [
        ("  of code", "2.2500 nats per token"),
        ("  of web", "4.5000 nats per token"),
    ]


def test_null_perplexity(project: Path) -> None:
    (project / "results" / "evaluate.json").write_text(json.dumps(EVALUATED | {"perplexity": None}))
    assert ("test perplexity", "not finite") in read_figures()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [None, b"\xff", b"{", b"[]", b"{}"])
def test_a_missing_or_damaged_file_is_one_line(
    project: Path, name: str, content: bytes | None
) -> None:
    if content is None:
        (project / name).unlink()
    else:
        (project / name).write_bytes(content)
    if name.endswith(".md") and content not in (None, b"\xff"):
        assert first_sample() == ""
        return
    reader = first_sample if name.endswith(".md") else read_figures
    with pytest.raises(UserError) as caught:
        reader()
    assert str(caught.value).startswith(f"{name}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [FILES[0], FILES[3]])
def test_the_command_ends_with_status_1_and_no_table(project: Path, name: str) -> None:
    (project / name).unlink()
    done = show(project)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {name}: no such file; ")
    assert done.stderr.count("\n") == 1


def test_samples_without_any(project: Path) -> None:
    (project / "results" / "samples.md").write_text("# Generated samples\n")
    assert first_sample() == ""
