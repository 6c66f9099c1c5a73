"""Weights from elsewhere: a Hugging Face folder, a published model, or one of our checkpoints.

Nothing of a source is ever run: tensors are read from safetensors (or from a checkpoint's verified
files), configurations as JSON. Pickles are refused, Python files in the folder are not looked at.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lib.checkpoint import directory as folders
from lib.checkpoint import published
from lib.checkpoint.as_model import is_checkpoint, read_checkpoint_model
from lib.checkpoint.huggingface import from_huggingface
from lib.checkpoint.json_object import read_json_object
from lib.config.initial_weights import WEIGHTS_RECORD
from lib.config.run_config import RunConfig
from lib.config.schema import ModelConfig
from lib.data.tokenizer import (
    INFO_FILE,
    TOKENIZER_FILE,
    fingerprint_of,
    load_tokenizer,
    read_tokenizer_json,
)
from lib.data.vocabulary import tokens_by_id
from lib.errors import UserError

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_VOCABULARY_TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")
# Wider and narrower ones mean numbers that need a scale beside them.
_READABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Source:
    """Weights that were read.

    Attributes:
        description: what they were read from, in a few words.
        tensors: every parameter under its global name, fp32 on the CPU, without padding rows.
        model: the resolved model section.
        tokenizer: the tokenizer.json, if there is one.
        tokenizer_fingerprint: of the tokenizer that numbered the tokens, if it is known.
        end_of_document: the text of the token that ends a document, if it is known.
        padding_rows: rows of the vocabulary tables that no token has, cut off.
    """

    description: str
    tensors: dict[str, Tensor]
    model: ModelConfig
    tokenizer: Path | None = None
    tokenizer_fingerprint: str | None = None
    end_of_document: str | None = None
    padding_rows: int = 0


def read_source(folder: Path, data_tokenizer: Path) -> Source:
    """Reads weights of any of the three kinds.

    Args:
        folder: a Hugging Face folder, ``model/``, or ``state/FINGERPRINT/iter_N``.
        data_tokenizer: the project's tokenizer: that of a checkpoint, which holds none itself, if
            the fingerprints agree.

    Raises:
        UserError: it is none of the three, is damaged, or holds what has no place in our model.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if is_checkpoint(folder):
        found = read_checkpoint_model(folder)
        return _of_ours(f"checkpoint {folder}", found.config, found.tensors, data_tokenizer)
    if (folder / published.RUN_CONFIG).is_file():
        return _of_ours(f"published model {folder}", *published.read_model(folder), folder)
    if (folder / _CONFIG).is_file():
        return _read_huggingface(folder)
    if (folder / WEIGHTS_RECORD).is_file():
        raise UserError(
            f"{folder}: is a weights folder already; name it in training.initial_weights"
        )
    if (folder / folders.POINTER).is_file():
        names = ", ".join(
            folders.iteration_path(folder, n).name for n in folders.iterations(folder)
        )
        raise UserError(f"{folder}: holds several checkpoints; name one of them: {names}")
    raise UserError(
        f"{folder}: holds no {_CONFIG} (a Hugging Face folder), no {published.RUN_CONFIG} (a "
        f"published model) and no {folders.MANIFEST} (a checkpoint, state/FINGERPRINT/iter_N)"
    )


def _of_ours(
    description: str, config: RunConfig, tensors: dict[str, Tensor], tokenizer: Path
) -> Source:
    """Weights that this project trained, with the tokenizer of a folder if it is theirs."""
    source = Source(description, tensors, config.model)
    known = replace(source, tokenizer_fingerprint=config.data.tokenizer_fingerprint)
    return _with_tokenizer(known, tokenizer)


def _with_tokenizer(source: Source, folder: Path) -> Source:
    """Adds the project's kind of tokenizer folder, where it holds the tokenizer of the source."""
    if not (folder / INFO_FILE).is_file():
        return source
    info = load_tokenizer(folder).info
    if info.fingerprint != source.tokenizer_fingerprint:
        return source
    end = info.end_of_document.token
    return replace(source, tokenizer=folder / TOKENIZER_FILE, end_of_document=end)


def _read_huggingface(folder: Path) -> Source:
    """A folder as ``save_pretrained`` of transformers writes it."""
    config = read_json_object(folder / _CONFIG, "fetch it again")
    state: dict[str, Tensor] = {}
    for file, names in _weight_files(folder).items():
        state |= _read_tensors(folder / file, names)
    try:
        tensors, fields = from_huggingface(state, config)
        model = ModelConfig.model_validate(fields)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    except ValidationError as failure:
        first = failure.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(f"{folder / _CONFIG}: gives model.{place}: {first['msg']}") from None
    exact = {name: tensor.float() for name, tensor in tensors.items()}
    source = Source(f"Hugging Face folder {folder}", exact, model)
    path = folder / TOKENIZER_FILE
    return _with_their_tokens(source, path, config) if path.is_file() else source


def _with_their_tokens(source: Source, path: Path, config: Mapping[str, object]) -> Source:
    """Adds a tokenizer.json; rows of the vocabulary tables beyond its tokens are padding."""
    content = read_tokenizer_json(path)[1]
    tokens = tokens_by_id(path)
    ends = config.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    known, rows = max(tokens) + 1, source.tensors[_VOCABULARY_TABLES[0]].shape[0]
    cut = {n: t[:known] if n in _VOCABULARY_TABLES else t for n, t in source.tensors.items()}
    return replace(
        source,
        tensors=cut,
        tokenizer=path,
        tokenizer_fingerprint=fingerprint_of(content),
        end_of_document=tokens.get(end) if isinstance(end, int) else None,
        padding_rows=max(0, rows - known),
    )


def _weight_files(folder: Path) -> dict[str, set[str] | None]:
    """The files of weights and the tensors to take from each; None: all there are."""
    if (folder / published.WEIGHTS).is_file():
        return {published.WEIGHTS: None}
    if (folder / _INDEX).is_file():
        return _shards(folder)
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(found) == 1:
        return {found[0]: None}
    if found:
        raise UserError(
            f"{folder}: has {len(found)} .safetensors files and no {_INDEX} that says which belong "
            "to the model; fetch the index too"
        )
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"{folder / pickles[0]}: is a pickle, which can run any code when it is opened, so it "
            "is never read; convert it where you trust it, with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER), and import "
            "NEW_FOLDER"
        )
    raise UserError(f"{folder}: has a {_CONFIG} but no .safetensors file; fetch the weights too")


def _shards(folder: Path) -> dict[str, set[str] | None]:
    """The files that the index of a split model names, each with its tensors."""
    index = folder / _INDEX
    weight_map = read_json_object(index, "fetch it again").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: has no weight_map of tensors to files; fetch it again")
    shards: dict[str, set[str] | None] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(f"{index}: {tensor} is in {file!r}, which is no file of this folder")
        names = shards.setdefault(file, set())
        assert names is not None
        names.add(tensor)
    return shards


def _read_tensors(path: Path, names: set[str] | None) -> dict[str, Tensor]:
    """The tensors of one file: all, and exactly ``names`` where those are given."""
    remedy = "fetch the file again"
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); {remedy}") from None
    if names is not None and (differing := sorted(names ^ tensors.keys())):
        raise UserError(f"{path}: holds other tensors than {_INDEX} says: {differing[0]}; {remedy}")
    for name, tensor in tensors.items():
        if tensor.dtype not in _READABLE:
            raise UserError(
                f"{path}: {name} is {tensor.dtype}; weights must be fp32, bf16 or fp16, not "
                "quantised: fetch the original model"
            )
    return tensors
