"""A worker's life: resume, shrink and grow, changed inputs, failing saves, on one and two ranks."""

import hashlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lib.config.run_config import RunConfig
from lib.data.order import SampleOrder
from lib.data.tokens_manifest import MANIFEST_FILE, TokensManifest
from tests.data.tiny_tokenizer import save_tiny
from tests.distributed import run_on_ranks
from tests.train.tiny_run import tiny_config, write_tokens
from tests.train.worker_life import Life, live

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with all that pretraining reads: parameters, tokens, tokenizer, code list."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("tiny", "other")):
        write_tokens(tmp_path / "data" / "tokens" / name, seed)
    save_tiny(tmp_path / "data" / "tokenizer", 300)
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "code.py").write_text("one = 1\n")
    workflow = "stages:\n  pretrain:\n    cmd: none\n    deps: [lib]\n"
    (tmp_path / "dvc.yaml").write_text(workflow)
    configure()
    return tmp_path


def configure(corpora=("tiny",), **changes):
    manifests = {name: Path.cwd() / "data" / "tokens" / name / MANIFEST_FILE for name in corpora}
    config = tiny_config(manifests, **({"checkpoint__save_interval": 2} | changes))
    Path("outputs").mkdir(exist_ok=True)
    Path("outputs/run_config.json").write_text(config.to_json())
    return config


def pretrain(ending="finished", ranks=1, **life):
    """Lives a worker's life; gives its last words and all it said, as rank 0 has them."""
    outcomes = run_on_ranks(ranks, live, Path.cwd(), Life(**life), timeout=300)
    assert {(how, message) for how, message, _ in outcomes} == {(ending, outcomes[0][1])}, outcomes
    return outcomes[0][1] + outcomes[0][2]


def rows():
    lines = Path("results/train.csv").read_text().splitlines()
    names = lines[0].split(",")
    return [dict(zip(names, line.split(","), strict=True)) for line in lines[1:]]


def column(name):
    return [row[name] for row in rows()]


def losses():
    return column("loss")


def weights():
    return Path("model/model.safetensors").read_bytes()


def state():
    (folder,) = Path("state").iterdir()
    return folder


def checkpoints():
    return sorted(path.name for path in state().glob("iter_*"))


def test_a_longer_a_shorter_and_again_a_longer_run(project):
    configure(training__train_iters=8, schedule__decay_iters=12)
    pretrain()
    whole, model = losses(), weights()
    again = pretrain()
    assert "nothing is left to train: all 8 iterations were done" in again
    assert losses() == whole
    assert weights() == model
    configure(training__train_iters=6, schedule__decay_iters=12)
    assert "all 6 iterations were done" in pretrain()
    assert losses() == whole[:6]
    configure(training__train_iters=8, schedule__decay_iters=12)
    pretrain()
    assert losses() == whole
    assert weights() == model
    configure(training__train_iters=10, schedule__decay_iters=12)
    out = pretrain()
    assert "continuing from iteration 8 of 10" in out
    assert "differ" not in out
    assert losses()[:8] == whole
    assert len(losses()) == 10
    configure(training__train_iters=1, schedule__decay_iters=12)
    begun = pretrain()
    assert "are beyond iteration 1" in begun
    assert "starting at iteration 0 of 1" in begun
    assert losses() == whole[:1]


LAYOUTS = {
    "tensor": {"parallel__tensor": 2, "parallel__sequence": True},
    "data": {"parallel__data": 2},
    "pipeline": {"parallel__pipeline": 2, "precision__compute": "fp16"},
}


@pytest.mark.layouts
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_stopped_and_continued_end_as_if_left_alone(project, layout):
    """B44, B54, B56: a signal, rows of a kill, and a full disk on one rank change not one bit.

    Random streams of each rank and the loss scale go on as they were, whether checkpoints are
    written in the background or not.
    """
    changes = {
        "training__train_iters": 40,
        "schedule__decay_iters": 40,
        "checkpoint__save_interval": 8,
        "model__hidden_dropout": 0.1,
        "model__attention_dropout": 0.1,
    }
    configure(**changes, **LAYOUTS[layout])
    pretrain(ranks=2, runtime={"background_save": False})
    whole, model = losses(), weights()
    Path("state").rename("state-left-alone")

    stopped_at = stopped_by_a_signal()
    assert 8 <= stopped_at < 40
    with (state() / "history.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "iteration": stopped_at + 1, "loss": 9.0}))
        file.write('\n{"kind": "tra')
    saved, next_save = checkpoints(), stopped_at // 8 * 8 + 8
    out = pretrain("refused", ranks=2, full_disk=(1, f"iter_{next_save:07d}"))
    assert f"continuing from iteration {stopped_at} of 40" in out
    assert "No space left on device (rank 1)" in out
    if next_save < 40:
        assert f"saving iteration {next_save} failed; the run ends with this step" in out
    assert checkpoints() == saved, "the last one stands, and nothing is left of the other"

    assert f"continuing from iteration {stopped_at} of 40" in pretrain(ranks=2)
    assert column("step") == [str(step) for step in range(1, 41)]
    assert losses() == whole
    assert weights() == model


def stopped_by_a_signal():
    """Two real workers under the launcher, told to stop once they have saved; steps they did."""
    text = Path("params.yaml").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("  processes:")]
    Path("params.yaml").write_text(text.replace(line, "  processes: 2"))
    process = subprocess.Popen(
        [sys.executable, "-m", "stages.pretrain"],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": "/tmp"},
    )
    seen = threading.Event()

    def watch():
        for line in process.stdout:
            if "saved iteration 8 " in line:
                seen.set()
        seen.set()

    threading.Thread(target=watch, daemon=True).start()
    assert seen.wait(120)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 143
    return len(losses())


def test_b53_the_loss_scale_of_a_resumed_run_goes_on(project):
    """The first steps of fp16 overflow, so scale and counters are on the move at the stop."""
    configure(precision__compute="fp16", precision__initial_loss_scale=2.0**24)
    pretrain()
    whole, scales, model = losses(), column("loss_scale"), weights()
    assert "1" in column("skipped")
    assert len(set(scales)) > 1
    Path("state").rename("state-left-alone")
    pretrain("stopped", stop_after=3)
    pretrain()
    assert (losses(), column("loss_scale"), weights()) == (whole, scales, model)


def test_a_model_is_not_published_under_code_that_did_not_train_it(project):
    out = pretrain("refused", edit_after=(3, "lib/code.py", "two = 2\n"))
    assert "the training code changed while the run was training" in out
    assert not Path("model").exists()
    (project / "lib" / "code.py").write_text("one = 1\n")
    assert "nothing is left to train" in pretrain()
    assert Path("model/model.safetensors").exists()


def test_another_number_of_threads_is_said_at_a_resume(project):
    pretrain("stopped", stop_after=3)
    out = pretrain(threads=2)
    assert "not bit for bit the run that was interrupted: launch.threads was 1, is 2" in out


def test_the_attention_of_the_run_is_kept_unless_another_is_named(project):
    attention = {"runtime": {"attention": "reference"}}
    pretrain("stopped", stop_after=2, **attention)
    assert "not bit for bit" not in pretrain("stopped", stop_after=2)
    record = json.loads((state() / "iter_0000004" / "state.json").read_text())
    assert record["scalars"]["arithmetic"]["runtime.attention"] == "reference"
    out = pretrain(runtime={"attention": "sdpa"})
    assert "the run that was interrupted: runtime.attention was reference, is sdpa" in out


def test_an_attention_that_cannot_serve_is_refused_before_training(project):
    out = pretrain("refused", runtime={"attention": "cudnn"})
    assert "runtime.attention = cudnn: it needs a GPU; write auto, or one that can serve" in out
    assert list(state().glob("iter_*")) == []


def test_a_fresh_run_that_was_interrupted_continues(project):
    pretrain("stopped", stop_after=3)
    fresh = {"fresh": True}
    assert "starting again" in pretrain("stopped", stop_after=4, launch=fresh)
    out = pretrain(launch=fresh)
    assert "continuing from iteration 4 of 6" in out
    assert "starting again" not in out


def test_a_checkpoint_says_all_that_a_run_is(project):
    """And a history, or an order of samples, that tells another story is noticed."""
    config = configure(training__eval_interval=2, training__train_iters=4)
    pretrain()
    record = json.loads((state() / "iter_0000004" / "state.json").read_text())
    scalars = record["scalars"]
    assert RunConfig.model_validate(scalars["run_config"]) == config
    assert scalars["data"] == {"consumed_samples": 32, "segment": 0, "draws": {"tiny": 32}}
    assert scalars["progress"]["consumed_samples"] == 32
    assert scalars["tokens_seen"] == 32 * 16
    assert scalars["metrics"] == {"rows": 4 + 2}
    assert scalars["optimizer_step"] == 4
    assert {"python", "torch", "numpy"} <= scalars["versions"].keys()
    assert scalars["git_commit"] is None  # this project is in no git work tree
    assert scalars["arithmetic"]["runtime.attention"] == "sdpa"

    history = state() / "history.jsonl"
    lines = history.read_text().splitlines(keepends=True)
    history.write_text("".join(lines[:-2]) + lines[-1].replace('"step": 4', '"step": 5'))
    pretend(state() / "iter_0000004", draws={"tiny": 30, "gone": 2})
    configure(training__eval_interval=2, training__train_iters=6)
    out = pretrain()
    assert "had drawn {'tiny': 30, 'gone': 2} samples of the corpora" in out
    assert "history.jsonl differ: last step 4 and 3; consumed samples 32 and 24" in out
    assert "tokens seen 512 and 384; rows 6 and 5" in out


def pretend(checkpoint, **data):
    """Changes what a checkpoint says of its data, and its manifest with it."""
    record = json.loads((checkpoint / "state.json").read_text())
    record["scalars"]["data"] |= data
    (checkpoint / "state.json").write_text(json.dumps(record))
    text = (checkpoint / "state.json").read_bytes()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    digest = hashlib.sha256(text).hexdigest()
    manifest["files"]["state.json"] = {"bytes": len(text), "sha256": digest}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_tokens_that_are_not_those_of_the_configuration_are_refused(project):
    path = Path("data/tokens/tiny") / MANIFEST_FILE
    manifest = TokensManifest.load(path)
    part = manifest.parts[0].model_copy(update={"bin_sha256": "1"})
    manifest.model_copy(update={"parts": (part,)}).write(path)
    assert "sha256 of the tokens 1 instead of" in pretrain("refused")


ONE_PHASE = {
    "corpora": ("tiny", "other"),
    "data__blend": {"tiny": 1},
    "data__validation": ["tiny", "other"],
    "schedule__decay": "constant",
    "model__max_position_embeddings": 32,
    "training__eval_interval": 4,
    "training__train_iters": 4,
}
LONGER = {
    "from_samples": 32,
    "seq_length": 32,
    "micro_batch_size": 1,
    "blend": {"tiny": 1, "other": 3},
}


def test_a_run_that_gets_a_phase_goes_on_and_is_the_run_that_had_it_from_the_start(project):
    """Other weights, longer samples: nothing is trained twice, and not one bit differs."""
    configure(**ONE_PHASE)
    assert "32 samples were read up to step 4: tiny 32 (100.0%)" in pretrain()
    first, before = losses(), state()
    phases = ONE_PHASE | {"data__phases": [LONGER], "training__train_iters": 8}
    config = configure(**phases)
    out = pretrain()
    assert f"phases were added to the run of {before}" in out
    assert "continuing from iteration 4 of 8" in out
    assert "differ" not in out
    whole, model = losses(), weights()
    assert (whole[:4], len(whole)) == (first, 8)
    assert [int(each) for each in column("consumed_tokens")[3:5]] == [32 * 16, 32 * 16 + 8 * 32]
    (after,) = set(Path("state").iterdir()) - {before}
    record = json.loads((after / "state.json").read_text())
    assert record["began_from"] == {"state": before.name, "iteration": 4}
    scalars = json.loads((after / "iter_0000008" / "state.json").read_text())["scalars"]
    drawn = SampleOrder.of_phases(config.data.phases, config.training.seed).draws_before(64)
    assert scalars["data"]["draws"] == dict(zip(("other", "tiny"), drawn, strict=True))
    assert (scalars["data"]["segment"], scalars["tokens_seen"]) == (1, 32 * 16 + 32 * 32)
    assert f"64 samples were read up to step 8: other {drawn[0]} (" in out
    heading = Path("results/validation.csv").read_text().splitlines()[0]
    assert heading.endswith("tokens,loss/tiny,loss/other")

    Path("state").rename("state-that-went-on")
    assert "phases were added" not in pretrain()
    assert (losses(), weights()) == (whole, model)
