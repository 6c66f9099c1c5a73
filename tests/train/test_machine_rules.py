"""What a machine cannot do for a run; machines are told, not asked."""

from dataclasses import replace
from typing import Any

import pytest

from lib.config.operation import LaunchConfig, RuntimeConfig
from lib.config.run_config import Params
from lib.errors import Problem
from lib.layers.attention_limits import PACKAGE_MODULES
from lib.train.attention_rules import heads_fit_fused_attention
from lib.train.hardware import UNKNOWN, Gpu, Machine
from lib.train.machine_rules import machine_findings
from tests.config.conftest import Factory
from tests.config.sections import precision

T4, A100, H100 = Gpu("Tesla T4", (7, 5)), Gpu("NVIDIA A100", (8, 0)), Gpu("NVIDIA H100", (9, 0))


def params(compute: str = "fp32", **sections: dict[str, Any]) -> Params:
    return replace(Factory().params(**sections), precision=precision(compute=compute))


def found(
    config: Params, here: Machine, launch: dict[str, Any] | None = None, **runtime: Any
) -> tuple[list[str], list[str]]:
    """The fields of what is refused and of what is advised."""

    def fields(problems: list[Problem]) -> list[str]:
        assert all(problem.source for problem in problems)
        return [problem.field for problem in problems]

    sections = (LaunchConfig(**(launch or {})), RuntimeConfig.model_validate(runtime))
    refused, advised = machine_findings(config, *sections, here)
    return fields(refused), fields(advised)


@pytest.mark.parametrize(
    ("compute", "gpus", "refused", "advised"),
    [
        ("fp32", (), [], []),
        ("bf16", (), [], ["precision.compute"]),
        ("fp16", (), [], ["precision.compute"]),
        ("bf16", (T4,), ["precision.compute"], []),
        ("fp16", (T4,), [], []),
        ("bf16", (A100,), [], []),
        ("bf16", (A100, T4), ["precision.compute"], []),
        ("bf16", (Gpu("unknown", UNKNOWN),), [], []),
    ],
)
def test_number_types(
    compute: str, gpus: tuple[Gpu, ...], refused: list[str], advised: list[str]
) -> None:
    assert found(params(compute), Machine(gpus)) == (refused, advised)


def test_only_the_gpus_that_the_run_takes_count() -> None:
    here = Machine((A100, T4))
    assert found(params("bf16"), here, {"processes": 1}) == ([], [])
    assert found(params(), here, {"device": "cpu"}, attention="efficient") == (
        ["runtime.attention"], []
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "gpu", "modules", "is_served"),
    [
        ("auto", T4, (), True),
        ("fused_softmax", T4, (), True),
        ("efficient", T4, (), False),  # bf16
        ("flash", H100, (), True),
        ("flash_attn", H100, (), False),
        ("flash_attn", H100, ("flash_attn.flash_attn_interface",), True),
        ("flash_attn", H100, ("flash_attn_interface",), True),
        ("flash_attn", A100, ("flash_attn_interface",), False),  # version 3 is for Hopper
        ("flash_attn_4", H100, ("flash_attn.cute",), True),
        ("flash_attn_4", A100, PACKAGE_MODULES, False),
    ],
)
def test_attention(name: str, gpu: Gpu, modules: tuple[str, ...], is_served: bool) -> None:
    here = Machine((gpu,), frozenset(modules))
    refused, _ = found(params("bf16", model={"head_dim": 8}), here, attention=name)
    assert ("runtime.attention" not in refused) == is_served


def test_a_missing_gpu_is_the_only_complaint() -> None:
    assert found(params("bf16"), Machine(), {"device": "cuda"}, attention="flash") == (
        ["launch.device"], []
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tensor", "nodes", "gpus", "is_within"),
    [(2, 1, 2, True), (2, 2, 2, True), (2, 2, 1, False), (4, 2, 2, False), (4, 2, 4, True)],
)
def test_tensor_parallelism_on_several_nodes(
    tensor: int, nodes: int, gpus: int, is_within: bool
) -> None:
    config = params(parallel={"tensor": tensor})
    refused, advised = found(config, Machine((H100,) * gpus, nodes=nodes))
    assert refused == []
    assert (not advised) == is_within


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16", "fp64"])
def test_heads_for_fused_attention(compute: str) -> None:
    """Torch's kernels take 16 bytes at a time; nothing is said of number types for CPUs."""
    advised = [
        size
        for size in range(1, 300)
        if list(
            heads_fit_fused_attention(params(compute, model={"head_dim": size}), RuntimeConfig())
        )
    ]
    is_half = compute in ("bf16", "fp16")
    assert advised == [size for size in range(1, 300) if is_half and size % 8]
