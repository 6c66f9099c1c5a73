"""The formula of what is kept for backward, beside what autograd keeps of the real model."""

from dataclasses import replace

import pytest
import torch

from lib.config.operation import RuntimeConfig
from lib.config.schema import ParallelConfig
from lib.layers.attention import attention_backend
from lib.model.gpt import GPTModel, ModelOptions, StageSlice
from lib.model.initialization import initialize
from lib.model.recompute import Recompute
from lib.parallel.groups import ParallelGroups
from lib.parallel.mesh import build_mesh, groups_of
from lib.plan.activations import LayerActivations, chunk_kept, head_kept
from lib.plan.work import Work
from tests.distributed import run_on_ranks
from tests.kernels.conftest import interpret_kernels
from tests.model.models import CONFIGS
from tests.plan.kept import kept_bytes

SEQUENCE, BATCH, VOCAB, LAYERS = 4, 2, 48, 3
MODES = {
    "none": RuntimeConfig(),
    "selective": RuntimeConfig(recompute="selective"),
    "full": RuntimeConfig(recompute="full"),
    "full, two together": RuntimeConfig(recompute="full", recompute_layers=2),
    "block of one": RuntimeConfig(recompute="full", recompute_method="block"),
    "weights": RuntimeConfig(attention="fused_softmax"),
    "weights again": RuntimeConfig(attention="fused_softmax", recompute="selective"),
}


def work_for(config, runtime, tensor=1):
    return Work(
        model=config.model_copy(update={"num_layers": LAYERS}),
        vocab_size=VOCAB,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        micro_batches=1,
        parallel=ParallelConfig(data=1, tensor=tensor, sequence=tensor > 1),
        compute="fp16",
        runtime=runtime,
    )


def build(work, groups=None, *, first=True, last=True):
    recompute = Recompute(
        work.runtime.recompute, work.runtime.recompute_method, work.runtime.recompute_layers
    )
    model = GPTModel(
        work.model,
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        groups=groups or ParallelGroups(),
        options=ModelOptions(attention_backend(work.runtime.attention), recompute),
        part=StageSlice(range(LAYERS), first=first, last=last),
    )
    if first and last:
        initialize(model, work.model, vocab_size=VOCAB, seed=1)
    return model.half().train()


def expected(work, *, last=True):
    found = chunk_kept(LayerActivations(work), LAYERS)
    return found + (sum(head_kept(work)) if last else 0)


# Each mode, and each model where it differs; not all pairs, since interpreted kernels are slow.
KEPT = [("llama", mode) for mode in MODES if mode != "weights again"]
KEPT += [("gpt2", "none"), ("gpt2", "block of one")]
KEPT += [("qwen", mode) for mode in ("none", "selective", "full", "weights", "weights again")]


@pytest.mark.parametrize(("name", "mode"), KEPT)
def test_what_a_whole_model_keeps(interpreter, name, mode):
    work = work_for(CONFIGS[name], MODES[mode])
    assert kept_bytes(build(work), SEQUENCE, BATCH) == pytest.approx(expected(work), abs=64)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_chunk_amid_a_pipeline_keeps(interpreter, name):
    work = work_for(CONFIGS[name], MODES["none"])
    model = build(work, first=False, last=False)
    assert kept_bytes(model, SEQUENCE, BATCH) == pytest.approx(expected(work, last=False), abs=64)


def kept_on_rank(name, tensor):
    with pytest.MonkeyPatch.context() as patch:
        interpret_kernels()
        patch.setenv("TRITON_INTERPRET", "1")
        work = work_for(CONFIGS[name], MODES["none"], tensor)
        mesh = build_mesh("cpu", tensor=tensor, pipeline=1, data=1)
        groups = replace(groups_of(mesh), sequence_parallel=True)
        torch.manual_seed(1)
        return kept_bytes(build(work, groups, last=False), SEQUENCE, BATCH)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_tensor_parallel_ranks_keep(name):
    work = work_for(CONFIGS[name], MODES["none"], tensor=2)
    for found in run_on_ranks(2, kept_on_rank, name, 2, timeout=120.0):
        assert found == pytest.approx(expected(work, last=False), abs=64)
