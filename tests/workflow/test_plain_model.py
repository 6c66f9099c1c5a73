"""The models that Drydock is measured by compute the same: each pair checks both."""

import pytest
import torch

from lib.config.schema import OptimizerConfig
from lib.errors import UserError
from lib.parallel.storage import named_parts
from lib.workflow import huggingface_model
from lib.workflow.huggingface_model import HuggingFaceModel, require_transformers
from lib.workflow.plain_model import PlainModel
from lib.workflow.plain_steps import PlainSteps, compiled_plain_steps
from tests.model.models import CONFIGS, PADDED, VOCAB_SIZE, build, drawn_tokens, roughen

UNTIED = CONFIGS["gpt2"].model_copy(update={"tie_embeddings": False, "qkv_bias": False})
MODELS = CONFIGS | {"gpt2 untied, no qkv bias": UNTIED}
# Rounding of fp32 in sums of at most 64 terms, over some twenty operations one after the other.
TOLERANCE = 1e-5


def ours_with_rough_weights(config):
    """Our model, and its weights whole by their global names."""
    model = build(config)
    parts = dict(named_parts(model))
    whole = {name: part.value for name, part in parts.items()}
    weights = {name: value.float() for name, value in roughen(whole, config).items()}
    with torch.no_grad():
        for name, part in parts.items():
            part.value.copy_(weights[name])
    return model, weights


@pytest.mark.parametrize("name", sorted(MODELS))
def test_loss_and_gradients_are_those_of_our_model(name):
    config = MODELS[name]
    model, weights = ours_with_rough_weights(config)
    plain = PlainModel(config, VOCAB_SIZE)
    plain.load(weights)
    tokens, labels = drawn_tokens(3, batch=3, length=10)
    ours = model(tokens.t(), labels.t()).mean()
    theirs = plain(tokens, labels)
    assert theirs.item() == pytest.approx(ours.item(), rel=TOLERANCE)
    ours.backward()
    theirs.backward()
    gradient = model.embedding.word_embeddings.weight.grad
    torch.testing.assert_close(
        plain.tokens.weight.grad, gradient[:VOCAB_SIZE], rtol=1e-4, atol=1e-5
    )
    assert gradient.shape[0] == PADDED


def test_the_hugging_face_model_computes_the_same():
    pytest.importorskip("transformers")
    for name in ("gpt2", "llama"):
        model, weights = ours_with_rough_weights(CONFIGS[name])
        real = {  # 48 rows: no padding by the configuration
            name: value[:VOCAB_SIZE] if value.shape[0] == PADDED else value
            for name, value in weights.items()
        }
        theirs = HuggingFaceModel(CONFIGS[name], VOCAB_SIZE, real)
        tokens, labels = drawn_tokens(4, batch=2, length=12)
        expected = model(tokens.t(), labels.t()).mean().item()
        assert theirs(tokens, labels).item() == pytest.approx(expected, rel=TOLERANCE)


def test_missing_transformers_are_named(monkeypatch):
    monkeypatch.setattr(huggingface_model.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(UserError, match="transformers is not installed"):
        require_transformers()


def test_plain_steps_are_those_of_a_loop():
    """Two micro batches as one batch of both, with clipping and decay."""
    options = OptimizerConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.3)
    tokens, labels = drawn_tokens(5, batch=4, length=8)
    losses = []
    for pieces in (1, 2):
        torch.manual_seed(7)
        model = PlainModel(CONFIGS["llama"], VOCAB_SIZE)
        model.draw()
        batch = list(zip(tokens.chunk(pieces), labels.chunk(pieces), strict=True))
        step = PlainSteps(model, iter([batch] * 4), options)
        losses.append([step() for _ in range(4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


def test_steps_on_random_tokens_begin_at_an_even_guess():
    step = compiled_plain_steps(
        CONFIGS["gpt2"], VOCAB_SIZE, (2, 3, 8), OptimizerConfig(lr=1e-3), torch.device("cpu")
    )
    first = step()
    assert first == pytest.approx(torch.tensor(float(VOCAB_SIZE)).log().item(), rel=0.02)
    assert step() != first
