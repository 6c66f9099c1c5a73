"""B59: one rank is told to stop, wherever the run is: all leave at one step, nothing is lost."""

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name
from unittest import mock

import pytest
import torch.distributed as dist

from lib.train import signals
from tests.data.tiny_tokenizer import save_tiny
from tests.distributed import run_on_ranks
from tests.train import worker_life
from tests.train.test_pretrain import ROOT, configure
from tests.train.tiny_run import write_tokens

# Where the signal comes, by the function at whose first call it does, and what is saved then:
# validation is every 2 steps, saving every 3.
MOMENTS = {
    "lib.train.pretrain.build_training": "nothing was trained yet",
    "lib.train.pretrain.RunState.resume": "nothing was trained yet",
    "lib.train.loop.train_step": "iteration 1 of 6 is saved",
    "lib.train.loop.summed_loss": "iteration 2 of 6 is saved",
    "lib.train.run_state.RunState.save": "iteration 3 of 6 is saved",
}


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path / "data" / "tokens" / "tiny")
    save_tiny(tmp_path / "data" / "tokenizer", 300)
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "code.py").write_text("one = 1\n")
    configure(
        parallel__data=2,
        training__train_iters=6,
        training__eval_interval=2,
        checkpoint__save_interval=3,
    )
    return tmp_path


def signalled(target):
    """Patches a function to send this process a SIGTERM before it does its work."""
    function = resolve_name(target)

    def first_the_signal(*arguments, **names):
        os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments, **names)

    return mock.patch(target, first_the_signal)


def stopped_lives(folder, moments):
    """A life of this rank for each moment; the signal comes to rank 1, as often as it is passed."""
    endings = []
    handler = signal.getsignal(signal.SIGTERM)
    for moment in moments:
        with ExitStack() as stack:
            # The other signals are those of the processes that tests run on.
            stack.enter_context(mock.patch.object(signals, "STOP_SIGNALS", (signal.SIGTERM,)))
            flag = signals.StopFlag()
            stack.enter_context(mock.patch.object(worker_life, "Stop", lambda _life, f=flag: f))
            if moment is not None and dist.get_rank() == 1:
                stack.enter_context(signalled(moment))
            ending, message, _ = worker_life.live(folder, worker_life.Life())
        endings.append((ending, message, flag.requested))
    signal.signal(signal.SIGTERM, handler)
    return endings


def results(project):
    """The loss of every step, and the weights."""
    lines = (project / "results" / "train.csv").read_text().splitlines()
    column = lines[0].split(",").index("loss")
    return [line.split(",")[column] for line in lines], (
        project / "model" / "model.safetensors"
    ).read_bytes()


def test_all_ranks_leave_together_wherever_one_is_told(project):
    run_on_ranks(2, stopped_lives, project, [None])
    left_alone = results(project)
    for name in ("state", "model", "results"):
        Path(name).rename(f"{name}-left-alone")
    first, second = run_on_ranks(2, stopped_lives, project, [*MOMENTS, None])
    stops = [("stopped", message) for message in MOMENTS.values()]
    assert first == [(*stop, False) for stop in stops] + [("finished", "", False)]
    assert second == [(*stop, True) for stop in stops] + [("finished", "", False)]
    assert results(project) == left_alone
    (state,) = Path("state").iterdir()
    assert sorted(path.name for path in state.glob("iter_*"))[-1] == "iter_0000006"
