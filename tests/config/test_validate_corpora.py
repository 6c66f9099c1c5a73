"""The stage with several corpora, pairs made elsewhere, and phases."""

from pathlib import Path

import pytest

from lib.config.params_file import read_params
from lib.errors import InvalidParams, UserError
from stages.validate_config import check_schema, summarise, validate
from tests.config.project_folder import change, write_data, write_tokens


def several(folder: Path) -> None:
    """Two corpora, a pair made elsewhere, and a second phase."""
    write_data(folder)
    write_tokens(folder / "data" / "tokens" / "web" / "manifest.json", "p", 100)
    write_tokens(folder / "pairs" / "code.manifest.json", "code", 50)
    change(folder, "\ntokenizer: ", "\n  web: {source: python_stdlib}\n\ntokenizer: ")
    change(folder, "  blend: null ", "  blend: {stdlib: 3, web: 1} ")
    change(folder, "  imported: {} ", "  imported: {code: pairs/code} ")
    change(folder, "  validation: null ", "  validation: [stdlib, code] ")
    change(folder, "  phases: [] ", "  phases: [{from_samples: 3200, seq_length: 512}] ")


def test_several_corpora_and_a_phase(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    several(folder)
    config = validate(read_params(Path("params.yaml")))
    data = config.data
    assert (data.trained, data.validation) == (("stdlib", "web"), ("stdlib", "code"))
    assert {name: corpus.manifest for name, corpus in data.corpora.items()} == {
        "code": "pairs/code.manifest.json",
        "stdlib": "data/tokens/stdlib/manifest.json",
        "web": "data/tokens/web/manifest.json",
    }
    splits = data.corpora["code"].splits
    assert splits["train"].tokens == splits["train"].samples == 0
    assert splits["valid"] == splits["test"]
    assert (splits["valid"].documents, splits["valid"].tokens) == ((0, 50), 5000)
    assert [phase.samples for phase in data.phases] == [
        {"stdlib": 70, "web": 35}, {"stdlib": 35, "web": 17}
    ]  # fmt: skip
    assert config.derived.train_tokens == 3200 * 256 + 640 * 512
    summarise(config)
    shown = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    for text in (
        "epochs of web 32.27: each",  # (3200 / 35 + 640 / 17) / 4
        "from sample 3,200 stdlib 75 %, web 25 %, in samples of 512 tokens",
        "code, to measure 50 documents, 5,000 tokens, 19 samples",
        "web, valid split 5 documents",
    ):
        assert text in shown, shown


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("{stdlib: 3, web: 1}", "{stdlib: 3, wep: 1}", "data.blend"),
        ("{stdlib: 3, web: 1}", "{stdlib: 3, web: -1}", "data.blend.web"),
        ("{stdlib: 3, web: 1}", "{stdlib: 0, web: 0}", "data.blend"),
        ("[stdlib, code]", "[stdlib]", "data.imported.code"),
        ("{code: pairs/code}", "{code: pairs/code, web: pairs/code}", "data.imported.web"),
        ("from_samples: 3200", "from_samples: 3208", "data.phases[0].from_samples"),
        ("seq_length: 512", "seq_length: 512, blend: {x: 1}", "data.phases[0].blend"),
        ("seq_length: 512", "seq_lenght: 512", "data.phases[0].seq_lenght"),
        ("  web: {source: python_stdlib}", "  web: {source: files}", "corpora.web.paths"),
        ("  web: {source: python_stdlib}", "  web: {max_document: 3}", "corpora.web.max_document"),
        ("  web: {source: python_stdlib}", "  Web: {}", "corpora.Web"),
    ],
)
def test_a_mistake_in_the_data_is_named_with_its_line(
    folder: Path, old: str, new: str, field: str
) -> None:
    several(folder)
    change(folder, old, new)
    for check in (check_schema, validate):
        with pytest.raises(InvalidParams) as caught:
            check(read_params(Path("params.yaml")))
        problems = {problem.field: problem for problem in caught.value.problems}
        assert field in problems
        line = int(problems[field].where.rpartition(":")[2])
        key = field.split(".")[1].partition("[")[0]
        lines = Path("params.yaml").read_text().splitlines()
        assert lines[line - 1].strip().startswith(f"{key}:")


def test_a_pair_without_a_manifest_is_refused_with_the_command(folder: Path) -> None:
    several(folder)
    Path("pairs/code.manifest.json").unlink()
    with pytest.raises(UserError, match=r"python -m stages\.describe_tokens pairs/code"):
        validate(read_params(Path("params.yaml")))
    Path("pairs/code.idx").unlink()
    with pytest.raises(UserError, match=r"pairs/code\.idx: not there"):
        validate(read_params(Path("params.yaml")))


def test_a_temporary_experiment_finds_the_pairs_of_the_project(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC copies tracked files alone into the folder of an experiment."""
    several(folder)
    (folder / "copy").mkdir()
    for name in ("params.yaml", "data"):
        (folder / "copy" / name).symlink_to(folder / name)
    monkeypatch.setenv("DVC_ROOT", str(folder))
    monkeypatch.chdir(folder / "copy")
    config = validate(read_params(Path("params.yaml")))
    assert Path(config.data.corpora["code"].manifest).samefile(folder / "pairs/code.manifest.json")
