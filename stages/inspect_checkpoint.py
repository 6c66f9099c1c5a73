"""Command: what a state or a checkpoint holds, how two differ, what a run would make of one.

It needs no GPU, changes nothing, and runs nothing that a file names.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.markup import escape

from lib.checkpoint.compare import (
    LoadPreview,
    TensorDifference,
    most_different,
    preview,
    scalar_differences,
    tensor_differences,
)
from lib.checkpoint.directory import iteration_path
from lib.checkpoint.fingerprint import code_hash
from lib.checkpoint.inspect import (
    CheckpointFacts,
    StateFacts,
    checkpoint_in,
    kind_of,
    read_checkpoint,
    read_state,
    states_in,
)
from lib.checkpoint.inspect_tables import (
    NOT_RECORDED,
    Rows,
    change_rows,
    checkpoint_rows,
    config_rows,
    difference_rows,
    kind_rows,
    record_rows,
    scalar_rows,
    size_text,
    state_rows,
    tensor_rows,
    verdict_text,
)
from lib.cli import plain_command
from lib.config.data_facts import DataFacts
from lib.config.params_file import ParamsFile, read_params
from lib.config.project import stage_code
from lib.config.run_config import RunConfig
from lib.config.schema import TrainingSection
from lib.console import say, table
from lib.errors import UserError

RUN_CONFIG = Path("outputs/run_config.json")
WORKFLOW = Path("dvc.yaml")
_LARGEST = 10


@plain_command
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path), required=False)
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Read every file and compare its sha256.  [default: yes, unless all states are listed]",
)
@click.option(
    "--params",
    type=click.Path(path_type=Path),
    help="Say what a run under this parameter file would do with the checkpoint.",
)
@click.option("--tensors", is_flag=True, help="List all tensors, not only the largest.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, for programs.")
def main(
    path: Path,
    other: Path | None,
    verify: bool | None,
    params: Path | None,
    tensors: bool,
    as_json: bool,
) -> None:
    """Shows what PATH holds, or how the checkpoints PATH and OTHER differ.

    PATH is a checkpoint (state/FINGERPRINT/iter_N), the state of one configuration
    (state/FINGERPRINT), or all states (state). With OTHER or --params a state stands for the
    checkpoint that a run would resume from.

    Exit status 1 if something is damaged, or if the two differ.
    """
    if other is not None and params is not None:
        raise UserError("OTHER and --params are two questions: give one of them")
    try:
        if other is not None:
            pair = (path, other)
            _compare(pair, hashed=verify is not False, as_json=as_json, all_tensors=tensors)
        elif params is not None:
            _preview(path, read_params(params), hashed=verify is not False, as_json=as_json)
        elif (kind := kind_of(path)) == "states":
            _list_states(path, hashed=verify is True, as_json=as_json)
        elif kind == "state":
            _show_state(path, hashed=verify is not False, as_json=as_json)
        else:
            facts = read_checkpoint(path, hashed=verify is not False)
            _show_checkpoint(facts, as_json=as_json, all_tensors=tensors)
            _fail_if_damaged([facts], [])
    except OSError as error:  # no permission, or a run that trains has just removed it
        raise UserError(f"{error.filename or path} cannot be read: {error.strerror}") from error


def _list_states(root: Path, *, hashed: bool, as_json: bool) -> None:
    states = [read_state(path) for path in states_in(root)]
    checkpoints = [facts for state in states for facts in _checkpoints_of(state, hashed=hashed)]
    if as_json:
        say(json.dumps([asdict(state) for state in states], indent=2, default=str))
    else:
        headers = ("state", "iterations", "finished", "layout", "size")
        _table(f"{len(states)} states in {root}", state_rows(states), headers)
    _fail_if_damaged(checkpoints, [fault for state in states for fault in state.damage])


def _show_state(path: Path, *, hashed: bool, as_json: bool) -> None:
    state = read_state(path)
    checkpoints = _checkpoints_of(state, hashed=hashed)
    if as_json:
        shown = {**asdict(state), "checkpoints": [_as_json(facts) for facts in checkpoints]}
        say(json.dumps(shown, indent=2, default=str))
    else:
        _table(str(path), record_rows(state))
        headers = ("iteration", "size", "saved under", "files")
        _table("checkpoints", checkpoint_rows(checkpoints), headers)
    _fail_if_damaged(checkpoints, list(state.damage))


def _checkpoints_of(state: StateFacts, *, hashed: bool) -> list[CheckpointFacts]:
    folders = [iteration_path(state.path, iteration) for iteration in state.iterations]
    return [read_checkpoint(folder, hashed=hashed) for folder in folders]


def _compare(paths: tuple[Path, Path], *, hashed: bool, as_json: bool, all_tensors: bool) -> None:
    """Raises ``SystemExit(1)`` where the two differ."""
    first, second = (read_checkpoint(checkpoint_in(path), hashed=hashed) for path in paths)
    _fail_if_damaged([first, second], [])
    scalars, tensors = scalar_differences(first, second), list(tensor_differences(first, second))
    changed = [tensor for tensor in tensors if tensor.verdict != "equal"]
    if as_json:
        found = {"scalars": scalars, "tensors": [asdict(tensor) for tensor in changed]}
        named = {"first": str(first.path), "second": str(second.path)}
        say(json.dumps({**named, **found, "equal": len(tensors) - len(changed)}, indent=2))
    else:
        _show_differences(first, second, scalars, tensors, all_tensors=all_tensors)
    if scalars or changed:
        raise SystemExit(1)


def _show_differences(
    first: CheckpointFacts,
    second: CheckpointFacts,
    scalars: Sequence[str],
    tensors: Sequence[TensorDifference],
    *,
    all_tensors: bool,
) -> None:
    say(f"first   {first.path}\nsecond  {second.path}")
    if scalars:
        _table("configuration and other scalars", change_rows(scalars))
    else:
        say("configuration and other scalars: the same")
    counts = Counter(tensor.verdict for tensor in tensors)
    changed = [tensor for tensor in tensors if tensor.verdict != "equal"]
    say(f"tensors: {counts['equal']} of {len(tensors)} are equal bit for bit")
    if changed:
        shown = changed if all_tensors else most_different(changed)[:_LARGEST]
        title = f"{len(shown)} of {len(changed)} that differ, the most different first"
        title = f"all {len(changed)} that differ" if len(shown) == len(changed) else title
        _table(title, difference_rows(shown), ("tensor", "in", "largest", "relative"))


def _preview(path: Path, params_file: ParamsFile, *, hashed: bool, as_json: bool) -> None:
    folder = checkpoint_in(path)
    facts = read_checkpoint(folder, hashed=hashed)
    _fail_if_damaged([facts], [])
    data = _present_data(params_file)
    found, code = preview(facts, params_file, data), _changed_code(folder.parent)
    if as_json:
        say(json.dumps({**asdict(found), "code": code}, indent=2))
    else:
        where = RUN_CONFIG if data else "the checkpoint, as no run configuration fits the file"
        say(f"{folder} under {params_file.path} (the data are those of {where})")
        _show_preview(found, code)


def _show_preview(found: LoadPreview, code: str) -> None:
    if found.another_run:
        fate = found.length or "it starts fresh and leaves this one alone"
        say(f"another run, state {found.fingerprint}: {fate}")
        _table("what makes it another run", change_rows(found.another_run))
    else:
        say(f"the same run, state {found.fingerprint}: it continues; {found.length}")
    if found.continues_with:
        title = "what may differ in a run that continues"
        _table(title, change_rows(found.continues_with))
    if not found.another_run:
        reasons = found.not_bit_for_bit
        if reasons:
            _table("not bit for bit, because", [(reason,) for reason in reasons])
        else:
            say("on the same machine it goes on bit for bit")
        say(code)


def _present_data(params_file: ParamsFile) -> DataFacts | None:
    """The corpora as ``validate_config`` last saw them, if they were cut as the file says."""
    if not RUN_CONFIG.exists():
        return None
    config, wanted = RunConfig.load(RUN_CONFIG), params_file.section("training", TrainingSection)
    cut_alike = config.training.split == wanted.split
    return config.data if cut_alike and config.training.seq_length == wanted.seq_length else None


def _changed_code(state: Path) -> str:
    """What becomes of the state for the sake of the training code of this project."""
    record = read_state(state).record
    if record is None or not WORKFLOW.exists():
        return "whether the training code has changed is not known here"
    present = code_hash(stage_code(WORKFLOW, "pretrain"))
    if present == record.code_hash:
        return f"the training code is the one that trained it ({present})"
    changed = f"the training code has changed ({record.code_hash} -> {present})"
    if record.finished:
        return f"{changed} and the state is finished: it starts again, the old state is kept aside"
    return f"{changed}: launch.on_code_change decides (refuse, adopt or fresh)"


def _show_checkpoint(facts: CheckpointFacts, *, as_json: bool, all_tensors: bool) -> None:
    if as_json:
        say(json.dumps(_as_json(facts), indent=2))
        return
    _table(str(facts.path), scalar_rows(facts))
    if rows := config_rows(facts):
        _table("run configuration", rows)
    else:
        say(f"run configuration: {NOT_RECORDED}")
    headers = ("kind", "tensors", "number types", "entries", "size")
    _table("tensors", kind_rows(facts.tensors), headers)
    largest = sorted(facts.tensors, key=lambda tensor: -tensor.bytes)[:_LARGEST]
    shown = facts.tensors if all_tensors else largest
    title = "all tensors" if all_tensors else f"the largest {len(shown)} (--tensors lists all)"
    _table(title, tensor_rows(shown), ("tensor", "number type", "shape", "size"))
    files: Rows = [(name, size_text(size)) for name, size in facts.files.items()]
    _table("files", files, ("file", "size"))
    say(verdict_text(facts))


def _table(title: str, rows: Rows, headers: Sequence[str] = ()) -> None:
    """Shows text from files as it is: nothing in it is markup."""
    table(escape(title), [[escape(cell) for cell in row] for row in rows], headers)


def _fail_if_damaged(checkpoints: Sequence[CheckpointFacts], faults: list[str]) -> None:
    """Raises one error that names all damage."""
    found = faults + [f"{facts.path}: {fault}" for facts in checkpoints for fault in facts.damage]
    if found:
        raise UserError(f"damaged: {'; '.join(found)}")


def _as_json(facts: CheckpointFacts) -> dict[str, object]:
    return {**asdict(facts), "path": str(facts.path)}


if __name__ == "__main__":
    main()
