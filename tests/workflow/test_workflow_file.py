"""dvc.yaml keeps the rules that DVC's traps taught: what may be an out, a parameter, a command."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
STAGES: dict[str, dict[str, Any]] = YAML(typ="safe").load(ROOT / "dvc.yaml")["stages"]
PARAMS: dict[str, Any] = YAML(typ="safe").load(ROOT / "params.yaml")


def test_order_and_commands() -> None:
    """`exec` leaves no shell between DVC and the stage; -m keeps stages/ off the import path."""
    expected = ["download_corpus", "prepare_tokenizer", "tokenize_corpus", "validate_config"]
    expected += ["pretrain", "evaluate", "export_model"]
    assert list(STAGES) == expected
    for name, stage in STAGES.items():
        assert stage["cmd"] == f"exec python -m stages.{name}"
        assert stage["desc"]


def test_params_are_whole_sections_and_each_has_one_reader() -> None:
    readers = [section for stage in STAGES.values() for section in stage.get("params", [])]
    assert sorted(readers) == sorted(set(PARAMS) - {"launch", "runtime"})


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
