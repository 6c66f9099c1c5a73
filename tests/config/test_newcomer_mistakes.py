"""Every rule and every piece of advice, as a newcomer meets it: one wrong value, one line.

The cases stand in ``newcomer_mistakes.yaml`` and ``unwise_values.yaml``. The program's own function
runs, in this process.
"""

import json
import re
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import stages.pretrain
import stages.validate_config
from lib.config.advice import ADVICE
from lib.config.launch_plan import process_count
from lib.config.params_file import editable_yaml
from lib.config.rules import ALL_RULES
from lib.errors import InvalidParams
from lib.plan.remedies import PLAN_ADVICE
from lib.train.attention_rules import ATTENTION_ADVICE, ATTENTION_RULES
from lib.train.hardware import Gpu
from lib.train.machine_rules import MACHINE_ADVICE, MACHINE_RULES
from tests.config.project_folder import ROOT, change, write_data
from tests.config.test_initial_weights import PIN, write_tokenizer, write_weights

HERE = Path(__file__).parent
GPUS = {
    "P100": Gpu("Tesla P100", (6, 0)),
    "V100": Gpu("Tesla V100", (7, 0)),
    "T4": Gpu("Tesla T4", (7, 5)),
    "H100": Gpu("NVIDIA H100", (9, 0)),
    "H100 of 8 GiB": Gpu("NVIDIA H100", (9, 0), 8 * 2**30),
    "H100 of 79.1 GiB": Gpu("NVIDIA H100", (9, 0), round(79.1 * 2**30)),
}
REFUSED = "pretrain would refuse it on this machine: "


def cases_of(name: str) -> list[Any]:
    cases = editable_yaml().load((HERE / name).read_text().replace("@PIN", f"@{PIN}"))
    return [pytest.param(case, id=f"{number}-{case['rule']}") for number, case in enumerate(cases)]


MISTAKES, UNWISE = cases_of("newcomer_mistakes.yaml"), cases_of("unwise_values.yaml")


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(stages.pretrain, "launch", refuse)


def merge(into: Any, keys: Any) -> None:
    for key, value in keys.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict) and key != "imported":
            merge(into[key], value)
        else:
            into[key] = value


def write_params(folder: Path, keys: Any) -> None:
    """The project's parameters with some keys changed."""
    yaml = editable_yaml()
    root = yaml.load((ROOT / "params.yaml").read_text())
    merge(root, keys)
    with (folder / "params.yaml").open("w") as file:
        yaml.dump(root, file)


def prepare(folder: Path, data: str) -> None:
    """What the stages before this one would have written."""
    write_data(folder, documents=2 if data == "few_documents" else 200)
    manifest = folder / "data" / "tokens" / "stdlib" / "manifest.json"
    info = folder / "data" / "tokenizer" / "tokenizer_info.json"
    write_tokenizer(folder / "data" / "tokenizer" / "tokenizer.json", 4096)
    edits = {
        "no_ends": [(manifest, '"append_eod": true', '"append_eod": false')],
        "other_tokenizer": [(info, '"fingerprint": "ff"', '"fingerprint": "other"')],
        "large_vocabulary": [(info, "4096", "70000"), (manifest, "4096", "70000")],
    }
    for path, old, new in edits.get(data, []):
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    if data == "weights":
        write_weights(folder / "initial")
        change(folder, "norm_epsilon: 1.0e-5", "norm_epsilon: 1.0e-6")
    if data == "foreign_weights":
        write_weights(folder / "initial", fingerprint="other", tokens=9)


def answer(
    case: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """What the program prints with --json."""
    folder = Path.cwd()
    monkeypatch.delenv("DVC_ROOT", raising=False)
    if "data" in case:
        prepare(folder, case["data"])
    write_params(folder, case["write"])
    gpus = tuple(GPUS[name] for name in case.get("gpus", []))
    monkeypatch.setattr(stages.validate_config, "cuda_devices", lambda: gpus)
    program = stages.validate_config.main.callback.__wrapped__
    try:
        program(
            params=Path("params.yaml"),
            schema_only="data" not in case,
            as_json=True,
            output=Path("run_config.json"),
        )
        status = 0
    except SystemExit as end:
        status = end.code
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed["ok"] is (status == 0) is (not printed["problems"])
    return printed


def check_line(told: list[dict[str, str]], case: Any) -> None:
    """One of those that were told is the line, its remedy and its place in the file."""
    lines = [
        f"{each['field']} = {each['value']}: {each['rule'].removeprefix(REFUSED)}" for each in told
    ]
    (found,) = [
        each for each, line in zip(told, lines, strict=True) if line.startswith(case["line"])
    ]
    assert case["remedy"] in found["remedy"]
    path, _, number = found["where"].partition(":")
    if path == "params.yaml":
        named = Path("params.yaml").read_text().splitlines()[int(number) - 1].strip()
        assert named.partition(":")[0] in re.split(r"[.\[ ]", found["field"])


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_gets_its_line(
    folder: Path, case: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = answer(case, monkeypatch, capsys)
    is_of_machine = case["rule"] in {rule.__name__ for rule in (*MACHINE_RULES, process_count)}
    told = printed["warnings" if is_of_machine else "problems"]
    found = [each for each in told if each["source"].split(".")[-1] == case["rule"]]
    assert found, told
    assert all(each["rule"].startswith(REFUSED) == is_of_machine for each in found)
    check_line(found, case)
    assert all("\n" not in text for each in told for text in each.values())


@pytest.mark.parametrize("case", UNWISE)
def test_what_is_unwise_gets_its_warning(
    folder: Path, case: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = answer(case, monkeypatch, capsys)
    assert printed["problems"] == []
    found = [each for each in printed["warnings"] if each["source"].endswith(f".{case['rule']}")]
    assert len(found) == 1, printed["warnings"]
    check_line(found, case)


def test_every_rule_has_a_case() -> None:
    covered = {case.values[0]["rule"] for case in MISTAKES}
    assert {rule.__name__ for rule in (*ALL_RULES, *ATTENTION_RULES, *MACHINE_RULES)} <= covered
    advice = {rule.__name__ for rule in (*ADVICE, *ATTENTION_ADVICE, *MACHINE_ADVICE)}
    advice |= {rule.__name__ for rule in PLAN_ADVICE}
    assert advice == {case.values[0]["rule"] for case in UNWISE}
    assert len(MISTAKES) >= 40


def test_every_advice_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "validation.md").read_text()
    for rule in (*ADVICE, *ATTENTION_ADVICE, *MACHINE_ADVICE, *PLAN_ADVICE):
        assert f"`{rule.__name__}`" in text


OF_MACHINE = [
    case
    for case in MISTAKES
    if case.values[0]["rule"] in {rule.__name__ for rule in (*MACHINE_RULES, process_count)}
]


@pytest.mark.parametrize("case", OF_MACHINE)
def test_pretrain_refuses_before_it_starts_a_process(
    folder: Path, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(folder)
    write_params(folder, case["write"])
    gpus = tuple(GPUS[name] for name in case.get("gpus", []))
    monkeypatch.setattr(stages.pretrain, "cuda_devices", lambda: gpus)
    params_file = stages.validate_config.read_params(Path("params.yaml"))
    Path("outputs").mkdir()
    run_config = stages.validate_config.validate(params_file)
    Path("outputs/run_config.json").write_text(run_config.to_json())
    with pytest.raises(InvalidParams) as caught:
        stages.pretrain.main.callback.__wrapped__(Path("params.yaml"))
    wanted = [each for each in caught.value.problems if case["line"].startswith(each.field)]
    assert str(wanted[0]).startswith(f"{wanted[0].where}: {case['line']}")
    assert case["remedy"] in wanted[0].remedy


def test_all_that_a_machine_lacks_is_said_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {"precision": {"compute": "bf16"}, "runtime": {"attention": "flash"}}
    keys = {**wanted, "launch": {"processes": 4}}
    printed = answer({"write": keys, "gpus": ["V100"] * 2}, monkeypatch, capsys)
    fields = [each["field"] for each in printed["warnings"]]
    assert fields == ["precision.compute", "launch.processes", "runtime.attention"]


@pytest.mark.parametrize("gpus", [[], ["H100"], ["H100"] * 8, ["H100 of 79.1 GiB"] * 8])
def test_the_shipped_parameters_are_wise(
    folder: Path,
    gpus: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer({"write": {}, "gpus": gpus}, monkeypatch, capsys)["warnings"] == []


TOO_LARGE = {
    "model": {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16},
    "training": {"seq_length": 2048, "micro_batch_size": 16, "global_batch_size": 256},
    "tokenizer": {"vocab_size": 16384},
}
LARGE = "H100 of 79.1 GiB"


@pytest.mark.parametrize(
    ("changes", "gpus", "is_told"),
    [
        ({}, [LARGE], True),
        ({}, [LARGE] * 3, True),
        ({}, [LARGE, "H100"], False),  # the driver does not tell the memory of one
        ({}, ["H100"], False),
        ({}, [], False),
        ({"launch": {"device": "cpu"}}, [LARGE], False),
        ({"launch": {"processes": 3}}, [LARGE], False),  # refused
        ({"tokenizer": {"kind": "gpt2", "vocab_file": "a", "merges_file": "b"}}, [LARGE], False),
        ({"training": {"micro_batch_size": 1}}, [LARGE], False),
    ],
)
def test_memory_is_judged_where_all_is_known(
    folder: Path,
    changes: dict[str, Any],
    gpus: list[str],
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = deepcopy(TOO_LARGE)
    merge(keys, changes)
    told = answer({"write": keys, "gpus": gpus}, monkeypatch, capsys)["warnings"]
    found = [each for each in told if each["source"].endswith(".run_fits_the_gpus")]
    assert len(found) == is_told, told


def test_memory_is_judged_by_the_data_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the 4,096 tokens that the tokenizer has, once it is there, not the 16,384 wanted."""
    keys = TOO_LARGE | {"training": {"micro_batch_size": 4}}
    needs = [
        answer(case | {"write": keys, "gpus": ["H100 of 8 GiB"]}, monkeypatch, capsys)["warnings"]
        for case in ({}, {"data": "ordinary"})
    ]
    rules = [
        each["rule"]
        for told in needs
        for each in told
        if each["source"].endswith(".run_fits_the_gpus")
    ]
    assert len(rules) == 2
    assert rules[0] != rules[1]
