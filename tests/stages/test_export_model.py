"""The command that exports: what it reads, what it says, and how it refuses."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from lib.checkpoint.shapes import parameter_shapes
from stages.export_model import main
from tests.checkpoint.examples import run_config
from tests.checkpoint.export_models import configuration, publish
from tests.data.tiny_tokenizer import train


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tokenizer = train(vocab_size=300)
    config = configuration(run_config().model, tokenizer)
    shapes = parameter_shapes(config.model, 300)
    publish(tmp_path, config, {name: torch.ones(each) for name, each in shapes.items()}, tokenizer)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "train.json").write_text(json.dumps({"loss": 4.5, "step": 20}))
    (tmp_path / "params.yaml").write_text("export: {dtype: bf16}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_it_exports_the_published_model(project: Path) -> None:
    done = run()
    assert done.exit_code == 0, done.output
    assert "model_hf holds a gpt2 of 1,000 parameters: 0.0 MB in bf16, 1 file" in done.output
    assert "4.5000 nats per token" in (project / "model_hf" / "README.md").read_text()
    again = run("--model", str(project / "model"), "--output", "elsewhere")
    assert again.exit_code == 0, again.output
    card = (project / "elsewhere" / "README.md").read_text()
    assert "4.5000" not in card, "the figures of results/ are those of model/"


def test_none_needs_no_model(project: Path) -> None:
    (project / "params.yaml").write_text("export: {format: none}\n")
    (project / "model" / "model.safetensors").unlink()
    assert run().exit_code == 0
    assert [path.name for path in (project / "model_hf").iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("export: {format: onnx}", "export.format"),
        ("export: {dtype: fp64}", "export.dtype"),
        ("export: {max_shard_gigabytes: 0}", "export.max_shard_gigabytes"),
    ],
)
def test_a_mistake_is_one_line(project: Path, change: str, complaint: str) -> None:
    (project / "params.yaml").write_text(f"{change}\n")
    done = run()
    assert done.exit_code == 1
    assert complaint in done.output
    assert "Traceback" not in done.output
    assert not (project / "model_hf").exists()


def test_missing_files_are_named(project: Path) -> None:
    (project / "results" / "train.json").write_text("[")
    assert "results/train.json: cannot be read" in run().output
    (project / "results" / "train.json").write_text("{}")
    (project / "model" / "run_record.json").write_text("[]")
    done = run()
    assert (done.exit_code, "run_record.json: is no JSON object" in done.output) == (1, True)
