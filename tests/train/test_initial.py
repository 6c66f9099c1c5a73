"""Training from given weights, at any layout: the source's loss at step 0, and nothing else new."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from lib.checkpoint.huggingface import to_huggingface
from lib.checkpoint.initial_weights import write_weights
from lib.checkpoint.shapes import parameter_shapes
from lib.checkpoint.weight_sources import read_source
from lib.config.initial_weights import GivenWeights
from lib.config.run_config import RunConfig
from lib.errors import UserError
from lib.evaluate.evaluation import load_model
from lib.model.initialization import initial_value
from lib.train.initial import start_from_weights
from lib.train.loop import summed_loss, validate
from lib.train.step import Progress
from tests.checkpoint.test_huggingface import theirs
from tests.distributed import run_on_ranks
from tests.evaluate.test_evaluation import publish
from tests.train.test_pretrain import configure, pretrain, project  # noqa: F401
from tests.train.tiny_run import VOCABULARY, build_tiny, tiny_config, write_tokens

WORDS = "embedding.word_embeddings.weight"
POSITIONS = "embedding.position_embeddings.weight"
LLAMA = {
    "model__position_embedding": "rope",
    "model__normalization": "rmsnorm",
    "model__activation": "swiglu",
    "model__bias": False,
    "model__tie_embeddings": False,
    "model__num_query_groups": 2,
}
EVALUATED = {"training__eval_interval": 1}


def random_tensors(config: RunConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(17)
    shapes = parameter_shapes(config.model, config.data.vocab_size)
    return {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def give(folder: Path, config: RunConfig, tensors: dict[str, Tensor]) -> GivenWeights:
    record = write_weights(
        folder, tensors, config.model, "a test", tokenizer=None, tokenizer_fingerprint=None
    )
    return GivenWeights(str(folder), "", record)


def started(config: RunConfig, given: GivenWeights, kept: int = VOCABULARY) -> RunConfig:
    """The configuration with these weights to start from."""
    initial = given.initial(config.model, config.data.vocab_size, kept)
    return config.model_copy(update={"initial": initial})


def starts(config_texts: list[str]) -> list[dict[str, object]]:
    """What this rank holds at step 0 of each run, and the validation loss there."""
    outcomes = []
    for text in config_texts:
        parts = build_tiny(text)
        try:
            said = start_from_weights(parts.model, parts.config)
        except UserError as error:
            outcomes.append({"refused": str(error)})
            continue
        finally:
            parts.close()
        held = {name: whole(value) for name, value in parts.model.parameters.items()}
        batches = [batch for measured in parts.validation for batch in measured.batches]
        total, tokens = summed_loss(parts, batches)
        outcomes.append({"said": said, "weights": held, "loss": total / max(1.0, tokens)})
    return outcomes


def whole(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def joined(per_rank: list[dict[str, object]]) -> dict[str, Tensor]:
    """The parameters of all pipeline stages; a copy held by several ranks is the same on each."""
    weights: dict[str, Tensor] = {}
    for outcome in per_rank:
        for name, value in outcome["weights"].items():
            assert torch.equal(weights.setdefault(name, value), value), name
    return weights


def layouts(manifest: Path) -> list[RunConfig]:
    """On two ranks: the GPT-2 and the Llama kind, each cut in both directions, and copied."""
    degrees = (
        {"parallel__tensor": 2, "parallel__sequence": True},
        {"parallel__pipeline": 2},
        {"parallel__sharding": "parameters"},
    )
    return [
        tiny_config(manifest, **kind, **degree, **EVALUATED)
        for kind in ({}, LLAMA)
        for degree in degrees
    ]


def their_loss(config: RunConfig, tensors: dict[str, Tensor], batches: list) -> float:
    """The loss of transformers' model with the same weights on the same samples."""
    state, fields = to_huggingface(tensors, config.model, VOCABULARY)
    other = theirs(fields).eval()
    other.load_state_dict(state, strict=True)
    losses = []
    for inputs_SB, labels_SB in batches:
        with torch.no_grad():
            logits = other(inputs_SB.T).logits
        losses.append(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels_SB.T.flatten(), reduction="none"
            )
        )
    return torch.cat(losses).mean().item()


def validation_of(config_text: str) -> list[tuple[Tensor, Tensor]]:
    parts = build_tiny(config_text)
    parts.close()
    (measured,) = parts.validation
    return [(batch.tokens_SB, batch.labels_SB) for batch in measured.batches]


def test_every_layout_starts_from_their_weights(tmp_path):
    """Bit for bit the imported weights, and the loss of transformers' model, at two ranks."""
    manifest = write_tokens(tmp_path)
    configs, expected = [], []
    for number, config in enumerate(layouts(manifest)):
        tensors = random_tensors(config)
        given = give(tmp_path / f"initial-{number}", config, tensors)
        configs.append(started(config, given))
        expected.append(tensors)
    alone = tiny_config(manifest, **EVALUATED).to_json()
    (batches,) = run_on_ranks(1, validation_of, alone)
    outcomes = run_on_ranks(2, starts, [config.to_json() for config in configs])
    for number, (config, tensors) in enumerate(zip(configs, expected, strict=True)):
        weights = joined([rank[number] for rank in outcomes])
        assert weights.keys() == tensors.keys()
        for name, value in tensors.items():
            assert torch.equal(weights[name][: len(value)], value), name
            assert not weights[name][len(value) :].any(), "padding rows are zero"
        loss = their_loss(config, tensors, batches)
        for rank in outcomes:
            assert rank[number]["loss"] == pytest.approx(loss, abs=1e-5)
            assert rank[number]["said"] == [
                f"starting from the weights of {config.initial.folder} "
                f"(sha256 {config.initial.sha256})"
            ]


def test_a_larger_model_keeps_what_is_given_and_draws_the_rest(tmp_path):
    """Deeper, longer, with more and with other tokens: rows given stay, new ones are as drawn."""
    manifest = write_tokens(tmp_path)
    small = tiny_config(manifest, **EVALUATED)
    tensors = random_tensors(small)
    fewer = {n: t[:250] if n == WORDS else t for n, t in tensors.items()}
    given = give(tmp_path / "all", small, tensors)
    given_fewer = give(tmp_path / "fewer", small, fewer)
    grown = tiny_config(
        manifest, model__num_layers=4, model__max_position_embeddings=24, parallel__pipeline=2
    )
    split = tiny_config(manifest, parallel__tensor=2)
    untied = tiny_config(manifest, model__tie_embeddings=False, parallel__tensor=2)
    tensors_untied = random_tensors(untied)
    given_untied = give(tmp_path / "untied", untied, tensors_untied)
    cases = [
        (started(grown, given), tensors, ["layers.2", "layers.3", f"{POSITIONS}[16:24]"]),
        (started(split, given_fewer, 250), fewer, [f"{WORDS}[250:300]"]),
        (
            started(untied, given_untied, 0),
            tensors_untied,
            [f"{WORDS}[0:300]", "output_layer.weight[0:300]"],
        ),
    ]
    outcomes = run_on_ranks(2, starts, [config.to_json() for config, _, _ in cases])
    for number, (config, source, new) in enumerate(cases):
        assert list(config.initial.new_parts) == new
        weights = joined([rank[number] for rank in outcomes])
        assert outcomes[0][number]["said"][1:] == [f"new, at random: {part}" for part in new]
        for name, value in weights.items():
            drawn = initial_value(
                name,
                tuple(value.shape),
                config.model,
                vocab_size=VOCABULARY,
                seed=config.training.seed,
            )
            kept = source.get(name, value[:0])
            if name in {WORDS, "output_layer.weight"} and number == 2:
                kept = value[:0]
            assert torch.equal(value[: len(kept)], kept), name
            assert torch.equal(value[len(kept) :], drawn[len(kept) :]), name


def test_a_fault_on_one_rank_is_raised_on_all(tmp_path):
    manifest = write_tokens(tmp_path)
    config = tiny_config(manifest)
    given = give(tmp_path / "initial", config, random_tensors(config))
    text = started(config, given).to_json()
    outcomes = run_on_ranks(2, start_with_rank_one_elsewhere, text, str(tmp_path))
    assert outcomes[0] == outcomes[1]
    assert "weights.json: no such file" in outcomes[0]


def start_with_rank_one_elsewhere(config_text: str, folder: str) -> str:
    """Rank 1 sees a file system on which the folder is missing."""
    config = RunConfig.model_validate_json(config_text)
    parts = build_tiny(config_text)
    parts.close()
    if dist.get_rank() == 1:
        initial = config.initial.model_copy(update={"folder": f"{folder}/nowhere"})
        config = config.model_copy(update={"initial": initial})
    with pytest.raises(UserError) as caught:
        start_from_weights(parts.model, config)
    return str(caught.value)


def step_zero_validation(config_text: str) -> dict[str, object]:
    """The row of a validation before the first step."""
    parts = build_tiny(config_text)
    parts.close()
    start_from_weights(parts.model, parts.config)
    rows: list[dict[str, object]] = []

    class Recorder:
        on_validation = staticmethod(rows.append)

    validate(parts, Progress(), Recorder())
    return rows[0]


def test_a_published_model_has_its_own_loss_at_step_zero(tmp_path, monkeypatch):
    """What the evaluation of the source measures is where training from it begins."""
    monkeypatch.chdir(tmp_path)
    made = publish(tmp_path, **EVALUATED, training__eval_iters=1)
    read = read_source(tmp_path / "model", tmp_path / "none")
    assert read.tokenizer == tmp_path / "model" / "tokenizer.json"
    record = write_weights(
        tmp_path / "initial",
        read.tensors,
        read.model,
        read.description,
        tokenizer=read.tokenizer,
        tokenizer_fingerprint=read.tokenizer_fingerprint,
    )
    assert record.tokenizer_fingerprint == made.config.data.tokenizer_fingerprint
    given = GivenWeights(str(tmp_path / "initial"), "", record)
    text = started(made.config, given, record.vocab_size).to_json()
    (row,) = run_on_ranks(1, step_zero_validation, text)
    (batches,) = run_on_ranks(1, validation_of, text)
    model = load_model(tmp_path / "model").model
    with torch.no_grad():
        losses = torch.cat([model(inputs, labels).flatten() for inputs, labels in batches])
    assert row["tokens"] == losses.numel()
    assert row["loss"] == pytest.approx(losses.double().mean().item(), abs=1e-6)


def write_started(given: GivenWeights, **changes: object) -> RunConfig:
    config = started(configure(**changes), given)
    Path("outputs/run_config.json").write_text(config.to_json())
    return config


def test_a_run_starts_from_weights_once_and_resumes_without_them(project):  # noqa: F811
    """Started on two ranks, continued on one; at a rate of 1e-9 the weights stay where they are."""
    small = configure()
    given = give(Path("initial"), small, random_tensors(small))
    sound = Path("initial/model.safetensors").read_bytes()
    deeper = {"model__num_layers": 3, "optimizer__lr": 1e-9, "schedule__warmup_iters": 0}
    write_started(given, training__train_iters=2, parallel__tensor=2, **deeper)

    Path("initial/model.safetensors").write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    refused = pretrain("refused", ranks=2)
    assert "initial: model.safetensors has sha256" in refused
    assert not list(Path("state").glob("*/iter_*"))
    Path("initial/model.safetensors").write_bytes(sound)

    out = pretrain(ranks=2)
    assert "starting from the weights of initial" in out
    assert "new, at random: layers.2" in out
    record = json.loads(Path("model/run_config.json").read_text())["initial"]
    assert record == {"folder": "initial", "new_parts": ["layers.2"], "sha256": given.sha256}
    model, source = load_file("model/model.safetensors"), load_file("initial/model.safetensors")
    for name, value in source.items():
        torch.testing.assert_close(model[name], value, atol=1e-7, rtol=0)
    (folder,) = Path("state").glob("*/iter_0000002")
    read = read_source(folder, Path("data/tokenizer"))
    assert read.tensors.keys() == model.keys()
    assert all(torch.equal(read.tensors[name], model[name]) for name in model)

    shutil.rmtree("initial")
    write_started(given, training__train_iters=3, **deeper)
    out = pretrain()
    assert "continuing from iteration 2 of 3" in out
    assert "starting from the weights" not in out
