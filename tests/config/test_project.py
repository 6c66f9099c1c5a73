"""What dvc.yaml declares as code, and where states live."""

from pathlib import Path

import pytest

from lib.config.project import declared_code, stage_code, state_root
from lib.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = """stages:
  first:
    cmd: x
    deps:
      - data/raw
      - stages/first.py
      - lib/errors.py
      - liberty/a.py
      - lib/remote.py: {with: settings}
      - kernels
  own:
    cmd: y
  each:
    foreach: ${corpora}
    do:
      cmd: z
      deps:
        - data/raw/${key}
        - stages/each.py
"""


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    path = tmp_path / "dvc.yaml"
    path.write_text(WORKFLOW)
    return path


def test_code_is_told_from_data(workflow: Path) -> None:
    first = (Path("stages/first.py"), Path("lib/errors.py"), Path("kernels"))
    each = (Path("stages/each.py"),)
    assert declared_code(workflow) == {"first": first, "own": (), "each": each}
    assert stage_code(workflow, "first") == first


def test_code_of_pretrain_is_there() -> None:
    code = stage_code(ROOT / "dvc.yaml", "pretrain")
    assert Path("stages/pretrain.py") in code
    assert all((ROOT / path).exists() for path in code)


def test_unknown_stage_names_the_others(workflow: Path) -> None:
    with pytest.raises(UserError, match="has no stage nope; it has: first, own, each"):
        stage_code(workflow, "nope")


@pytest.mark.parametrize(
    "text", ["", "[]", "stages", "stages:", "stages: [a]", "stages: {a: b}", "stages: {a: [", "\t"]
)
def test_damaged_workflow_is_one_line(workflow: Path, text: str) -> None:
    workflow.write_text(text)
    with pytest.raises(UserError) as caught:
        declared_code(workflow)
    assert str(caught.value).startswith(f"{workflow}: ")
    assert "\n" not in str(caught.value)


def test_missing_workflow(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dvc\.yaml: no such file"):
        declared_code(tmp_path / "dvc.yaml")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "state"),
        ({"DVC_ROOT": "/project"}, "/project/state"),
        ({"DRYDOCK_STATE": "/big", "DVC_ROOT": "/project"}, "/big"),
        ({"DRYDOCK_STATE": "", "DVC_ROOT": "/project"}, "/project/state"),
    ],
)
def test_state_root(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("DRYDOCK_STATE", "DVC_ROOT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert state_root() == Path(expected)
