"""The torture in its short form: one training, hit in three ways, ends as the one left alone.

Its parts that need no process are tested first: what is drawn, who is who, what counts as lost.
"""

import json
import subprocess
from pathlib import Path

import pytest

from lib.data.order import SampleOrder
from lib.workflow import torture_disks as disks
from lib.workflow.torture import Account, Hit, leave_alone, torture
from lib.workflow.torture_evidence import Evidence, differences, leftovers, samples_of
from lib.workflow.torture_faults import cut, digests, flip
from lib.workflow.torture_plan import (
    MOMENTS,
    SIGNALS,
    TARGETS,
    Blow,
    crossed,
    draw_blows,
)
from lib.workflow.torture_processes import Scene, sort_by_role
from lib.workflow.torture_scenes import Length, prepared_project
from stages.torture_run import summary

ROOT = Path(__file__).resolve().parents[2]
SHORT = Length(steps=40, save_interval=8)
SAVING = Blow(moment="save", target="rank", signal="KILL", count=2, fraction=0.0)
PAUSE = Blow(moment="step", target="rank", signal="STOP+CONT", through="dvc", fraction=0.6)
PUBLISHING = Blow(moment="publish", target="everyone", signal="KILL")


@pytest.mark.layouts  # `make smoke`, which has a kill in a save too, takes its place elsewhere
@pytest.mark.timeout(900)  # a minute on two free cores; waits for busy ones
@pytest.mark.parametrize("blows", [[SAVING], [SAVING, PAUSE, PUBLISHING]], ids=["saving", "all"])
def test_short_torture_loses_nothing(blows: list[Blow]) -> None:
    with prepared_project(ROOT, SHORT) as prepared:
        truth = leave_alone(prepared)
        account = torture(prepared, blows, truth, in_the_end=lambda _scene: [])
    assert account.faults == []
    assert [hit.blow.target for hit in account.hits] == [blow.target for blow in blows]
    killed, *others = account.hits
    assert (killed.status, killed.reached >= 2 * SHORT.save_interval) == (1, True)
    # On a busy machine the save may be over before the kill: then that checkpoint is found.
    most = 2 * SHORT.save_interval if killed.while_saving else SHORT.save_interval
    assert killed.lost is not None
    assert 0 <= killed.lost <= most
    assert account.resumes >= (2 if others else 1)
    if others:
        paused, publishing = others
        assert paused.status is None
        assert publishing.reached == SHORT.steps


def test_same_seed_same_blows() -> None:
    assert draw_blows(7, 20) == draw_blows(7, 30)[:20]
    assert draw_blows(7, 20) != draw_blows(8, 20)


def test_hundred_blows_come_in_every_way() -> None:
    blows = draw_blows(1, 100)
    assert {blow.moment for blow in blows} == set(MOMENTS)
    assert {blow.target for blow in blows} == set(TARGETS)
    assert {blow.signal for blow in blows} == set(SIGNALS)
    assert {blow.through for blow in blows} == {"dvc", "pretrain"}
    assert all(0 <= blow.fraction < 1 and blow.count >= 1 for blow in blows)
    assert all(blow.through == "dvc" for blow in blows if blow.target == "dvc")
    assert sum(blow.ends_the_run for blow in blows) > 70


@pytest.mark.parametrize(
    ("blow", "ends", "asks"),
    [
        (Blow(signal="KILL"), True, False),
        (Blow(signal="TERM"), True, True),
        (Blow(signal="TERM", moment="start"), True, False),
        (Blow(signal="STOP+CONT"), False, False),
        (Blow(signal="STOP+KILL"), True, False),
        (Blow(target="dvc", signal="INT"), False, False),
        (Blow(target="group", signal="INT"), True, True),
        (Blow(target="launcher", signal="USR2"), True, True),
        (Blow(target="rank", signal="USR2"), True, True),
        (Blow(target="torchrun", signal="TERM"), True, True),
        (Blow(target="torchrun", signal="INT"), False, False),
    ],
)
def test_what_is_expected_of_a_blow(blow: Blow, ends: bool, asks: bool) -> None:
    assert (blow.ends_the_run, blow.asks) == (ends, asks)


def test_table_counts_and_sums() -> None:
    pairs = [("rank", "KILL"), ("rank", "KILL"), ("dvc", "TERM")]
    assert crossed(pairs, ["KILL", "TERM", "INT"]) == [
        ("dvc", "", "1", "", "1"),
        ("rank", "2", "", "", "2"),
        ("all", "2", "1", "0", "3"),
    ]


def test_processes_are_known_by_their_commands() -> None:
    python = "/venv/bin/python"
    commands = {
        1: f"{python} -m dvc repro pretrain",
        2: f"{python} -m stages.pretrain",
        3: f"{python} -m torch.distributed.run --standalone --module stages.pretrain",
        4: f"{python} -u -m stages.pretrain --params params.yaml",
        5: f"{python} -u -m stages.pretrain --params params.yaml",
        6: "something else",
    }
    assert sort_by_role(commands) == {
        "everyone": [1, 2, 3, 4, 5, 6],
        "dvc": [1],
        "launcher": [2],
        "torchrun": [3],
        "rank": [4, 5],
    }


def row(step: int, loss: str = "5.25") -> dict[str, str]:
    return {"step": str(step), "loss": loss, "samples": "abc"}


TRUTH = Evidence([row(1), row(2), row(3)], b"step,loss\n3,5.0\n", "f" * 64)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([row(1), row(2)], "train.csv has no step 3"),
        ([row(1), row(2), row(2), row(3)], "train.csv has twice step 2"),
        ([row(1), row(2), row(3), row(4)], "train.csv has in excess 4"),
        ([row(2), row(1), row(3)], "train.csv has its steps in another order"),
        ([row(1), row(2, "5.250000000000001"), row(3)], "step 2: loss is 5.250000000000001, was"),
    ],
)
def test_rows_that_differ_are_named(rows: list[dict[str, str]], says: str) -> None:
    (fault,) = differences(TRUTH, Evidence(rows, TRUTH.validation, TRUTH.weights))
    assert fault.startswith(says)


def test_weights_and_validation_that_differ_are_named() -> None:
    assert differences(TRUTH, TRUTH) == []
    found = differences(TRUTH, Evidence(TRUTH.rows, b"", "0" * 64))
    assert found == [
        "validation.csv is not the same",
        "the weights are 0000000000000000, not ffffffffffffffff",
    ]


def test_samples_of_a_step_are_its_own() -> None:
    order = SampleOrder.of_one(100, 1, "stdlib")
    digests_of = [
        samples_of({"consumed_samples": str(8 * step), "global_batch_size": "8"}, order)
        for step in range(1, 30)
    ]
    assert len(set(digests_of)) == 29
    one = samples_of({"consumed_samples": "16", "global_batch_size": "16"}, order)
    assert one not in digests_of


def test_leftovers_are_found(tmp_path: Path) -> None:
    scene = Scene(tmp_path, tmp_path / "state" / "abc")
    for name in ("iter_0000010", "iter_0000020", "iter_0000030.partial"):
        (scene.state / name).mkdir(parents=True)
    (tmp_path / "model.partial").mkdir()
    assert leftovers(scene, 3) == [
        "left behind: state/abc/iter_0000030.partial",
        "left behind: model.partial",
    ]
    (scene.state / "iter_0000030.partial").rmdir()
    (tmp_path / "model.partial").rmdir()
    assert leftovers(scene, 2) == []
    (tmp_path / "state" / "abd").mkdir()
    found = leftovers(scene, 1)
    assert found[0] == "another state was begun: abc, abd"
    assert found[1].startswith("2 checkpoints instead of 1")


def test_history_tells_what_was_reached(tmp_path: Path) -> None:
    scene = Scene(tmp_path, tmp_path / "state")
    assert (scene.reached(), scene.half_saved()) == (0, [])
    (scene.state / "iter_0000010.partial").mkdir(parents=True)
    lines = [
        json.dumps({"kind": "train", "iteration": step, "loss": 5.0}) for step in range(1, 300)
    ]
    text = "\n".join(lines) + '\n{"kind": "valid", "iteration": 300}\n{"kind": "tr'
    (scene.state / "history.jsonl").write_text(text)
    assert (scene.reached(), scene.half_saved()) == (299, ["iter_0000010.partial"])


def test_flipping_and_cutting_change_a_checkpoint(tmp_path: Path) -> None:
    data = bytes(range(100))
    assert len(cut(data)) == 50
    assert sum(one != other for one, other in zip(flip(data), data, strict=True)) == 1
    file = tmp_path / "iter_0000010" / "x"
    file.parent.mkdir()
    file.write_bytes(data)
    before = digests(tmp_path)
    file.write_bytes(flip(data))
    assert list(before) == ["iter_0000010"]
    assert digests(tmp_path) != before


def test_limit_of_file_sizes_makes_writes_fail(tmp_path: Path) -> None:
    file = tmp_path / "x"
    command = ["sh", "-c", f"yes | head -c 5000 > {file}"]
    done = subprocess.run([*disks.small_files(1024), *command], capture_output=True, check=False)
    assert done.returncode != 0
    assert file.stat().st_size == 1024


@pytest.mark.parametrize("fills_at", [0, 7])
def test_small_disk_is_full_and_what_it_held_is_taken_over(tmp_path: Path, fills_at: int) -> None:
    within = disks.namespace()
    if within is None:
        return  # the machine forbids mounts: the torture says so, and tries something else
    scene = Scene(tmp_path / "scene" / "project", tmp_path / "scene" / "project" / "state" / "abc")
    scene.state.mkdir(parents=True)
    history = scene.state / "history.jsonl"
    history.write_text('{"kind": "train", "iteration": 6, "loss": 5.0}\n')
    line = json.dumps({"kind": "train", "iteration": 7, "loss": 5.0})
    full = f"until ! head -c 40960 /dev/zero >> {scene.state / 'new'}; do sleep 0.01; done"
    command = ["sh", "-c", f"echo '{line}' >> {history}; {full}; exit 3"]
    wrapper = disks.small_disk(scene, within, 81920, fills_at=fills_at)
    done = subprocess.run([*wrapper, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, "No space left" in done.stderr) == (3, True)
    assert len(history.read_text().splitlines()) == 1
    disks.take_over(scene)
    assert len(history.read_text().splitlines()) == 2


def test_summary_says_what_was_lost() -> None:
    hits = [
        Hit(Blow(signal="KILL"), while_saving=True, status=1, reached=17, lost=7),
        Hit(Blow(signal="TERM"), while_saving=False, status=143, reached=20, lost=0),
    ]
    figures = dict(summary(Account(hits=hits, starts=3, resumes=2, rounds=1)))
    assert figures["steps done again after a kill, at most"] == "7"
    assert figures["steps done again after a signal that asks, at most"] == "0"
    assert figures["of these while a checkpoint was half written"] == "1"
    assert figures["lost"] == "nothing"
