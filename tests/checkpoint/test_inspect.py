"""Looking into states and checkpoints: everything that is there, every difference, no trust."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from lib.checkpoint.compare import compare_values, preview, recorded_config
from lib.checkpoint.fingerprint import fingerprint
from lib.checkpoint.inspect import (
    TensorReader,
    checkpoint_in,
    kind_of,
    read_checkpoint,
    read_state,
    states_in,
)
from lib.checkpoint.inspect_tables import layout_text, size_text, value_text
from lib.checkpoint.resume import ResumePolicy, open_state
from lib.config.params_file import editable_yaml, parse_params
from lib.config.run_config import Params, resolve
from lib.errors import UserError
from stages.inspect_checkpoint import main
from tests.checkpoint.examples import run_config
from tests.checkpoint.saved import example
from tests.checkpoint.saved import save as save_example
from tests.checkpoint.saved import save_tensors as save

ROOT = Path(__file__).parents[2]
LAYOUT = {"tensor": 2, "pipeline": 1, "virtual_stages": 1, "data": 2, "data_shard": 2}
ARITHMETIC = {
    "device": "cpu",
    "parallel": LAYOUT,
    "parallel.sequence": False,
    "training.micro_batch_size": 4,
    "launch.threads": 1,
    "runtime.attention": "auto",
    "runtime.deterministic": False,
    "torch": torch.__version__,
}


def params(**changes):
    """The project's parameters with changed keys, written ``section__key=value``."""
    yaml = editable_yaml()
    tree = yaml.load((ROOT / "params.yaml").read_text())
    for name, value in {"schedule__warmup_iters": None, **changes}.items():
        section, key = name.split("__")
        tree[section][key] = value
    path = Path("changed.yaml")
    with path.open("w") as file:
        yaml.dump(tree, file)
    return parse_params(path.read_text(), path)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A state of the project's own parameters with checkpoints of iterations 3 and 5."""
    root = tmp_path_factory.mktemp("pristine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        config = resolve(Params.from_file(params()), run_config().data)
    arithmetic = ARITHMETIC | {"training.micro_batch_size": config.training.micro_batch_size}
    opened = open_state(root / "state", config, "code-1", ResumePolicy())
    opened.mark_training(LAYOUT)
    for iteration in (3, 5):
        scalars = {
            "progress": {"iteration": iteration, "consumed_samples": 32 * iteration, "skipped": 0},
            "data": {"consumed_samples": 32 * iteration, "segment": 0},
            "optimizer_step": iteration,
            "arithmetic": arithmetic,
            "run_config": config.model_dump(mode="json"),
            "versions": {"python": "3.11.7", "torch": "2.13.0", "click": "8"},
            "git_commit": "[/bold] no markup",
            "tokens_seen": 12345678,
        }
        save(opened.path, iteration, example(iteration), scalars, 9, None)
    return root


@pytest.fixture
def state(pristine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)
    return next((tmp_path / "state").iterdir())


def inspected(*arguments, status=0):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == status, done.output + done.stderr
    assert status == 0 or done.stderr.count("\n") <= 1
    return done.output


def snapshot(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_path_is_a_checkpoint_a_state_or_all_states(state):
    assert kind_of(state / "iter_0000005") == "checkpoint"
    assert kind_of(state) == "state"
    assert kind_of(state.parent) == "states"
    assert states_in(state.parent) == [state]
    assert checkpoint_in(state) == state / "iter_0000005"
    (state / "latest_checkpointed_iteration.txt").write_text("3\n")
    assert checkpoint_in(state) == state / "iter_0000003"


def test_a_path_that_is_none_of_them_is_refused_in_one_line(state, tmp_path):
    (state / "iter_0000009.partial").mkdir()
    shutil.copytree(state / "iter_0000005", tmp_path / "backup")
    (tmp_path / "empty").mkdir()
    open_state(tmp_path / "new", run_config(), "code-1", ResumePolicy())
    for path, complaint in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path / "changed.yaml", "is a file"),
        (tmp_path / "empty", "holds no checkpoint"),
        (tmp_path / "backup", "rename it"),
        (state / "iter_0000009.partial", "interrupted save"),
    ):
        with pytest.raises(UserError, match=complaint) as refusal:
            kind_of(path)
        assert "\n" not in str(refusal.value)
    with pytest.raises(UserError, match="name one of them"):
        checkpoint_in(state.parent)
    with pytest.raises(UserError, match="no checkpoint was saved yet"):
        checkpoint_in(next((tmp_path / "new").iterdir()))


def test_facts_are_those_that_were_saved(state):
    facts = read_checkpoint(state / "iter_0000005", hashed=True)
    saved = example(5)
    assert (facts.iteration, facts.damage, facts.is_hashed) == (5, (), True)
    assert [tensor.name for tensor in facts.tensors] == sorted(saved)
    for tensor in facts.tensors:
        assert tensor.shape == tuple(saved[tensor.name].shape)
        assert f"torch.{tensor.dtype}" == str(saved[tensor.name].dtype)
        assert tensor.bytes == saved[tensor.name].numel() * saved[tensor.name].element_size()
    kinds = {tensor.name: tensor.kind for tensor in facts.tensors}
    assert kinds["optimizer.exp_avg.weight"] == "optimizer"
    assert kinds["random.rank_00000.cpu"] == "random streams"
    assert kinds["half"] == "other"
    assert facts.files == {f.name: f.stat().st_size for f in (state / "iter_0000005").iterdir()}
    assert facts.scalar("arithmetic", "parallel") == LAYOUT
    assert facts.scalar("metrics", "rows") is None
    reader = TensorReader(facts.path)
    for name, tensor in saved.items():
        assert torch.equal(reader.read(name), tensor)
    assert fingerprint(recorded_config(facts)) == state.name


def test_a_state_says_where_it_stands(state):
    facts = read_state(state)
    assert (facts.pointer, facts.iterations, facts.damage) == (5, (3, 5), ())
    assert facts.record.layout == LAYOUT
    assert facts.bytes == sum(len(data) for data in snapshot(state).values())
    (state / "state.json").write_text("{")
    (state / "latest_checkpointed_iteration.txt").write_text("7\n")
    facts = read_state(state)
    assert facts.record is None
    assert len(facts.damage) == 2


def test_the_command_shows_all_three_and_changes_nothing(state):
    before = snapshot(state)
    listing, one = inspected(state.parent), inspected(state)
    for text in (state.name, "3, 5", "tensor 2, data 2"):
        assert text in listing
    assert one.count("every sha256 is right") == 2
    shown = inspected(state / "iter_0000005")
    for text in (
        "12,345,678",
        "python 3.11.7, torch 2.13.0",
        "[/bold] no markup",
        "random streams",
    ):
        assert text in shown
    assert "rows of history" in shown
    assert "not recorded" in shown
    assert "not hashed" in inspected(state / "iter_0000005", "--no-verify")
    told = json.loads(inspected(state / "iter_0000005", "--json"))
    assert told["iteration"] == 5
    assert told["scalars"]["optimizer_step"] == 5
    assert {tensor["name"] for tensor in told["tensors"]} == set(example(5))
    assert len(json.loads(inspected(state, "--json"))["checkpoints"]) == 2
    assert json.loads(inspected(state.parent, "--json"))[0]["pointer"] == 5
    assert snapshot(state) == before


def test_a_folder_that_vanishes_or_may_not_be_read_is_one_line(state, monkeypatch):
    def refused(*_arguments, **_options):
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setattr("stages.inspect_checkpoint.read_state", refused)
    done = CliRunner().invoke(main, [str(state)])
    assert (done.exit_code, done.stderr) == (
        1,
        "error: some/file cannot be read: Permission denied\n",
    )


def test_two_questions_at_once_are_refused(state):
    done = CliRunner().invoke(main, [str(state), str(state), "--params", "changed.yaml"])
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)


def test_an_old_checkpoint_that_says_little_is_shown(tmp_path):
    save_example(tmp_path, 4)
    assert "run configuration: not recorded" in inspected(tmp_path / "iter_0000004")


def test_damage_is_named_and_the_status_is_one(state):
    data = bytearray((state / "iter_0000005" / "__0_0.distcp").read_bytes())
    data[100] ^= 4
    (state / "iter_0000005" / "__0_0.distcp").write_bytes(data)
    for arguments in (
        [state],
        [state, "--json"],
        [state.parent, "--verify"],
        [state / "iter_0000005"],
        [state / "iter_0000003", state / "iter_0000005"],
        [state, "--params", "changed.yaml"],
    ):
        done = CliRunner().invoke(main, list(map(str, arguments)))
        assert done.exit_code == 1
        assert "__0_0.distcp has another sha256" in done.stderr
    inspected(state.parent)
    inspected(state / "iter_0000005", "--no-verify")


def test_a_checkpoint_equals_its_copy(state, tmp_path):
    shutil.copytree(state, tmp_path / "copy")
    assert "7 of 7 are equal bit for bit" in inspected(state, tmp_path / "copy")


def test_two_checkpoints_are_compared_field_by_field_and_tensor_by_tensor(state):
    shown = inspected(state / "iter_0000003", state, status=1)
    for text in ("optimizer_step", "3 -> 5", "1 of 7 are equal bit for bit", "model.weight"):
        assert text in shown
    told = json.loads(inspected(state / "iter_0000003", state, "--json", status=1))
    assert told["equal"] == 1  # the empty one
    differences = {each["name"]: each for each in told["tensors"]}
    a, b = example(3)["model.weight"].double(), example(5)["model.weight"].double()
    assert differences["model.weight"]["absolute"] == float((a - b).abs().max())
    relative = float((a - b).abs().max() / a.abs().max())
    assert differences["model.weight"]["relative"] == relative


def test_tensors_that_one_lacks_or_has_otherwise(tmp_path):
    for number, tensors in enumerate(
        (
            {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2), "e": torch.ones(2)},
            {
                "b": torch.zeros(3),
                "c": torch.zeros(2).half(),
                "d": torch.ones(1),
                "e": torch.ones(2),
            },
        )
    ):
        save(tmp_path / f"{number}", 1, tensors, {}, 1)
    told = json.loads(inspected(tmp_path / "0", tmp_path / "1", "--json", status=1))
    found = {each["name"]: (each["verdict"], each["detail"]) for each in told["tensors"]}
    assert found == {
        "a": ("only in the first", ""),
        "b": ("shape", "[2] -> [3]"),
        "c": ("dtype", "float32 -> float16"),
        "d": ("only in the second", ""),
    }
    assert told["scalars"] == []


@pytest.mark.parametrize(
    ("a", "b", "verdict", "absolute"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], "equal", None),
        ([0.0], [-0.0], "values", 0.0),
        ([float("inf"), 1.0], [float("inf"), 1.5], "values", 0.5),
        ([float("inf")], [1.0], "values", float("inf")),
        ([1.0, 2.0], [1.0, float("nan")], "values", float("nan")),
    ],
)
def test_values_are_compared_by_their_bits_first(a, b, verdict, absolute):
    found = compare_values("x", torch.tensor(a), torch.tensor(b))
    assert found.verdict == verdict
    assert found.absolute == pytest.approx(absolute, nan_ok=True)


def test_large_tensors_are_compared_in_pieces(monkeypatch):
    monkeypatch.setattr("lib.checkpoint.compare._PIECE", 7)
    a = torch.arange(100.0).reshape(10, 10)
    b = a.clone()
    b[9, 9] += 3
    b[0, 1] -= 2
    assert compare_values("x", a, b).absolute == 3
    assert compare_values("x", torch.tensor(2**62), torch.tensor(2**62 + 2**40)).absolute == 2**40


def previewed(state, **changes):
    return preview(read_checkpoint(checkpoint_in(state), hashed=False), params(**changes), None)


def test_the_same_parameters_continue_bit_for_bit(state):
    found = previewed(state, parallel__tensor=2, parallel__data=2)
    assert found.another_run == []
    assert found.fingerprint == state.name
    assert found.not_bit_for_bit == []
    assert "from iteration 5 to" in found.length


def test_another_learning_rate_is_another_run(state):
    found = previewed(state, optimizer__lr=0.5, checkpoint__keep_last=7)
    assert [line.partition(":")[0] for line in found.another_run] == ["optimizer.lr"]
    assert found.fingerprint != state.name
    assert "checkpoint.keep_last: 2 -> 7" in found.continues_with
    shown = inspected(state, "--params", "changed.yaml")
    assert "another run" in shown
    assert "optimizer.lr" in shown


def test_another_layout_continues_but_not_bit_for_bit(state):
    found = previewed(
        state, parallel__tensor=1, runtime__deterministic=True, training__train_iters=5
    )
    assert found.another_run == []
    reasons = [reason.partition(" was ")[0] for reason in found.not_bit_for_bit]
    assert reasons == ["parallel.tensor", "runtime.deterministic"]
    assert "nothing would be left" in found.length
    assert "before this checkpoint" in previewed(state, training__train_iters=4).length
    shown = inspected(state, "--params", "changed.yaml")
    assert "it continues" in shown
    assert "whether the training code has changed is not known" in shown


def test_changed_training_code_is_told(state):
    Path("lib").mkdir()
    Path("lib/code.py").write_text("one = 1\n")
    Path("dvc.yaml").write_text("stages:\n  pretrain:\n    cmd: none\n    deps: [lib]\n")
    params()
    assert "launch.on_code_change decides" in inspected(state, "--params", "changed.yaml")


def test_other_initial_weights_are_another_run(state):
    found = previewed(state, training__initial_weights="initial@0123456789ab")
    names = [line.partition(":")[0] for line in found.another_run]
    assert names == ["initial.sha256"]


def test_parameters_that_break_a_rule_are_refused(state):
    with pytest.raises(UserError, match="global_batch_size"):
        previewed(state, training__micro_batch_size=7)


def test_a_checkpoint_without_its_configuration_cannot_be_previewed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_example(tmp_path, 4)
    with pytest.raises(UserError, match="not recorded"):
        previewed(tmp_path)
    save(tmp_path, 5, example(5), {"run_config": {"model": 3}}, 9)
    with pytest.raises(UserError, match="another version's"):
        previewed(tmp_path)


def test_corpora_that_nothing_is_known_of_cannot_be_previewed(state):
    later = [{"from_samples": 320, "blend": {"web": 1}}]
    with pytest.raises(UserError, match=r"tokens of web are not described .* validate_config"):
        previewed(state, corpora__web={}, data__blend={"stdlib": 1}, data__phases=later)
    found = previewed(state, corpora__web={}, data__blend={"stdlib": 1})
    assert not found.another_run


def test_a_run_with_added_phases_goes_on_from_this_state(state):
    later = [{"from_samples": 320, "seq_length": 128}]
    found = previewed(state, data__phases=later, model__max_position_embeddings=256)
    assert {line.partition(":")[0].partition(".1.")[0] for line in found.another_run} == {
        "data.phases"
    }
    assert "at or before sample 320" in found.length
    shown = inspected(state, "--params", "changed.yaml")
    assert "phases are added: it goes on" in " ".join(shown.split())


def test_texts():
    assert [size_text(n) for n in (0, 999, 1000, 1_500_000, 2 * 10**13)] == [
        *("0 B", "999 B", "1.0 kB", "1.5 MB", "20.0 TB"),
    ]
    assert layout_text({}) == layout_text(None) == value_text(None) == "not recorded"
    assert (
        layout_text({"tensor": 1, "pipeline": 1, "virtual_stages": 1, "data": 1}) == "one process"
    )
    assert value_text({"a": None, "b": True, "n": 12345}) == "a null, b true, n 12,345"
