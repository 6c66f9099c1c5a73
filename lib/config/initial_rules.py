"""Rules between params.yaml and the weights to start from; see ``lib.config.rules``."""

from collections.abc import Iterator, Sequence

from lib.config.data_facts import TokensFacts
from lib.config.data_section import DataSection
from lib.config.initial_weights import (
    WEIGHTS_TOKENIZER,
    GivenWeights,
    new_layers,
    new_positions,
    new_tokens,
)
from lib.config.run_config import longest_seq_length, resolve_model
from lib.config.schema import ModelConfig, ModelSection, TrainingSection
from lib.errors import Problem

# Fields of the model section in which the weights may differ from the run.
_NOT_OF_THE_WEIGHTS = {"attention_dropout", "hidden_dropout", "init_std", "vocab_size_multiple"}


def weights_are_those_named(weights: GivenWeights) -> Iterator[Problem]:
    """Other weights in the same folder are another run, so the parameter has to change."""
    found = weights.sha256
    if not found.startswith(weights.pin):
        yield Problem(
            "training.initial_weights",
            f"{weights.folder}@{weights.pin}",
            f"the weights in that folder have the sha256 {found[: len(weights.pin)]}...",
            f"write {weights.folder}@{found[:16]} to start from these, or put the others back",
        )


def weights_fit_the_model(
    model: ModelSection, training: TrainingSection, data: DataSection, weights: GivenWeights
) -> Iterator[Problem]:
    """A model may be larger than what it starts from, but not of another kind."""
    wanted = resolve_model(model, longest_seq_length(training, data))
    given = weights.record.model
    # Each is read by one kind of position embedding alone.
    of_other_positions = {"learned": "rope_theta", "rope": "max_position_embeddings"}
    ignored = {*_NOT_OF_THE_WEIGHTS, of_other_positions[wanted.position_embedding]}
    grown = {
        "num_layers": new_layers(given, wanted),
        "max_position_embeddings": new_positions(given, wanted),
    }
    for name in ModelConfig.model_fields:
        mine, theirs = getattr(wanted, name), getattr(given, name)
        if name in ignored or mine == theirs:
            continue
        new, remedy = grown.get(name), f"write {_written(theirs)}"
        rule = f"the weights in {weights.folder} have {_written(theirs)}"
        if new and training.new_parts == "initialize":
            continue
        if new:
            rule += f", so {_listed(new)} would be new and random"
            remedy += ", or training.new_parts: initialize to draw what is new"
        elif new is not None:
            rule += ", and nothing of them is left out"
        yield Problem(f"model.{name}", _written(mine), rule, remedy)


def weights_know_the_tokens(
    model: ModelSection,
    training: TrainingSection,
    tokens_facts: TokensFacts,
    weights: GivenWeights,
    kept_tokens: int,
) -> Iterator[Problem]:
    """A row of a vocabulary table means one token."""
    if training.new_parts == "initialize":
        return
    vocab_size = tokens_facts.vocab_size
    new = new_tokens(resolve_model(model, training.seq_length), vocab_size, kept_tokens)
    if new:
        known = f"the first {kept_tokens}" if kept_tokens else "none"
        path = f"{weights.folder}/{WEIGHTS_TOKENIZER}"
        yield Problem(
            "training.initial_weights",
            f"{weights.folder}@{weights.pin}",
            f"these weights know {weights.record.vocab_size} tokens; of the {vocab_size} in "
            f"data/tokenizer {known} are the same, so {_listed(new)} would be new and random",
            f"take their tokenizer (tokenizer.kind: tokenizer_json, tokenizer.path: {path}), or "
            "training.new_parts: initialize to draw what is new",
        )


INITIAL_RULES = (weights_are_those_named, weights_fit_the_model, weights_know_the_tokens)


def _written(value: object) -> str:
    """A value as params.yaml spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(parts: Sequence[str]) -> str:
    """Some names: all, or the first and the last."""
    return ", ".join(parts) if len(parts) <= 3 else f"{parts[0]} to {parts[-1]}"
