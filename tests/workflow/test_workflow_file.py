"""dvc.yaml keeps the rules that DVC's traps taught: what may be an out, a parameter, a command."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW: dict[str, dict[str, Any]] = YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"]
# One instance for each corpus: their definition stands under `do`.
PER_CORPUS = [name for name, stage in WORKFLOW.items() if stage.get("foreach") == "${corpora}"]
STAGES = {name: stage.get("do", stage) for name, stage in WORKFLOW.items()}
PARAMS: dict[str, Any] = YAML(typ="safe").load(ROOT / "params.yaml")


def test_order_and_commands() -> None:
    """`exec` leaves no shell between DVC and the stage; -m keeps stages/ off the import path."""
    expected = ["download_corpus", "prepare_tokenizer", "tokenize_corpus", "validate_config"]
    expected += ["pretrain", "evaluate", "export_model"]
    assert list(STAGES) == expected
    assert PER_CORPUS == ["download_corpus", "tokenize_corpus"]
    for name, stage in STAGES.items():
        option = " --corpus ${key}" if name in PER_CORPUS else ""
        assert stage["cmd"] == f"exec python -m stages.{name}{option}"
        assert stage["desc"]


def test_a_stage_of_each_corpus_touches_its_own_folders_only() -> None:
    for name in PER_CORPUS:
        data = [dep for dep in STAGES[name]["deps"] if dep.startswith("data/")]
        assert {*data, *STAGES[name]["outs"]} <= {"data/tokenizer"} | {
            f"data/{folder}/${{key}}" for folder in ("raw", "tokens")
        }


def test_params_are_whole_sections_and_each_has_one_reader() -> None:
    """But corpora: whoever reads the folders of all of them must know which these are."""
    readers = [section for stage in STAGES.values() for section in stage.get("params", [])]
    assert STAGES["download_corpus"]["params"] == ["corpora.${key}"]
    once = [section for section in readers if not section.startswith("corpora")]
    assert sorted(once) == sorted(set(PARAMS) - {"corpora", "launch", "runtime"})
    for name in ("prepare_tokenizer", "validate_config"):  # DVC leaves what no corpus is any more
        assert "corpora" in STAGES[name]["params"]


def test_outs_keep_the_run_cache() -> None:
    """A persistent out, or an uncached one that is no metric or plot, switches it off."""
    for stage in STAGES.values():
        assert all(isinstance(out, str) for out in stage.get("outs", []))
        for kind in ("metrics", "plots"):
            for entry in stage.get(kind, []):
                ((name, options),) = entry.items()
                assert options["cache"] is False
                assert name.startswith("results/")
                if kind == "plots":
                    assert {"x", "y", "title"} <= set(options)


def test_no_state_is_an_out() -> None:
    outs = [out for stage in STAGES.values() for out in stage.get("outs", [])]
    assert not [out for out in outs if out.startswith("state")]


def test_compiled_files_are_no_dependency() -> None:
    ignored = (ROOT / ".dvcignore").read_text().splitlines()
    assert {"__pycache__/", "*.py[co]", "*.so", "/state/"} <= set(ignored)


def test_big_data_is_linked_not_copied() -> None:
    config = (ROOT / ".dvc" / "config").read_text()
    assert 'type = "hardlink,symlink"' in config
    for setting in ("analytics = false", "check_update = false", "autostage = false"):
        assert setting in config
