"""The command: tables, JSON, the picture, what a search writes, and clear refusals."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner

from lib.config.params_file import read_params
from lib.plan.ceilings import H200
from stages import plan_run

ROOT = Path(__file__).resolve().parents[2]
H200S = ("--gpu", "H200", "--gpus", "2")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the project's own parameters, on a machine without GPUs."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_run, "cuda_device_names", tuple)
    return tmp_path


def run(*arguments):
    return CliRunner().invoke(plan_run.main, arguments)


def changed(folder, **sections):
    path = folder / "params.yaml"
    text = path.read_text()
    for section, keys in sections.items():
        head, _, rest = text.partition(f"\n{section}:")
        for key, value in keys.items():
            before, _, after = rest.partition(f"\n  {key}: ")
            rest = f"{before}\n  {key}: {value}  #" + after
        text = f"{head}\n{section}:{rest}"
    path.write_text(text)


def test_the_tables(folder):
    done = run(*H200S)
    assert done.exit_code == 0, done.output
    for text in ("dp2: 2 x NVIDIA H200", "139.8 GiB a GPU: fits", "the host sets the pace", "head"):
        assert text in done.output
    assert "measured on this kind of GPU" in done.output


def test_the_layout_of_the_file_is_planned(folder):
    changed(folder, parallel={"pipeline": 2, "virtual_stages": 2}, training={"micro_batch_size": 1})
    answer = json.loads(run(*H200S, "--json").output)
    assert answer["parallel"]["pipeline"] == 2
    assert [stage["stage"] for stage in answer["stages"]] == [0, 1]
    assert answer["micro_batches"] == 16
    assert answer["layers_of_chunks"] == [1, 1, 1, 1]
    for stage in answer["stages"]:
        assert sum(stage["bytes"].values()) == stage["total_bytes"]


def test_what_does_not_fit_is_warned_of(folder):
    done = run(*H200S, "--memory", "0.1")
    assert done.exit_code == 0
    assert "does not fit" in done.output
    assert json.loads(run(*H200S, "--memory", "0.1", "--json").output)["fits"] is False


def test_a_trained_vocabulary_is_that_of_the_file(folder):
    """What data/tokenizer holds may be of the parameters before."""
    (folder / "data" / "tokenizer").mkdir(parents=True)
    (folder / "data" / "tokenizer" / "tokenizer_info.json").write_text(
        '{"fingerprint": "f", "vocab_size": 512, "end_of_document": {"id": 0}}'
    )
    assert "4,096 rows" in run(*H200S).output
    changed(folder, tokenizer={"kind": "sentencepiece", "path": "some.model"})
    assert "512 rows" in run(*H200S).output


def test_more_gpus_than_are_given_are_refused_with_a_way_out(folder):
    changed(folder, parallel={"data": 4}, training={"micro_batch_size": 4})
    done = run(*H200S)
    assert done.exit_code == 1
    assert "params.yaml:" in done.output
    assert "parallel.data = 4: wants 4 GPUs, one per process, but a node has 2" in done.output
    assert "write 2 or less, or give more --gpus or --nodes, or let --search choose" in done.output
    assert run(*H200S, "--search").exit_code == 0
    assert run("--gpu", "H200", "--gpus", "4").exit_code == 0
    assert run(*H200S, "--nodes", "2").exit_code == 0


def test_a_picture_is_named_for_what_it_is(folder):
    done = run(*H200S, "--picture", "plan.png")
    assert done.exit_code == 1
    assert "name it .svg" in done.output
    assert not (folder / "plan.png").exists()


def test_gpus_that_stay_idle_are_told(folder):
    changed(folder, parallel={"data": 2})
    said = "the run takes 2 of 4 GPUs"
    assert said in run("--gpu", "H200", "--gpus", "4").output
    assert said not in run(*H200S).output


def test_long_bubbles_are_warned_of(folder):
    changed(folder, parallel={"pipeline": 2})
    (warning,) = json.loads(run(*H200S, "--json").output)["warnings"]
    assert "its stages wait" in warning
    changed(folder, training={"micro_batch_size": 1})
    assert json.loads(run(*H200S, "--json").output)["warnings"] == []


def test_kernels_that_the_plan_is_not_of_are_told_of(folder):
    changed(folder, runtime={"kernels": "torch"})
    (warning,) = json.loads(run(*H200S, "--json").output)["warnings"]
    assert "runtime.kernels" in warning


def test_other_gpus_are_estimated(folder):
    done = run("--gpu", "A100", "--gpus", "1")
    assert "not measured" in done.output


def test_the_vocabulary_decides_the_logits(folder):
    sizes = [(), ("--vocab-size", "50304"), ("--vocab-size", "4096")]
    answers = [json.loads(run(*H200S, "--json", *size).output) for size in sizes]
    logits = [answer["stages"][0]["bytes"]["logits"] for answer in answers]
    assert logits[0] == logits[2] < logits[1]


def test_a_given_tokenizer_has_its_own_vocabulary(folder):
    changed(folder, tokenizer={"kind": "tokenizer_json", "path": "my.json"})
    done = run(*H200S)
    assert done.exit_code == 1
    assert "tokenizer.kind = tokenizer_json" in done.output
    assert "--vocab-size" in done.output
    assert run(*H200S, "--vocab-size", "4096").exit_code == 0


def test_the_picture(folder):
    changed(folder, parallel={"pipeline": 2})
    done = run(*H200S, "--picture", "a/plan.svg")
    assert done.exit_code == 0, done.output
    root = ElementTree.parse(folder / "a" / "plan.svg").getroot()
    assert len(root.findall("{http://www.w3.org/2000/svg}g")) == 2 * 6


def test_a_search_writes_its_first_choice_and_keeps_comments(folder):
    answer = json.loads(run(*H200S, "--search", "--json").output)
    before = (folder / "params.yaml").read_text()
    done = run(*H200S, "--search", "--write")
    assert done.exit_code == 0, done.output
    file = read_params(folder / "params.yaml")
    best = answer["ranked"][0]
    assert file.plain("parallel") == best["parallel"]
    assert file.plain("training", "micro_batch_size") == best["micro_batch_size"]
    after = (folder / "params.yaml").read_text()
    assert after.count("#") == before.count("#")
    assert len(after.splitlines()) == len(before.splitlines())
    again = run(*H200S, "--search", "--write")
    assert "(0 keys)" in again.output
    assert (folder / "params.yaml").read_text() == after


def test_phases_that_a_search_leaves_as_they_are_are_warned_of(folder):
    """The choice is for the longest samples, and a phase may have a micro batch of its own."""
    assert json.loads(run(*H200S, "--search", "--json").output)["warnings"] == []
    path = folder / "params.yaml"
    text, key = path.read_text(), "phases: "
    assert text.count(key) == 1
    phase = "[{from_samples: 320, micro_batch_size: 16}]"
    path.write_text(text.replace(key + "[]", key + phase))
    done = run(*H200S, "--search", "--json", "--memory", "0.1")
    (warning,) = json.loads(done.output)["warnings"]
    assert "data.phases[0]" in warning


def test_a_search_says_why_others_fall_out(folder):
    done = run("--gpu", "T4", "--gpus", "8", "--search")
    assert done.exit_code == 0, done.output
    assert "what falls out" in done.output
    assert "num_attention_heads" in done.output


def test_rates_from_a_file(folder):
    rates = H200.model_dump(mode="json") | {"device": "my GPU"}
    (folder / "rates.json").write_text(json.dumps(rates))
    done = run("--ceilings", "rates.json", "--gpus", "1")
    assert "my GPU" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--gpu H200"),
        (("--gpu", "H200"), "--gpus"),
        (("--gpu", "Z9", "--gpus", "1"), "NVIDIA H200"),
        ((*H200S, "--write"), "--search"),
        ((*H200S, "--search", "--memory", "0.05"), "no layout of 2 x NVIDIA H200"),
        (("--ceilings", "nowhere.json", "--gpus", "1"), "nowhere.json"),
        (("--params", "nowhere.yaml", *H200S), "nowhere.yaml"),
    ],
)
def test_refusals_are_one_line(folder, arguments, words):
    done = run(*arguments)
    assert done.exit_code == 1
    assert words in done.output
    assert sum(line.startswith("error: ") for line in done.output.splitlines()) == 1
    assert "Traceback" not in done.output


def test_a_layout_that_cannot_be_is_refused(folder):
    changed(folder, parallel={"tensor": 5})
    done = run("--gpu", "H200", "--gpus", "5")
    assert done.exit_code == 1
    assert "model.num_attention_heads" in done.output
    assert run("--gpu", "H200", "--gpus", "2", "--search").exit_code == 0


def test_more_gpus_than_there_are_is_refused(folder):
    changed(folder, parallel={"data": 4}, training={"micro_batch_size": 4})
    done = run(*H200S)
    assert done.exit_code == 1
    assert "parallel.data = 4" in done.output
