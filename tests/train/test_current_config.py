"""A run configuration of other parameters is not trained."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from lib.config.params_file import read_params
from lib.config.run_config import InitialWeights, Params, RunConfig, resolve
from lib.errors import UserError
from lib.train.current_config import _SECTIONS, require_current
from lib.train.random_tokens import random_tokens
from stages.pretrain import RUN_CONFIG, main

ROOT = Path(__file__).parents[2]
NAME = str(RUN_CONFIG)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """What validate_config wrote for the parameters that are there."""
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text((ROOT / "params.yaml").read_text())
    params = Params.from_file(read_params(Path("params.yaml")))
    found = resolve(params, random_tokens(tmp_path / "tokens", params, 4096, documents=400))
    RUN_CONFIG.parent.mkdir()
    RUN_CONFIG.write_text(found.to_json())
    return found


def write(**sections):
    """Changes keys of params.yaml."""
    yaml = YAML()
    content = yaml.load(Path("params.yaml").read_text())
    for section, keys in sections.items():
        content[section].update(keys)
    yaml.dump(content, Path("params.yaml"))
    return read_params(Path("params.yaml"))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "num_layers", 3),
        ("precision", "compute", "bf16"),
        ("parallel", "tensor", 2),
        ("optimizer", "lr", 0.0123),
        ("schedule", "warmup_iters", 33),
        ("training", "seq_length", 63),
        ("training", "train_iters", 7),
        ("training", "seed", 99),
        ("checkpoint", "save_interval", 3),
        ("data", "eod_in_loss", False),
    ],
)
def test_a_changed_key_is_named_with_both_values(config, section, key, value):
    file = write(**{section: {key: value}})
    with pytest.raises(UserError, match=rf"{section}\.\w+: .*\(there .*run dvc repro") as caught:
        require_current(config, file, NAME)
    assert f"{section}.{key.removesuffix('_iters')}" in str(caught.value)


def test_what_changes_no_training_is_none_of_its_business(config):
    file = write(launch={"threads": 1}, runtime={"log_interval": 3}, evaluate={"samples": 3})
    require_current(config, file, NAME)


def test_weights_to_start_from(config):
    given = config.model_copy(
        update={"initial": InitialWeights(folder="weights", sha256="abc123def456789")}
    )
    same = write(training={"initial_weights": "weights@abc123def456"})
    require_current(given, same, NAME)
    for wrong in (config, given.model_copy(update={"initial": InitialWeights(folder="other")})):
        with pytest.raises(UserError, match=r"training\.initial_weights: weights@abc123def456"):
            require_current(wrong, same, NAME)


def test_another_corpus_is_another_run(config):
    file = write(data={"blend": {"a_new_one": 1.0}})
    with pytest.raises(UserError, match="other corpora or lengths"):
        require_current(config, file, NAME)


def test_the_stage_refuses_before_it_starts_a_process(config):
    before = sorted(Path.cwd().rglob("*"))
    write(training={"seq_length": 63})
    done = CliRunner().invoke(main, [])
    assert done.exit_code == 1
    assert done.output.startswith("error: params.yaml was changed after outputs/run_config.json")
    assert "written: training.seq_length: 63 (there 256); model" in done.output
    assert sorted(Path.cwd().rglob("*")) == before


def test_no_section_is_left_out():
    assert {*_SECTIONS, "derived", "initial"} == set(RunConfig.model_fields)
