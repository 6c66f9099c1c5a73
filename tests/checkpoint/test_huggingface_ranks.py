"""Tensor and pipeline parallel ranks against Hugging Face's models: same loss, same gradients."""

import pytest
import torch
from torch.nn import functional as F

from lib.checkpoint.huggingface import to_huggingface
from lib.config.schema import ModelConfig
from lib.layers.attention import attention_backend
from lib.model.gpt import GPTModel, ModelOptions, StageSlice
from lib.model.loss import MicroBatch, run_chunk
from lib.parallel.collectives import all_reduce
from lib.parallel.mesh import build_mesh, groups_of
from lib.parallel.storage import named_parts
from lib.pipeline.communication import Links
from lib.pipeline.executor import run_plan
from lib.pipeline.plan import stage_plan
from tests.checkpoint.test_huggingface import VOCABULARY, gpt2, llama, qwen2, qwen3
from tests.checkpoint.test_huggingface_parity import BATCH, PADDED, SEQ_LENGTH, pair, tokens
from tests.distributed import run_on_ranks
from tests.model.models import join
from tests.stored import gradients_of, values_of

FOUR_HEADS = {"hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 4}
CONFIGURATIONS = {
    "gpt2": gpt2(**FOUR_HEADS),
    "gpt2 untied": gpt2(**FOUR_HEADS, tie_embeddings=False),
    "llama": llama(),
    "llama one kv head, tied": llama(num_query_groups=1, tie_embeddings=True),
    "qwen2": qwen2(),
    "qwen3 one kv head": qwen3(num_query_groups=1),
}


def gradients_on_rank(config_text, weights, degrees, inputs_SB, labels_SB):
    """One micro batch a sample through this rank's part: summed losses, gradients by name."""
    config = ModelConfig.model_validate_json(config_text)
    mesh = build_mesh("cpu", tensor=degrees[0], pipeline=degrees[1], data=1)
    groups = groups_of(mesh)
    stage, stages = groups.pp.rank, groups.pp.size
    per_stage = config.num_layers // stages
    layers = range(stage * per_stage, (stage + 1) * per_stage)
    chunk = GPTModel(
        config,
        vocab_size=VOCABULARY,
        padded_vocab_size=PADDED,
        groups=groups,
        part=StageSlice(layers, first=stage == 0, last=stage == stages - 1),
        options=ModelOptions(attention_backend("auto")),
    )
    for name, part in named_parts(chunk):
        held = part.cut.part_of(weights[chunk.global_name(name)])
        part.value.copy_(part.cut.used_of(held))
    links = Links(groups.channels, stage, stages, 1, (SEQ_LENGTH, 1, config.hidden_size))
    links.connect()
    batches = [
        MicroBatch(i, label, torch.ones(SEQ_LENGTH, 1), SEQ_LENGTH)
        for i, label in zip(inputs_SB.split(1, 1), labels_SB.split(1, 1), strict=True)
    ]
    losses = run_plan(
        stage_plan(stage, stages, 1, BATCH, trains=True),
        lambda _chunk, number, received: run_chunk(chunk, batches[number], received),
        links,
        grad_scale=1.0 / labels_SB.numel(),
    )
    gradients = {chunk.global_name(name): value for name, value in gradients_of(chunk).items()}
    if config.tie_embeddings and (chunk.embedding is not None or chunk.has_tied_copy):
        all_reduce(gradients["embedding.word_embeddings.weight"], groups.embedding)
    return [loss.item() for loss in losses], gradients


FEW = {("gpt2", (2, 1)), ("gpt2", (1, 2)), ("llama one kv head, tied", (2, 1))}
CASES = [
    pytest.param(config, degrees, marks=[] if (name, degrees) in FEW else [pytest.mark.layouts])
    for name, config in CONFIGURATIONS.items()
    for degrees in ((2, 1), (1, 2), (2, 2))
]


@pytest.mark.parametrize(("config", "degrees"), CASES)
def test_ranks_give_their_loss_and_gradients(config, degrees):
    model, other = pair(config)
    inputs, labels = tokens()
    expected = F.cross_entropy(
        other(inputs).logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    expected.mean().backward()
    weights = values_of(model)
    size = degrees[0] * degrees[1]
    outcomes = run_on_ranks(
        size, gradients_on_rank, config.model_dump_json(), weights, degrees, inputs.T, labels.T
    )

    losses = torch.tensor(outcomes[-1][0])
    torch.testing.assert_close(losses, expected.view(BATCH, -1).sum(1), atol=1e-4, rtol=1e-5)
    gradients = {}
    for name, weight in weights.items():
        holders = [theirs[name] for _, theirs in outcomes if name in theirs]
        copies = [holders[i : i + degrees[0]] for i in range(0, len(holders), degrees[0])]
        for parts in copies:
            gradients[name] = join(parts, weight.shape)
    mapped, _ = to_huggingface(gradients, config, VOCABULARY)
    for name, value in other.named_parameters():
        torch.testing.assert_close(mapped[name], value.grad, atol=1e-5, rtol=1e-4, msg=name)
