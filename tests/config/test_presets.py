"""params.yaml and its presets: documented, sound, merged without losing a comment."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from dvc.utils.serialize import modify_yaml

from lib.config.operation import CONFIG_SECTIONS
from lib.config.params_file import parse_params, read_params, read_params_sections
from lib.config.params_problems import entry_model
from lib.config.presets import conflicts, merge_preset, preset_path, read_preset, to_text
from lib.config.run_config import Params, count_parameters, resolve_model
from lib.errors import InvalidParams, UserError
from lib.train.hardware import Gpu, Machine
from stages.apply_preset import ALL_SECTIONS, committed_version
from stages.validate_config import ALL_SECTIONS as VALIDATED_SECTIONS
from stages.validate_config import check_schema, find_warnings

ROOT = Path(__file__).parents[2]
PRESETS = sorted(path.stem for path in (ROOT / "params").glob("*.yaml"))


def default_text() -> str:
    return (ROOT / "params.yaml").read_text()


def merged_text(name: str) -> str:
    params_file = read_params(ROOT / "params.yaml")
    merge_preset(params_file, read_preset(preset_path(ROOT / "params", name), ALL_SECTIONS))
    return to_text(params_file)


def comments(text: str) -> list[str]:
    return re.findall(r"#.*", text)


def test_both_stages_know_the_same_sections() -> None:
    assert ALL_SECTIONS == VALIDATED_SECTIONS


def test_the_default_states_every_key_and_explains_it() -> None:
    params_file = read_params(ROOT / "params.yaml")
    assert list(params_file.root) == list(ALL_SECTIONS)
    lines = default_text().splitlines()
    for name, model in ALL_SECTIONS.items():
        keys = set(entry_model(model).model_fields)
        is_named = entry_model(model) is not model
        for at in [(name, entry) for entry in params_file.root[name]] if is_named else [(name,)]:
            section = params_file.plain(*at)
            assert isinstance(section, dict)
            assert set(section) == keys, at
            for key in keys:
                line = lines[int(params_file.where(*at, key).rpartition(":")[2]) - 1]
                assert "#" in line, f"{at}.{key} has no comment"


def test_the_default_has_100_columns_at_most() -> None:
    for path in [ROOT / "params.yaml", *(ROOT / "params").glob("*.yaml")]:
        long = [line for line in path.read_text().splitlines() if len(line) > 100]
        assert not long, path


def test_an_untouched_file_is_written_back_byte_for_byte() -> None:
    assert to_text(read_params(ROOT / "params.yaml")) == default_text()


def test_the_default_is_sound() -> None:
    check_schema(read_params(ROOT / "params.yaml"))


def test_the_presets_that_the_documents_name_are_there() -> None:
    assert PRESETS == ["gpt_125m_1gpu", "laptop", "llama_1.4b_4gpu", "llama_7b_8gpu", "smoke"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_sound_and_keeps_all_comments(name: str) -> None:
    text = merged_text(name)
    check_schema(parse_params(text, Path("params.yaml")))
    assert comments(text) == comments(default_text())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gets_no_advice(name: str) -> None:
    """On a CPU or the GPUs that it names: whoever takes a preset has nothing to mend."""
    gpus = re.search(r"_(\d)gpu$", name)
    here = Machine((Gpu("NVIDIA H200", (9, 0), 150 * 10**9),) * (int(gpus[1]) if gpus else 0))
    file = parse_params(merged_text(name), Path("params.yaml"))
    assert not find_warnings(file, here)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_changes_its_keys_and_no_other(name: str) -> None:
    preset = read_params(ROOT / "params" / f"{name}.yaml")
    default = read_params(ROOT / "params.yaml")
    merged = parse_params(merged_text(name), Path("params.yaml"))
    for section, keys in default.root.items():
        if section != "corpora":
            for key in keys:
                wanted = preset if key in preset.root.get(section, {}) else default
                assert merged.plain(section, key) == wanted.plain(section, key), f"{section}.{key}"
    named = preset.root.get("corpora", {})
    ((found, after),) = merged.root["corpora"].items()
    assert found == next((name for name in named if name != "*"), "stdlib")
    assert dict(after) == {**default.root["corpora"]["stdlib"], **next(iter(named.values()), {})}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_only_keys_that_differ(name: str) -> None:
    preset = read_params(ROOT / "params" / f"{name}.yaml")
    default = read_params(ROOT / "params.yaml")
    preset.root["corpora"] = next(iter(preset.root.get("corpora", {}).values()), {})
    default.root["corpora"] = default.root["corpora"]["stdlib"]
    same = [
        f"{section}.{key}"
        for section, keys in preset.root.items()
        for key in keys
        if preset.plain(section, key) == default.plain(section, key)
    ]
    assert not same


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("gpt_125m_1gpu", 124e6, 126e6),
        ("llama_1.4b_4gpu", 1.4e9, 1.45e9),
        ("llama_7b_8gpu", 6.7e9, 7.0e9),
    ],
)
def test_a_preset_has_the_size_of_its_name(name: str, low: float, high: float) -> None:
    params_file = parse_params(merged_text(name), Path("params.yaml"))
    params = Params.from_file(params_file)
    model = resolve_model(params.model, params.training.seq_length)
    vocab_size = params_file.root["tokenizer"]["vocab_size"]
    assert low < count_parameters(model, vocab_size) < high


@pytest.mark.parametrize("name", ["gpt_125m_1gpu", "llama_1.4b_4gpu", "llama_7b_8gpu"])
def test_a_large_preset_trains_on_about_20_tokens_per_weight(name: str) -> None:
    params_file = parse_params(merged_text(name), Path("params.yaml"))
    params = Params.from_file(params_file)
    training = params.training
    model = resolve_model(params.model, training.seq_length)
    weights = count_parameters(model, params_file.root["tokenizer"]["vocab_size"])
    tokens = (training.train_iters or 0) * training.global_batch_size * training.seq_length
    assert 18 < tokens / weights < 23
    # FineWeb-Edu's documents have about 1000 tokens: enough of them for one pass.
    assert tokens < params_file.root["corpora"]["fineweb_edu"]["max_documents"] * 1000


def test_an_unknown_preset_names_those_that_there_are() -> None:
    with pytest.raises(UserError, match=r"did you mean laptop\? There are: gpt_125m_1gpu, "):
        preset_path(ROOT / "params", "labtop")
    with pytest.raises(UserError, match="no such preset"):
        preset_path(ROOT / "params", "../params")


def test_unknown_keys_of_a_preset_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("model:\n  layers: 3\nschedule:\n  lr: 1\n")
    with pytest.raises(InvalidParams) as caught:
        read_preset(tmp_path / "bad.yaml", ALL_SECTIONS)
    assert [problem.remedy for problem in caught.value.problems] == [
        "nearest: num_layers",
        "it belongs to section optimizer",
    ]


def test_a_merge_tells_old_and_new_and_writes_null_as_a_word() -> None:
    mine = parse_params("model:\n  a: 1  # one\n  b: 2\n", Path("p.yaml"))
    preset = parse_params("model: {a: null, b: 3.0e-4}\nnew: {c: [x, 'y']}\n", Path("q.yaml"))
    changes = merge_preset(mine, preset)
    assert [(c.field, c.old, c.new) for c in changes] == [
        ("model.a", "1", "null"),
        ("model.b", "2", "0.0003"),
        ("new.c", "(missing)", '["x", "y"]'),
    ]
    assert to_text(mine) == "model:\n  a: null # one\n  b: 3.0e-4\nnew:\n  c: [x, 'y']\n"


TWO_CORPORA = """corpora:
  a:      # one
    source: files  # its source
    paths: [x]
  b:      # two
    seed: 3
"""


@pytest.mark.parametrize(
    ("preset", "merged"),
    [
        (  # the same list twice would become an anchor
            "{'*': {paths: [q]}}",
            {"a": {"source": "files", "paths": ["q"]}, "b": {"seed": 3, "paths": ["q"]}},
        ),
        ("{b: {seed: 5}}", {"b": {"seed": 5}}),
        (
            "{c: {seed: 5}, b: {seed: 6}}",
            {"c": {"source": "files", "paths": ["x"], "seed": 5}, "b": {"seed": 6}},
        ),
        (
            "{b: {seed: 6}, c: {source: url}, d: {seed: 7}}",
            {"c": {"source": "url", "paths": ["x"]}, "b": {"seed": 6}, "d": {"seed": 7}},
        ),
    ],
)
def test_a_preset_says_which_corpora_there_are(preset: str, merged: dict[str, object]) -> None:
    mine = parse_params(TWO_CORPORA, Path("p.yaml"))
    changes = merge_preset(mine, parse_params(f"corpora: {preset}", Path("q.yaml")))
    text = to_text(mine)
    assert parse_params(text, Path("p.yaml")).plain("corpora") == merged
    assert "&" not in text
    assert ("# one" in text) == (len(merged) > 1)
    renamed = [(change.old, change.new) for change in changes if change.field == "corpora"]
    assert renamed == ([] if "*" in preset else [("{a, b}", "{" + ", ".join(merged) + "}")])


def test_own_corpora_are_not_removed_nor_overwritten() -> None:
    committed = parse_params(TWO_CORPORA, Path("p.yaml"))
    preset = parse_params("corpora: {c: {source: url, seed: 4}, b: {seed: 5}}", Path("q.yaml"))
    assert conflicts(committed, preset, committed) == []
    mine = parse_params(TWO_CORPORA.replace("files", "huggingface") + "  d: {}\n", Path("p.yaml"))
    first, second = conflicts(mine, preset, committed)
    assert (first.where, first.field, first.value) == ("p.yaml:1", "corpora", "{a, b, d}")
    assert (second.where, second.field, second.value) == (
        *("p.yaml:3", "corpora.c.source", '"huggingface"'),
    )
    merge_preset(committed, preset)  # the preset's own result is no conflict, once applied
    assert conflicts(committed, preset, parse_params(TWO_CORPORA, Path("p.yaml"))) == []


def test_only_own_changes_to_other_values_are_conflicts() -> None:
    committed = parse_params("m: {a: 1, b: 1, c: 1, d: 1}", Path("p.yaml"))
    mine = parse_params("m:\n  a: 2\n  b: 3\n  c: 1\n  d: 7\n", Path("p.yaml"))
    preset = parse_params("m: {a: 3, b: 3.0, c: 3}", Path("q.yaml"))
    found = conflicts(mine, preset, committed)
    assert [(problem.where, problem.field, problem.value) for problem in found] == [
        ("p.yaml:2", "m.a", "2")
    ]
    assert "committed: 1" in found[0].rule
    assert "write 3 over it" in found[0].rule
    assert "git checkout -- p.yaml" in found[0].remedy


class Project:
    """A folder with params.yaml and its presets, where the command is run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.params = folder / "params.yaml"
        self.params.write_text(default_text())
        (folder / "params").mkdir()
        for name in PRESETS:
            text = (ROOT / "params" / f"{name}.yaml").read_text()
            (folder / "params" / f"{name}.yaml").write_text(text)

    def git(self, *arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(
            ["git", *identity, *arguments], cwd=self.folder, check=True, capture_output=True
        )

    def apply(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "stages.apply_preset", *arguments]
        params = ["--params", str(self.params)]
        return subprocess.run(
            [*command, *params], cwd=ROOT, capture_output=True, text=True, check=False
        )

    def change(self, old: str, new: str) -> None:
        assert old in self.params.read_text()
        self.params.write_text(self.params.read_text().replace(old, new))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_the_command_prints_each_key_and_writes_the_file(project: Project) -> None:
    done = project.apply("smoke")
    assert done.returncode == 0, done.stderr
    assert "model.num_layers: 4 -> 2\n" in done.stdout
    preset = read_params(ROOT / "params" / "smoke.yaml")
    assert done.stdout.count(" -> ") == sum(len(keys) for keys in preset.root.values())
    assert "corpora.stdlib.max_documents: null -> 60\n" in done.stdout
    assert project.params.read_text() == merged_text("smoke")
    assert not list(project.folder.glob("*.partial"))


def test_applying_twice_changes_nothing_more(project: Project) -> None:
    project.git("init")
    project.git("add", ".")
    project.git("commit", "-m", "start")
    assert project.apply("laptop").returncode == 0
    once = project.params.read_text()
    assert project.apply("laptop").returncode == 0
    assert project.params.read_text() == once


def test_own_changes_are_not_overwritten(project: Project) -> None:
    project.git("init")
    project.git("add", ".")
    project.git("commit", "-m", "start")
    project.change("num_layers: 4 ", "num_layers: 7 ")
    project.change("keep_last: 2 ", "keep_last: 5 ")  # not a key of the preset
    mine = project.params.read_text()
    done = project.apply("smoke")
    assert done.returncode == 1
    assert "model.num_layers = 7: is your own change (committed: 4)" in done.stderr
    assert "Traceback" not in done.stderr
    assert project.params.read_text() == mine
    project.git("add", ".")
    project.git("commit", "-m", "my layers")
    assert project.apply("smoke").returncode == 0
    assert "keep_last: 5 " in project.params.read_text()


def test_another_output_leaves_the_file_as_it_is(project: Project) -> None:
    done = project.apply("smoke", "--output", str(project.folder / "merged.yaml"))
    assert done.returncode == 0, done.stderr
    assert project.params.read_text() == default_text()
    assert (project.folder / "merged.yaml").read_text() == merged_text("smoke")


def test_a_merge_that_is_not_sound_writes_nothing(project: Project) -> None:
    bad = project.folder / "params" / "bad.yaml"
    bad.write_text("model:\n  num_layers: two\n")
    done = project.apply("bad")
    assert done.returncode == 1
    assert 'model.num_layers = "two": must be a whole number' in done.stderr
    assert project.params.read_text() == default_text()


def test_without_git_or_commits_there_is_no_committed_version(project: Project) -> None:
    assert committed_version(project.params) is None
    project.git("init")
    assert committed_version(project.params) is None
    project.git("add", ".")
    project.git("commit", "-m", "start")
    committed = committed_version(project.params)
    assert committed is not None
    assert read_params_sections(committed, ALL_SECTIONS).keys() == {
        "corpora", "tokenizer", "tokens", *CONFIG_SECTIONS
    }  # fmt: skip


def test_dvc_may_rewrite_the_file(tmp_path: Path) -> None:
    """As ``dvc exp run -S`` does: nulls become empty, quotes go, numbers change spelling."""
    path = tmp_path / "params.yaml"
    path.write_text(default_text())
    with modify_yaml(str(path)) as content:
        content["schedule"]["min_lr"] = 1e-05
        content["training"]["train_iters"] = 1000000000.0
        content["corpora"]["stdlib"]["max_documents"] = None
    text = path.read_text()
    assert "min_lr: 1e-05 " in text
    assert "train_iters: 1000000000.0 " in text
    assert "split: 90,5,5 " in text
    rewritten = read_params(path)
    check_schema(rewritten)
    params = Params.from_file(rewritten)
    assert params.schedule.min_lr == 1e-5
    assert params.training.train_iters == 10**9
    assert params.training.split == "90,5,5"
