"""The stage: everything at once, in one line each, and the file that pretraining consumes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lib.config.params_file import parse_params, read_params
from lib.config.run_config import RunConfig
from lib.errors import InvalidParams, UserError
from lib.train.hardware import Gpu, Machine
from stages.validate_config import check_schema, find_warnings, summarise, validate
from tests.config.project_folder import ROOT, change, write_data


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stages.validate_config", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=environment, check=False
    )


def test_the_stage_writes_the_run_configuration_and_says_what_it_is(folder: Path) -> None:
    write_data(folder)
    done = run(folder)
    assert done.returncode == 0, done.stderr
    path = folder / "outputs" / "run_config.json"
    config = RunConfig.load(path)
    corpus = config.data.corpora["stdlib"]
    assert corpus.manifest == "data/tokens/stdlib/manifest.json"
    assert corpus.tokens == 20_000
    train = corpus.splits["train"]
    assert (train.documents, train.tokens, train.samples) == ((0, 180), 18_000, 70)
    assert corpus.splits["test"].documents == (190, 200)
    epochs = config.training.train_iters * 16 / 70
    assert config.derived.epochs == epochs
    shown = f"{epochs:.2f}: each sample"
    for text in ("parameters", "tokens per step", "4,096", shown, "180 documents"):
        assert text in done.stdout
    first = path.read_bytes()
    assert run(folder).returncode == 0
    assert path.read_bytes() == first


def test_comments_and_spelling_do_not_change_the_file(folder: Path) -> None:
    write_data(folder)
    before = validate(read_params(Path("params.yaml"))).to_json()
    change(folder, "lr: 2.0e-3 ", "lr: 0.002 # peak ")
    change(folder, "hidden_size: 192 ", "hidden_size: 192.0 ")
    change(folder, "qkv_bias: null ", "qkv_bias: ")
    assert validate(read_params(Path("params.yaml"))).to_json() == before


def test_all_problems_of_one_run_one_a_line(folder: Path) -> None:
    write_data(folder, documents=2, fingerprint="other")
    change(folder, "num_attention_heads: 6 ", "num_attention_heads: 5 ")
    change(folder, "  lr: 2.0e-3", "  learning_rate: 1e-3\n  lr: 1e-4")
    change(folder, "append_eod: true", "append_eod: yes")
    change(folder, "global_batch_size: 16", "global_batch_size: 15")
    change(folder, "log_interval: 10", "log_interval: 2.5")
    change(folder, "top_k: 50", "top_k: 5000")
    done = run(folder)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not (folder / "outputs").exists()
    fields = [line.split(" = ")[0].split(": ")[-1].strip() for line in done.stderr.splitlines()[1:]]
    assert sorted(fields) == sorted(
        [
            "tokenizer_fingerprint",
            "tokens.append_eod",
            "model.hidden_size",
            "optimizer.learning_rate",
            "training.global_batch_size",
            "training.split",
            "training.split",
            "training.split",
            "evaluate.top_k",
            "runtime.log_interval",
        ]
    )
    lines = (folder / "params.yaml").read_text().splitlines()
    for line in done.stderr.splitlines()[1:]:
        place, _, rest = line.strip().partition(": ")
        if place.startswith("params.yaml:"):
            key = rest.split(" = ")[0].split(".")[1]
            assert lines[int(place.split(":")[1]) - 1].strip().startswith(f"{key}:")


LAYOUTS: list[tuple[dict[str, str], list[str]]] = [
    ({"tensor": "2", "sequence": "true"}, []),
    ({"pipeline": "2", "virtual_stages": "2"}, []),
    ({"pipeline": "2", "layers_per_chunk": "[3, 1]"}, []),
    ({"data": "2", "sharding": "parameters", "data_shard": "1"}, []),
    ({"tensor": "3"}, ["model.vocab_size_multiple"]),
    ({"tensor": "4"}, ["model.num_attention_heads"]),
    ({"sequence": "true"}, ["parallel.sequence"]),
    ({"pipeline": "5"}, ["parallel.pipeline"]),
    ({"pipeline": "2", "layers_per_chunk": "[4, 0]"}, ["parallel.layers_per_chunk[1]"]),
    ({"pipeline": "2", "layers_per_chunk": "[1, 1]"}, ["parallel.layers_per_chunk"]),
    ({"virtual_stages": "2"}, ["parallel.virtual_stages"]),
    ({"data": "2", "data_shard": "3"}, ["parallel.data_shard"]),
    ({"data": "3"}, ["training.global_batch_size"]),
    ({"sharding": "everything"}, ["parallel.sharding"]),
]


@pytest.mark.parametrize(("keys", "fields"), LAYOUTS)
def test_a_layout_is_refused_before_anything_starts(
    folder: Path, keys: dict[str, str], fields: list[str]
) -> None:
    """Changing only the section ``parallel`` of the default."""
    params_file = read_params(Path("params.yaml"))
    for key, text in keys.items():
        line = int(params_file.where("parallel", key).rpartition(":")[2]) - 1
        lines = Path("params.yaml").read_text().splitlines()
        lines[line] = f"  {key}: {text}"
        Path("params.yaml").write_text("\n".join(lines) + "\n")
    changed = read_params(Path("params.yaml"))
    if not fields:
        check_schema(changed)
        return
    with pytest.raises(InvalidParams) as caught:
        check_schema(changed)
    assert [problem.field for problem in caught.value.problems] == fields
    assert all(problem.where.startswith("params.yaml:") for problem in caught.value.problems)


def test_a_rampup_is_resolved_and_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_data(folder)
    for old, new in (
        ("rampup_start_batch_size: null", "rampup_start_batch_size: 8"),
        ("rampup_increment: null", "rampup_increment: 8"),
        ("rampup_samples: null", "rampup_samples: 80"),
    ):
        change(folder, old, new)
    with pytest.raises(InvalidParams) as caught:
        validate(read_params(Path("params.yaml")))
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["schedule.warmup_iters", "schedule.decay_iters", "training.train_iters"]
    for key, iterations, samples in (("warmup", 24, 80), ("decay", 240, 240), ("train", 240, 240)):
        change(folder, f"  {key}_iters: {iterations} ", f"  {key}_iters: null ")
        change(folder, f"  {key}_samples: null ", f"  {key}_samples: {samples} ")
    config = validate(read_params(Path("params.yaml")))
    assert (config.training.train_iters, config.training.train_samples) == (20, 240)
    summarise(config)
    shown = capsys.readouterr().out
    assert "from 8 by 8 to 16 samples, ends at step 10 (80 samples)" in shown
    assert "cosine, ends at step 20 (240 samples)" in shown


def test_a_broken_section_does_not_hide_the_others(folder: Path) -> None:
    change(folder, "seed: 1234                      # initial", "seed: -1 # initial")
    change(folder, "num_attention_heads: 6 ", "num_attention_heads: 5 ")
    with pytest.raises(InvalidParams) as caught:
        validate(read_params(Path("params.yaml")))
    fields = [problem.field for problem in caught.value.problems]
    assert fields == ["model.hidden_size", "training.seed"]


def test_mistakes_come_before_missing_data(folder: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer_info\.json: not there"):
        validate(read_params(Path("params.yaml")))
    write_data(folder)
    Path("data/tokens/stdlib/manifest.json").unlink()
    with pytest.raises(UserError, match=r"data/tokens/stdlib/manifest\.json: not there"):
        validate(read_params(Path("params.yaml")))
    change(folder, "beta1: 0.9 ", "beta1: 1.9 ")
    with pytest.raises(InvalidParams, match=r"optimizer\.beta1"):
        validate(read_params(Path("params.yaml")))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"fingerprint": 3}', "null"])
def test_a_damaged_tokenizer_info_is_one_line(folder: Path, content: str) -> None:
    write_data(folder)
    Path("data/tokenizer/tokenizer_info.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer_info\.json: damaged") as caught:
        validate(read_params(Path("params.yaml")))
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_info_is_one_line(folder: Path) -> None:
    write_data(folder)
    Path("data/tokenizer/tokenizer_info.json").unlink()
    with pytest.raises(UserError, match="the prepare_tokenizer stage writes it"):
        validate(read_params(Path("params.yaml")))


@pytest.mark.parametrize("documents", [0, 1, 2, 9])
def test_a_corpus_too_small_for_its_splits_is_refused(folder: Path, documents: int) -> None:
    write_data(folder, documents=documents)
    with pytest.raises(InvalidParams, match=r"training\.split") as caught:
        validate(read_params(Path("params.yaml")))
    assert f"of {documents} documents" in str(caught.value)


def test_schema_only_needs_no_data(folder: Path) -> None:
    done = run(folder, "--schema-only")
    assert done.returncode == 0, done.stderr
    assert not (folder / "outputs").exists()
    change(folder, "top_k: 50 ", "top_k: 4097 ")
    done = run(folder, "--schema-only")
    assert done.returncode == 1
    assert "evaluate.top_k = 4097: must be at most the vocabulary, 4096 tokens" in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "gpus", "warning"),
    [
        ("device: auto", "device: auto", 0, None),
        ("device: auto", "device: auto", 3, None),
        ("device: auto", "device: cuda", 0, "this machine shows no GPU"),
        ("device: auto", "device: cuda", 1, None),
        ("  processes: null", "  processes: 4", 2, "wants 4 GPUs, one per process"),
        ("  processes: null", "  processes: 3", 0, "must be divisible by"),
        ("  data: null", "  data: 2", 1, "wants 2 GPUs"),
    ],
)
def test_what_this_machine_cannot_run_is_warned_of(
    folder: Path, old: str, new: str, gpus: int, warning: str | None
) -> None:
    change(folder, old, new)
    here = Machine((Gpu("NVIDIA H100", (9, 0)),) * gpus)
    found = [str(each) for each in find_warnings(read_params(Path("params.yaml")), here)]
    if warning is None:
        assert found == []
    else:
        assert len(found) == 1
        assert warning in found[0]
        assert ": pretrain would refuse it on this machine: " in found[0]


def test_the_warning_does_not_fail_the_check(folder: Path) -> None:
    change(folder, "  processes: null", "  processes: 5")
    done = run(folder, "--schema-only")
    assert done.returncode == 0
    assert "warning: params.yaml:" in done.stderr
    assert "pretrain would refuse it on this machine: must be divisible by" in done.stderr
    assert "sections are sound" in done.stdout


def test_json_is_for_programs(folder: Path) -> None:
    done = run(folder, "--schema-only", "--json")
    assert json.loads(done.stdout) == {
        "ok": True,
        "error": None,
        "problems": [],
        "warnings": [],
    }
    change(folder, "keep_last: 2 ", "keep_last: 0 ")
    done = run(folder, "--schema-only", "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert [problem["field"] for problem in answer["problems"]] == ["checkpoint.keep_last"]
    assert answer["problems"][0]["where"].startswith("params.yaml:")
    assert answer["problems"][0]["source"] == "lib.config.operation.CheckpointConfig"
    assert answer["warnings"] == []
    (folder / "params.yaml").write_text("a: [")
    done = run(folder, "--schema-only", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["problems"] == []
    assert "not valid YAML" in json.loads(done.stdout)["error"]


def test_the_vocabulary_of_a_given_tokenizer_is_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("v.json", "m.txt"):
        Path(name).touch()
    text = (ROOT / "params.yaml").read_text()
    text = text.replace("kind: train_bpe ", "kind: gpt2 ").replace("top_k: 50 ", "top_k: 5000 ")
    text = text.replace("vocab_file: null ", "vocab_file: v.json ")
    text = text.replace("merges_file: null ", "merges_file: m.txt ")
    check_schema(parse_params(text, Path("params.yaml")))


def test_a_tokenizer_that_is_not_there_is_told_before_anything_is_downloaded(folder: Path) -> None:
    shutil.rmtree(folder / "data" / "tokenizer", ignore_errors=True)
    text = (ROOT / "params.yaml").read_text().replace("kind: train_bpe ", "kind: sentencepiece ")
    text = text.replace("  path: null ", "  path: my.model ")
    (folder / "params.yaml").write_text(text)
    done = run(folder, "--schema-only")
    assert done.returncode == 0
    assert "warning: params.yaml:26: tokenizer.path = my.model: there is no such" in done.stderr
    (folder / "my.model").touch()
    assert "my.model" not in run(folder, "--schema-only").stderr


def test_the_stage_starts_without_torch() -> None:
    probe = "import stages.validate_config, stages.apply_preset, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers", "tokenizers", "datasets"} & set(done.stdout.split())
