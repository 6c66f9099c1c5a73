"""Starting from existing weights: what a weights folder says of itself, and what would be new.

``python -m stages.import_model`` makes the folder, whole or not at all::

    initial/
        model.safetensors   the parameters, fp32, under their global names, without padding rows
        tokenizer.json      the tokenizer that numbered their tokens, where the source had one
        weights.json        what they are: `WeightsRecord`

A model may be larger than the weights that it starts from, in three ways:

    deeper               layers after those there are: ``layers.4``
    longer               rows of learned positions: ``embedding.position_embeddings.weight[32:64]``
    another vocabulary   rows of its tables: ``embedding.word_embeddings.weight[300:512]``

These are *new parts*; each is named, and drawn as if nothing had been given. Any other difference
would change what the given weights compute, so it is refused: also tying or untying the output
layer. Rates of dropout, ``init_std`` and the padding of the vocabulary change nothing of that.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError

from lib.atomic import sha256_of
from lib.config.project import original_path
from lib.config.run_config import InitialWeights
from lib.config.schema import ModelConfig, Section
from lib.errors import UserError

WEIGHTS_RECORD = "weights.json"
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_TOKENIZER = "tokenizer.json"
IMPORT = "python -m stages.import_model"

_WORDS = "embedding.word_embeddings.weight"
_POSITIONS = "embedding.position_embeddings.weight"
_OUTPUT = "output_layer.weight"
_ROWS = re.compile(r"(?P<name>.+)\[(?P<first>[0-9]+):[0-9]+\]")


class FileFacts(Section):
    """One file of a weights folder."""

    bytes: int = Field(ge=0)
    """Its size."""

    sha256: str
    """Its checksum."""


class WeightsRecord(Section):
    """What ``weights.json`` holds."""

    format: Literal[1] = 1
    """Version of this file's layout."""

    model: ModelConfig
    """The model that these are all parameters of."""

    vocab_size: int = Field(ge=1)
    """Rows of the vocabulary tables: token ids are 0 to vocab_size - 1."""

    tokenizer_fingerprint: str | None
    """sha256 of the tokenizer that numbered the tokens; null where the source did not say."""

    source: str
    """Where the weights come from, for a reader."""

    files: dict[str, FileFacts]
    """The other files of the folder."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads ``weights.json`` and looks whether the files are there in their sizes.

        All but the weights themselves are hashed too; those are when they are read, which takes
        long.

        Raises:
            UserError: the folder is missing, none of ours, or damaged.
        """
        path = folder / WEIGHTS_RECORD
        remedy = f"import the weights again: {IMPORT}"
        try:
            record = cls.model_validate_json(path.read_text(encoding="utf-8"), strict=True)
            if WEIGHTS_FILE not in record.files:
                raise UserError(f"{path}: names no {WEIGHTS_FILE}; {remedy}")
            for name, facts in record.files.items():
                file, found = folder / Path(name).name, (folder / Path(name).name).stat().st_size
                if found != facts.bytes:
                    raise UserError(f"{file}: {found} bytes instead of {facts.bytes}; {remedy}")
                if name != WEIGHTS_FILE and sha256_of(file) != facts.sha256:
                    raise UserError(f"{file}: has another sha256 than {path} says; {remedy}")
        except FileNotFoundError as error:
            raise UserError(f"{error.filename}: no such file; {remedy}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{folder}: cannot be read ({error}); {remedy}") from None
        except ValidationError as failure:
            error = failure.errors(include_url=False)[0]
            place = ".".join(map(str, error["loc"])) or "the text"
            raise UserError(f"{path}: {place}: {error['msg']}; {remedy}") from None
        return record


@dataclass(frozen=True)
class GivenWeights:
    """The weights that ``training.initial_weights`` names.

    Attributes:
        folder: as written there.
        pin: first digits of the sha256 of the weights, as written there.
        record: what the folder says of itself.
    """

    folder: str
    pin: str
    record: WeightsRecord

    @classmethod
    def read(cls, initial_weights: str) -> Self:
        """Reads the record of the folder that the parameter names.

        Raises:
            UserError: the folder is missing, none of ours, or damaged.
        """
        folder, _, pin = initial_weights.rpartition("@")
        return cls(folder, pin, WeightsRecord.load(original_path(folder)))

    @property
    def sha256(self) -> str:
        """The checksum of the weights, as the record says."""
        return self.record.files[WEIGHTS_FILE].sha256

    def initial(self, model: ModelConfig, vocab_size: int, kept_tokens: int) -> InitialWeights:
        """What the run configuration says of them.

        Args:
            model: the resolved section of the run.
            vocab_size: of the run.
            kept_tokens: how many token ids, from 0 on, mean the same to both.
        """
        parts = [*new_layers(self.record.model, model), *new_positions(self.record.model, model)]
        parts += new_tokens(model, vocab_size, kept_tokens)
        return InitialWeights(folder=self.folder, sha256=self.sha256, new_parts=tuple(parts))


def new_layers(given: ModelConfig, wanted: ModelConfig) -> list[str]:
    """The layers that the given model does not have: those after its own."""
    return [f"layers.{number}" for number in range(given.num_layers, wanted.num_layers)]


def new_positions(given: ModelConfig, wanted: ModelConfig) -> list[str]:
    """The rows of learned positions that the given model does not have."""
    first, end = given.max_position_embeddings, wanted.max_position_embeddings
    is_longer = wanted.position_embedding == "learned" and end > first
    return [f"{_POSITIONS}[{first}:{end}]"] if is_longer else []


def new_tokens(wanted: ModelConfig, vocab_size: int, kept_tokens: int) -> list[str]:
    """The rows of the vocabulary tables whose tokens the given model does not know."""
    if kept_tokens == vocab_size:
        return []
    tables = [_WORDS] if wanted.tie_embeddings else [_WORDS, _OUTPUT]
    return [f"{table}[{kept_tokens}:{vocab_size}]" for table in tables]


def first_new_row(name: str, new_parts: Sequence[str]) -> int | None:
    """From which row on a parameter is new: 0 where all of it is, None where nothing is."""
    for part in new_parts:
        rows = _ROWS.fullmatch(part)
        if rows is not None and rows["name"] == name:
            return int(rows["first"])
        if name.startswith(f"{part}."):
            return 0
    return None
