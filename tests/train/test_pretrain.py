"""A worker's life through its own entry: resume, shrink and grow, changed inputs, two ranks."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lib.config.run_config import RunConfig
from tests.data.tiny_tokenizer import save_tiny
from tests.train.tiny_run import tiny_config, write_tokens

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with all that pretraining reads: parameters, tokens, tokenizer, code list."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "tokens").mkdir(parents=True)
    write_tokens(tmp_path / "data" / "tokens")
    save_tiny(tmp_path / "data" / "tokenizer", 300)
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "code.py").write_text("one = 1\n")
    workflow = "stages:\n  pretrain:\n    cmd: none\n    deps: [lib]\n"
    (tmp_path / "dvc.yaml").write_text(workflow)
    configure()
    return tmp_path


def configure(**changes):
    prefix = Path("data/tokens/corpus_text_document")
    config = tiny_config(prefix, **({"checkpoint__save_interval": 2} | changes))
    Path("data/tokens/manifest.json").write_text(json.dumps(manifest(config)))
    Path("outputs").mkdir(exist_ok=True)
    Path("outputs/run_config.json").write_text(config.to_json())
    return config


def manifest(config: RunConfig) -> dict[str, object]:
    data = config.data
    return {
        "format": 1,
        "prefix": "corpus_text_document",
        "dtype": "uint16",
        "documents": data.documents,
        "sequences": data.documents,
        "tokens": data.tokens,
        "text_bytes": 1,
        "empty_documents": 0,
        "cut_documents": 0,
        "dropped_documents": 0,
        "append_eod": False,
        "vocab_size": data.vocab_size,
        "eod_id": 0,
        "tokenizer_fingerprint": data.tokenizer_fingerprint,
        "corpus_sha256": "0",
        "bin_sha256": data.tokens_sha256,
        "idx_sha256": "0",
        "options": {},
    }


def start(**environment):
    return subprocess.Popen(
        [sys.executable, "-m", "stages.pretrain"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "HOME": "/tmp",
            **environment,
        },
    )


def pretrain(status=0):
    process = start()
    out, err = process.communicate(timeout=120)
    assert process.returncode == status, out + err
    return out + err


def rows():
    lines = Path("results/train.csv").read_text().splitlines()
    names = lines[0].split(",")
    return [dict(zip(names, line.split(","), strict=True)) for line in lines[1:]]


def losses():
    return [row["loss"] for row in rows()]


def weights():
    return Path("model/model.safetensors").read_bytes()


def use(key, value):
    text = Path("params.yaml").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(f"  {key}:")]
    Path("params.yaml").write_text(text.replace(line, f"  {key}: {value}"))


def test_a_longer_a_shorter_and_again_a_longer_run(project):
    configure(training__train_iters=8, schedule__decay_iters=12)
    pretrain()
    whole, model = losses(), weights()
    again = pretrain()
    assert "nothing is left to train: all 8 iterations were done" in again
    assert losses() == whole
    assert weights() == model
    configure(training__train_iters=6, schedule__decay_iters=12)
    assert "continuing from iteration 6 of 6" in pretrain() or losses() == whole[:6]
    assert losses() == whole[:6]
    configure(training__train_iters=8, schedule__decay_iters=12)
    pretrain()
    assert losses() == whole
    assert weights() == model
    configure(training__train_iters=10, schedule__decay_iters=12)
    out = pretrain()
    assert "continuing from iteration 8 of 10" in out
    assert losses()[:8] == whole
    assert len(losses()) == 10


LAYOUTS = {
    "tensor": {"parallel__tensor": 2, "parallel__sequence": True},
    "pipeline": {"parallel__pipeline": 2, "precision__compute": "fp16"},
}


@pytest.mark.parametrize("layout", ["tensor", pytest.param("pipeline", marks=pytest.mark.layouts)])
def test_two_ranks_stopped_and_continued_end_as_if_left_alone(project, layout):
    """Random streams of each rank and the loss scale go on as they were."""
    use("processes", 2)
    changes = {
        "training__train_iters": 40,
        "schedule__decay_iters": 40,
        "checkpoint__save_interval": 4,
        "model__hidden_dropout": 0.1,
        "model__attention_dropout": 0.1,
    }
    configure(**changes, **LAYOUTS[layout])
    pretrain()
    whole, model = losses(), weights()
    Path("state").rename("state-left-alone")
    process = start()
    seen = threading.Event()

    def watch():
        for line in process.stdout:
            if "saved iteration 4 " in line:
                seen.set()
        seen.set()

    threading.Thread(target=watch, daemon=True).start()
    assert seen.wait(60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    stopped_at = len(losses())
    assert 4 <= stopped_at < 40
    out = pretrain()
    assert f"continuing from iteration {stopped_at} of 40" in out
    assert losses() == whole
    assert weights() == model


def test_a_model_is_not_published_under_code_that_did_not_train_it(project):
    rarely = {"checkpoint__save_interval": 200}
    configure(training__train_iters=400, schedule__decay_iters=400, **rarely)
    process = start()
    deadline = time.monotonic() + 60
    while not Path("results/train.csv").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    (project / "lib" / "code.py").write_text("one = 2\n")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, out
    assert "the training code changed while the run was training" in err
    assert "Traceback" not in err
    assert not Path("model").exists()
    (project / "lib" / "code.py").write_text("one = 1\n")
    assert "nothing is left to train" in pretrain()
    assert Path("model/model.safetensors").exists()


def test_another_number_of_threads_is_said_at_a_resume(project):
    configure(training__train_iters=4)
    pretrain()
    configure(training__train_iters=6)
    use("threads", 2)
    assert "not bit for bit the run that was interrupted: launch.threads was 1, is 2" in pretrain()


def test_a_fresh_run_that_was_interrupted_continues(project):
    configure(training__train_iters=4)
    pretrain()
    use("fresh", "true")
    configure(training__train_iters=400, schedule__decay_iters=6)
    process = start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if Path("results/train.csv").exists() and len(losses()) > 4:
            break
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert "launch.fresh is true: starting again" in out
    configure(training__train_iters=len(losses()) + 2, schedule__decay_iters=6)
    out = pretrain()
    assert "continuing from iteration" in out
    assert "starting again" not in out


def test_tokens_that_are_not_those_of_the_configuration_are_refused(project):
    changed = json.loads(Path("data/tokens/manifest.json").read_text()) | {"bin_sha256": "1"}
    Path("data/tokens/manifest.json").write_text(json.dumps(changed))
    out = pretrain(status=1)
    assert "sha256 of the .bin 1 instead of 0" in out
    assert "Traceback" not in out
