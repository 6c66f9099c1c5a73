"""The command: what it prints is what it sets, and comments stay."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from lib.checkpoint.huggingface import to_huggingface
from lib.config.data_rules import read_tokenizer_facts
from lib.config.initial_weights import WeightsRecord
from lib.config.params_file import parse_params, read_params
from lib.config.schema import TrainingSection
from lib.data.options import TokenizerOptions
from lib.errors import UserError
from stages.import_model import main
from stages.prepare_tokenizer import prepare_tokenizer
from stages.validate_config import read_given_weights
from tests.checkpoint.test_huggingface import VOCABULARY, llama, weights
from tests.data.tiny_tokenizer import save_tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A parameter file and, in ``out``, a Hugging Face folder with a tokenizer."""
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text((ROOT / "params.yaml").read_text())
    model = llama(norm_epsilon=1e-6, rope_theta=500000.0)
    state, fields = to_huggingface(weights(model), model, VOCABULARY)
    tokenizer = save_tiny(Path("out"), 300)
    Path("out/tokenizer_info.json").unlink()
    Path("out/config.json").write_text(json.dumps(fields | {"eos_token_id": tokenizer.eod_id}))
    save_file(state, "out/model.safetensors")
    return tmp_path


def run(**options):
    """The command without its guard, which would tie this process to its parent."""
    given = {"params": Path("params.yaml"), "source": Path("out"), "output": Path("initial")}
    main.callback.__wrapped__(**{**given, "set_params": False, **options})


def test_what_it_prints_is_what_it_sets_and_comments_stay(project, capsys):
    before = Path("params.yaml").read_text()
    run()
    assert Path("params.yaml").read_text() == before
    said = capsys.readouterr().out
    assert "left out 1 rows of the vocabulary tables" in said
    printed = said.partition("--set-params):\n")[2].partition("then: dvc repro")[0]
    run(set_params=True)
    changes = capsys.readouterr().out
    after = Path("params.yaml").read_text()
    assert len(after.splitlines()) == len(before.splitlines())
    for old, new in zip(before.splitlines(), after.splitlines(), strict=True):
        assert old.partition(" #")[2] == new.partition(" #")[2]

    wanted, found = parse_params(printed, Path("printed")), parse_params(after, Path("after"))
    asked = {(section, key) for section in wanted.root for key in wanted.root[section]}
    for place in asked:
        assert found.plain(*place) == wanted.plain(*place), place
    untouched = parse_params(before, Path("before"))
    for section in found.root:
        for key in found.root[section]:
            if (section, key) not in asked:
                assert found.plain(section, key) == untouched.plain(section, key)

    pin = WeightsRecord.load(Path("initial")).files["model.safetensors"].sha256[:16]
    for section, key, value in (
        ("training", "initial_weights", f"initial@{pin}"),
        ("tokenizer", "kind", "tokenizer_json"),
        ("tokenizer", "path", "initial/tokenizer.json"),
        ("tokenizer", "end_of_document", "<|endoftext|>"),
        ("model", "num_query_groups", 2),
        ("model", "norm_epsilon", 1e-6),
        ("model", "rope_theta", 500000),
        ("model", "bias", False),
        ("model", "position_embedding", "rope"),
        ("model", "vocab_size_multiple", 128),
    ):
        assert found.plain(section, key) == value, key
    assert f"training.initial_weights: null -> initial@{pin}" in changes.replace('"', "")
    run(set_params=True)
    assert Path("params.yaml").read_text() == after


def test_their_tokenizer_is_then_the_tokenizer_of_the_run(project):
    """Each row keeps its token through the stage that prepares tokenizers."""
    run(set_params=True)
    params_file = read_params(Path("params.yaml"))
    options = params_file.section("tokenizer", TokenizerOptions)
    prepare_tokenizer(options, Path("none"), Path("data/tokenizer"))
    training = params_file.section("training", TrainingSection)
    known = read_given_weights(training.initial_weights, read_tokenizer_facts())
    assert known["weights"].record.vocab_size == 300
    assert known["kept_tokens"] == 300
    assert not known["weights"].initial(known["weights"].record.model, 300, 300).new_parts


def test_it_never_replaces_its_source_or_anything_else(project):
    for options in (
        {"output": Path()},
        {"output": Path("out")},
        {"source": Path("out"), "output": Path("precious")},
    ):
        Path("precious").mkdir(exist_ok=True)
        Path("precious/file").touch()
        with pytest.raises(UserError, match="give another"):
            run(**options)
    assert Path("out/model.safetensors").exists()
    assert Path("precious/file").exists()


def test_a_broken_parameter_file_is_left_as_it_is(project):
    """As one with a key that the sections do not have."""
    text = (
        Path("params.yaml").read_text().replace("  hidden_size:", "  hiden_size: 1\n  hidden_size:")
    )
    Path("params.yaml").write_text(text)
    with pytest.raises(UserError, match=r"model\.hiden_size"):
        run(set_params=True)
    assert Path("params.yaml").read_text() == text
