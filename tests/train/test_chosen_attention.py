"""The attention of a run: asked for, kept from its checkpoint, or measured; with told clocks."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lib.config.operation import RuntimeConfig
from lib.errors import UserError
from lib.layers import flash_packages
from lib.train import chosen_attention
from lib.train.chosen_attention import Place, Wanted, choose_attention, with_chosen_attention
from tests.distributed import run_on_ranks
from tests.layers.test_attention_choice import LONG
from tests.layers.test_attention_limits import CASE, H100, T4
from tests.train.tiny_run import tiny_config, write_tokens

GIB = 2**30
TIMES = {"cudnn": 1.0, "flash": 2.0, "efficient": 3.0, "sdpa": 1.5, "fused_softmax": 0.5}
WANTED = Wanted("auto", {CASE: 1.0}, layers=24)


class Clock:
    """Shows told times and notes for what it was asked."""

    def __init__(self, **times):
        self.times, self.asked = TIMES | times, []

    def __call__(self, name, case):
        self.asked.append(name)
        if isinstance(self.times[name], Exception):
            raise self.times[name]
        return self.times[name]


def gpu(clock, capability=H100, memory=140 * GIB):
    return Place(capability, "NVIDIA H200", memory, clock)


@pytest.fixture(autouse=True)
def no_packages(monkeypatch):
    monkeypatch.setattr(flash_packages, "_imported", lambda name: f"needs {name}")


def test_the_fastest_is_taken_and_all_is_told(capsys):
    clock = Clock(flash=RuntimeError("No available kernel."))
    assert choose_attention(WANTED, gpu(clock)) == "cudnn"
    assert clock.asked == ["cudnn", "flash", "efficient", "sdpa"]
    told = capsys.readouterr()
    assert told.out == (
        "attention: cudnn, the fastest on NVIDIA H200 (ms for a layer and a micro batch, forward "
        "and backward: cudnn 1, sdpa 1.5, efficient 3); left out: flash_attn needs "
        "flash_attn.flash_attn_interface; flash_attn_4 needs flash_attn.cute; fused_softmax would "
        "keep 24 GiB for the backward pass; flash fails (No available kernel.)\n"
    )
    assert told.err == ""


def test_what_keeps_little_may_win(capsys):
    short = replace(CASE, seq_length=128)
    wanted = replace(WANTED, cases={short: 1.0})
    assert choose_attention(wanted, gpu(Clock())) == "fused_softmax"
    assert choose_attention(replace(wanted, layers=10**6), gpu(Clock())) == "cudnn"
    assert choose_attention(replace(WANTED, layers=1), gpu(Clock())) == "fused_softmax"
    mixed = replace(wanted, cases={short: 100.0, LONG: 1.0})
    assert choose_attention(mixed, gpu(Clock())) == "cudnn"
    assert "reference" not in capsys.readouterr().out


def test_a_cpu_takes_torchs_own_without_a_word(capsys):
    assert choose_attention(WANTED, Place()) == "sdpa"
    assert choose_attention(replace(WANTED, before="sdpa"), Place()) == "sdpa"
    assert choose_attention(replace(WANTED, before="reference"), Place()) == "reference"
    assert capsys.readouterr() == ("", "")


def test_an_old_gpu_has_less_to_choose_from(capsys):
    clock = Clock()
    half = replace(WANTED, cases={replace(CASE, dtype="fp16"): 1.0})
    assert choose_attention(half, gpu(clock, T4, 16 * GIB)) == "sdpa"
    assert clock.asked == ["efficient", "sdpa"]
    assert "cudnn needs a GPU of compute capability 8.0 or later" in capsys.readouterr().out


def test_nothing_that_runs_at_all_is_an_error():
    broken = {name: RuntimeError("CUDA driver is too old") for name in TIMES}
    with pytest.raises(UserError, match=r"no backend runs .*sdpa fails .CUDA driver is too"):
        choose_attention(WANTED, gpu(Clock(**broken)))


# ---- asked for by name


def test_a_name_is_tried_and_taken(capsys):
    clock = Clock()
    assert choose_attention(replace(WANTED, name="efficient"), gpu(clock)) == "efficient"
    assert clock.asked == ["efficient"]
    assert choose_attention(replace(WANTED, name="reference"), Place()) == "reference"
    assert capsys.readouterr() == ("", "")


REFUSALS = [
    ("flash", Place(), "it needs a GPU; write auto, or one that can serve this run: sdpa, "),
    ("flash_attn", gpu(Clock()), "it needs flash_attn.flash_attn_interface; write auto"),
    ("cudnn", gpu(Clock(), T4), "it needs a GPU of compute capability 8.0 or later"),
    ("flash", gpu(Clock(flash=RuntimeError("odd"))), r"it fails \(odd\); write auto"),
]


@pytest.mark.parametrize(("name", "place", "message"), REFUSALS)
def test_a_name_that_cannot_serve_is_refused_with_a_remedy(name, place, message):
    with pytest.raises(UserError, match=f"runtime.attention = {name}: {message}"):
        choose_attention(replace(WANTED, name=name, before="sdpa"), place)


# ---- at a resume


def test_a_resume_takes_what_the_run_had(capsys):
    clock = Clock()
    assert choose_attention(replace(WANTED, before="efficient"), gpu(clock)) == "efficient"
    assert clock.asked == ["efficient"]
    told = capsys.readouterr()
    assert told == ("attention: efficient, as this run was computed so far\n", "")


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("flash_attn_4", "needs flash_attn.cute"),
        ("efficient", "fails (gone)"),
        ("of_tomorrow", "is no backend of this version"),
    ],
)
def test_what_can_no_longer_serve_is_replaced_with_a_warning(before, reason, capsys):
    place = gpu(Clock(efficient=RuntimeError("gone")))
    assert choose_attention(replace(WANTED, before=before), place) == "cudnn"
    told = capsys.readouterr()
    assert f"attention: {before}, by which this run was computed so far, {reason}; " in told.err
    assert "will differ in the last digits" in told.err
    assert "attention: cudnn, the fastest" in told.out


# ---- several ranks


def chosen_on_rank(name):
    """Rank 1 has an older GPU; rank 0's clock alone is looked at."""
    second = dist.get_rank() == 1
    clock = Clock(**({"sdpa": 0.1} if second else {}))
    wanted = Wanted(name, {replace(CASE, dtype="fp16"): 1.0}, layers=24)
    with mock.patch.object(flash_packages, "_imported", lambda module: f"no {module}"):
        try:
            chosen = choose_attention(wanted, gpu(clock, T4 if second else H100))
        except UserError as error:
            chosen = str(error)
    return chosen, clock.asked


def test_all_ranks_take_what_can_serve_on_all_of_them():
    assert run_on_ranks(2, chosen_on_rank, "auto") == [
        ("sdpa", ["efficient", "sdpa"]),
        ("sdpa", []),
    ]


def test_all_ranks_refuse_together():
    (first, _), (second, asked) = run_on_ranks(2, chosen_on_rank, "cudnn")
    assert first == second
    assert "it needs a GPU of compute capability 8.0 or later, this one has 7.5" in first
    assert "run: efficient, sdpa, fused_softmax, reference" in first
    assert asked == []


# ---- from a run configuration


def test_the_shapes_of_a_run(tmp_path):
    phases = [{"from_samples": 32, "seq_length": 32, "micro_batch_size": 1}]
    config = tiny_config(
        write_tokens(tmp_path),
        model__num_query_groups=1,
        model__attention_dropout=0.25,
        parallel__tensor=2,
        precision__compute="bf16",
        data__attention="document",
        data__phases=phases,
        model__max_position_embeddings=32,
        schedule__decay="constant",
        schedule__decay_iters=None,
    )
    runtime = RuntimeConfig(deterministic=True)
    cases = chosen_attention._cases(config, runtime)
    short = replace(
        CASE,
        seq_length=16,
        micro_batch_size=2,
        heads=2,
        kv_heads=1,
        head_dim=8,
        dropout=0.25,
        documents=True,
        deterministic=True,
    )
    long = replace(short, seq_length=32, micro_batch_size=1)
    assert cases == {short: 16.0, long: 16.0}


@pytest.mark.parametrize(
    ("arithmetic", "layers", "before"),
    [
        (None, 2, None),
        ({"device": "cpu", "runtime.attention": "reference"}, 2, "reference"),
        ({"device": "cpu", "runtime.attention": "auto"}, 2, "sdpa"),  # of older checkpoints
        ({"device": "cuda", "runtime.attention": "cudnn"}, 1, None),
        ({"device": "cpu"}, 1, None),
    ],
)
def test_what_is_asked_of_a_run_and_where_it_goes(
    arithmetic, layers, before, tmp_path, monkeypatch
):
    config, asked = tiny_config(write_tokens(tmp_path)), []

    def choose(wanted, place):
        asked.append((wanted, place))
        return "efficient"

    monkeypatch.setattr(chosen_attention, "choose_attention", choose)
    found = None if arithmetic is None else SimpleNamespace(scalars={"arithmetic": arithmetic})
    runtime = RuntimeConfig(recompute="none" if layers > 1 else "selective", prefetch=5)
    chosen = with_chosen_attention(runtime, config, torch.device("cpu"), found)
    assert chosen == runtime.model_copy(update={"attention": "efficient"})
    ((wanted, place),) = asked
    assert (wanted.name, wanted.before, wanted.layers) == ("auto", before, layers)
    assert place.capability is None
