"""The strict reader: spellings, misspellings, lines."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lib.config.params_file import (
    ParamsFile,
    check_params_sections,
    parse_params,
    read_params,
    read_params_sections,
    unknown_keys,
)
from lib.config.params_problems import nearest_keys
from lib.errors import InvalidParams, Problem, UserError


class Link(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    url: str
    size: int = 0


class Optimizer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    lr: float = 1e-3
    beta1: float = Field(default=0.9, ge=0, lt=1)
    fused: bool = False
    kind: Literal["adamw", "sgd"] = "adamw"


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    num_layers: int = Field(default=2, ge=1)
    num_attention_heads: int = 4
    head_dim: int | None = None
    name: str | None = None
    links: tuple[Link, ...] = ()


MODELS: dict[str, type[BaseModel]] = {"optimizer": Optimizer, "model": Model}


def parse(text: str) -> ParamsFile:
    return parse_params(text, Path("params.yaml"))


def problems_of(text: str) -> list[str]:
    with pytest.raises(InvalidParams) as caught:
        read_params_sections(parse(text), MODELS)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("spelling", ["1e-4", "1.0e-4", "'1e-4'", "0.0001", "1E-04", "1e-04"])
def test_one_float_in_many_spellings(spelling: str) -> None:
    assert parse(f"optimizer: {{lr: {spelling}}}").section("optimizer", Optimizer).lr == 1e-4


@pytest.mark.parametrize(("spelling", "value"), [("1e5", 1e5), ("3", 3.0), ("-0.5", -0.5)])
def test_floats_may_be_whole(spelling: str, value: float) -> None:
    lr = parse(f"optimizer: {{lr: {spelling}}}").section("optimizer", Optimizer).lr
    assert lr == value
    assert isinstance(lr, float)


@pytest.mark.parametrize(
    ("spelling", "value"),
    [("4", 4), ("4.0", 4), ("1000000000.0", 10**9), ("1e9", 10**9), ("'16'", 16), ("1_000", 1000)],
)
def test_integers_as_dvc_rewrites_them(spelling: str, value: int) -> None:
    layers = parse(f"model: {{num_layers: {spelling}}}").section("model", Model).num_layers
    assert layers == value
    assert type(layers) is int


@pytest.mark.parametrize("spelling", ["", "null", "~"])
def test_null_in_all_spellings(spelling: str) -> None:
    assert parse(f"model:\n  head_dim: {spelling}\n").section("model", Model).head_dim is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("num_layers: 2.5", "= 2.5: must be a whole number; nearest: 2 or 3"),
        ("num_layers: true", "= true: must be a whole number; write a whole number such as 2"),
        ("num_layers: off", '= "off": must be a whole number; write a whole number such as 2'),
        ("num_layers: 1:30", '= "1:30": must be a whole number; write a whole number such as 2'),
        ("num_layers: 010", "= 010: a leading zero is ambiguous (octal or decimal); write 10"),
        ("num_layers: '010'", '= "010": must be a whole number; write a whole number such as 2'),
        ("num_layers: 0", "= 0: must be at least 1; write 1 or more"),
        ("num_layers: null", "= null: must be a whole number; write a whole number such as 2"),
        ("num_layers: [2]", "= [2]: must be a whole number; write a whole number such as 2"),
        ("name: 12", '= 12: must be text; put it in quotes: "12"'),
        ("links: x", "= \"x\": must be a list; write [first, second] or one '- entry' a line"),
    ],
)
def test_refused_values_of_a_model(line: str, expected: str) -> None:
    key = line.partition(":")[0]
    assert problems_of(f"model:\n  {line}\n") == [f"params.yaml:2: model.{key} {expected}"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("lr: 1e-4x", '= "1e-4x": must be a number; write a number such as 0.001'),
        ("lr: yes", '= "yes": must be a number; write a number such as 0.001'),
        ("lr: true", "= true: must be a number; write a number such as 0.001"),
        ("lr: .inf", "= inf: must be finite; write an ordinary number"),
        ("lr: .nan", "= nan: must be finite; write an ordinary number"),
        ("lr: '.inf'", '= ".inf": must be a number; write a number such as 0.001'),
        ("beta1: 1", "= 1: must be less than 1.0; write a number below 1.0"),
        ("beta1: -0.1", "= -0.1: must be at least 0.0; write 0.0 or more"),
        ("fused: yes", '= "yes": must be true or false; write true'),
        ("fused: off", '= "off": must be true or false; write false'),
        ("fused: 1", "= 1: must be true or false; write true or false"),
        ("kind: adam", '= "adam": must be one of adamw, sgd; did you mean adamw?'),
        ("kind: 3", "= 3: must be one of adamw, sgd; choose one, such as adamw"),
    ],
)
def test_refused_values_of_an_optimizer(line: str, expected: str) -> None:
    key = line.partition(":")[0]
    assert problems_of(f"optimizer:\n  {line}\n") == [f"params.yaml:2: optimizer.{key} {expected}"]


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("learing_rate", "nearest: lr"),
        ("learning-rate", "nearest: lr"),
        ("Lr", "nearest: lr"),
        ("num_layers", "it belongs to section model"),
        ("layers", "nearest: model.num_layers"),
        ("qqq", "remove it; known are lr, beta1, fused, kind"),
    ],
)
def test_unknown_keys_name_the_one_that_was_meant(key: str, remedy: str) -> None:
    expected = f"params.yaml:2: optimizer.{key} = 1: no such key in this section; {remedy}"
    assert problems_of(f"optimizer:\n  {key}: 1\n") == [expected]


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("optimiser", "nearest: optimizer"),
        ("lr", "it belongs to section optimizer"),
        ("n_layers", "nearest: model.num_layers"),
        ("zzz", "remove it; known are optimizer, model"),
    ],
)
def test_unknown_sections(key: str, remedy: str) -> None:
    assert problems_of(f"{key}: 1\n") == [f"params.yaml:1: {key} = 1: no such section; {remedy}"]


def test_all_problems_at_once_in_the_order_of_the_file() -> None:
    found = problems_of("model:\n  layers: 3\n  name: 1\nlr: 3\noptimizer:\n  lr: x\n")
    assert [line.split(" = ")[0] for line in found] == [
        "params.yaml:2: model.layers",
        "params.yaml:3: model.name",
        "params.yaml:4: lr",
        "params.yaml:6: optimizer.lr",
    ]


def test_sound_sections_are_given_beside_the_problems() -> None:
    sections, problems = check_params_sections(parse("model: {}\noptimizer: {lr: x}"), MODELS)
    assert sections == {"model": Model()}
    assert [problem.field for problem in problems] == ["optimizer.lr"]


def test_problems_inside_lists_have_their_own_lines() -> None:
    text = (
        "model:\n  links:\n    - {url: a}\n    - url: b\n      size: 1.5\n      sise: 2\n    - {}\n"
    )
    assert problems_of(text) == [
        "params.yaml:5: model.links[1].size = 1.5: must be a whole number; nearest: 1 or 2",
        "params.yaml:6: model.links[1].sise = 2: no such key here; remove it",
        "params.yaml:7: model.links[2].url = (missing): the key is required; add it",
    ]


def test_numbers_in_quotes_inside_lists_are_read() -> None:
    links = parse("model: {links: [{url: a, size: '1e3'}]}").section("model", Model).links
    assert links == (Link(url="a", size=1000),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3\n", "params.yaml:3: the key appears twice: "),
        ("a:\n  x: 1\n  x: 2\n", "params.yaml:3: the key appears twice: "),
        ("a:\n\tx: 1\n", "params.yaml:2: a tab in the indentation"),
        ("a: 1\nb: [1, 2\nc: 3\n", "params.yaml:3: not valid YAML: "),
        ("a: 'x\n", "params.yaml:2: not valid YAML: "),
        ("", "params.yaml: the file is empty"),
        ("# nothing\n", "params.yaml: the file is empty"),
        ("- 1\n", "params.yaml:1: the file must be a mapping"),
        ("word\n", "params.yaml:1: the file must be a mapping"),
    ],
)
def test_broken_files_give_one_line_with_its_number(text: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no\.yaml: no such file; .*--params"):
        read_params(tmp_path / "no.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        read_params(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(UserError, match="byte 3 is not UTF-8"):
        read_params(tmp_path / "latin.yaml")


def test_byte_order_mark_and_crlf_are_read(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_bytes(b"\xef\xbb\xbfmodel:\r\n  num_layers: 3\r\n")
    assert read_params(tmp_path / "p.yaml").section("model", Model).num_layers == 3


@pytest.mark.parametrize("text", ["optimizer: {}\n", "optimizer:\nmodel:\n"])
def test_absent_and_empty_sections_are_all_defaults(text: str) -> None:
    assert parse(text).section("model", Model) == Model()


def test_a_section_must_be_a_mapping() -> None:
    for value in ("3", "[1]", "word"):
        assert "must be a section" in problems_of(f"model: {value}\n")[0]


class Checked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    low: int = 0
    high: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low > self.high:
            raise InvalidParams([Problem("low", str(self.low), "above high", "swap them")])
        if self.high > 9:
            raise ValueError(f"high = {self.high}: too high; write 9; and low: odd; write 0")
        return self


def test_validators_name_fields_and_get_lines() -> None:
    with pytest.raises(InvalidParams) as caught:
        parse("checked:\n  high: 1\n  low: 2\n").section("checked", Checked)
    assert [str(p) for p in caught.value.problems] == [
        "params.yaml:3: checked.low = 2: above high; swap them"
    ]
    with pytest.raises(InvalidParams) as caught:
        parse("checked:\n  high: 10\n  low: 2\n").section("checked", Checked)
    assert [(p.where, p.field, p.remedy) for p in caught.value.problems] == [
        ("params.yaml:2", "checked.high", "write 9"),
        ("params.yaml:1", "checked", "write 0"),
    ]


def test_unknown_keys_of_a_partial_file() -> None:
    partial = parse("model:\n  layers: 3\nmodle: {}\noptimizer: 3\n")
    assert [problem.field for problem in unknown_keys(partial, MODELS)] == [
        "modle",
        "model.layers",
        "optimizer",
    ]
    assert unknown_keys(parse("model: {num_layers: x}"), MODELS) == []


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_survives_yaml(number: float) -> None:
    lr = parse(f"optimizer: {{lr: {number!r}}}").section("optimizer", Optimizer).lr
    assert lr == number
    quoted = parse(f"optimizer: {{lr: '{number!r}'}}").section("optimizer", Optimizer).lr
    assert math.isclose(quoted, number, rel_tol=0, abs_tol=0)


@given(st.integers(min_value=1, max_value=2**70))
def test_every_integer_survives_yaml(number: int) -> None:
    assert parse(f"model: {{num_layers: {number}}}").section("model", Model).num_layers == number


@given(st.text(max_size=40))
def test_no_text_breaks_the_reader_but_by_a_user_error(text: str) -> None:
    with suppress(UserError):
        read_params_sections(parse(text), MODELS)


@given(st.sampled_from(["num_attention_heads", "micro_batch_size", "save_interval"]), st.data())
def test_one_typing_mistake_finds_the_key(key: str, data: st.DataObject) -> None:
    keys = ["num_attention_heads", "micro_batch_size", "save_interval", "keep_last", "hidden_size"]
    place = data.draw(st.integers(0, len(key) - 1))
    mistyped = data.draw(
        st.sampled_from(
            [key[:place] + key[place + 1 :], key[:place] + "z" + key[place:], key.replace("_", "-")]
        )
    )
    assert nearest_keys(mistyped, keys) == [key]
