"""Reads a SentencePiece ``.model`` and turns it into a tokenizer of the ``tokenizers`` library.

A ``.model`` is a protocol buffer; the handful of fields that matter here are read directly, so
that nobody needs the ``sentencepiece`` package to use one.

SentencePiece's BPE joins, again and again, the two neighbours whose joint piece has the highest
score. ``tokenizers`` joins the pair that comes first in a list of merges. So the list is: every
way to split a piece into two pieces, ordered by the score of the whole. The id of a piece says
nothing about when it is joined: pieces may be numbered in another order.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from lib.data.split_pattern import MARKED_WORDS, SPACE_MARK
from lib.errors import UserError

_BPE_MODEL = 2
_UNIGRAM_MODEL = 1
_MODEL_NAMES = {_UNIGRAM_MODEL: "unigram", _BPE_MODEL: "bpe", 3: "word", 4: "char"}


class PieceType(IntEnum):
    """What a piece is, with the numbers of the format."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Piece:
    """One entry of the vocabulary."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The parts of a ``.model`` that decide how text is cut."""

    pieces: tuple[Piece, ...]
    model_type: int
    byte_fallback: bool
    space_as_suffix: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Reads a ``.model``.

    Raises:
        UserError: when the file is missing or is no SentencePiece model.
    """
    try:
        model = _parse_model(path.read_bytes())
    except (OSError, ValueError, IndexError, struct.error) as error:
        raise UserError(f"{path}: cannot be read as a SentencePiece .model: {error}") from None
    if not model.pieces:
        raise UserError(f"{path}: cannot be read as a SentencePiece .model: it has no pieces")
    return model


def to_tokenizer(model: SentencePieceModel, where: str) -> Tokenizer:
    """The tokenizer that cuts text as SentencePiece does.

    Control pieces, and user-defined ones in brackets such as ``[REF]``, become control tokens:
    text never gives them.

    Args:
        model: the model.
        where: its file, for errors.

    Raises:
        UserError: for a model that cannot be converted exactly, or that would lose text.
    """
    _check_convertible(model, where)
    ids = {piece.text: number for number, piece in enumerate(model.pieces)}
    unknown = next((p.text for p in model.pieces if p.type == PieceType.UNKNOWN), None)
    backend = Tokenizer(
        BPE(ids, _merges(model), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = []
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE_MARK))
    steps.append(normalizers.Replace(" ", SPACE_MARK))
    backend.normalizer = normalizers.Sequence(steps)
    if not any(_joins_across_space(piece) for piece in model.pieces):
        # No piece holds a space after something else, so nothing is ever joined across such a
        # place: cutting there changes no id, and words instead of whole texts hit the cache.
        words = Regex(MARKED_WORDS.words.pattern)
        backend.pre_tokenizer = pre_tokenizers.Split(words, behavior="isolated")
    backend.decoder = _decoder(model)
    controls = (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.USER_DEFINED)
    backend.add_special_tokens(
        [
            AddedToken(piece.text, special=True, normalized=False)
            for piece in model.pieces
            if piece.type in controls
        ]
    )
    return backend


def _decoder(model: SentencePieceModel) -> decoders.Decoder:
    steps: list[Any] = [
        decoders.Replace(SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if model.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def _check_convertible(model: SentencePieceModel, where: str) -> None:
    remedy = "use a BPE model with byte fallback, or give the tokenizer as tokenizer.json"
    if model.model_type != _BPE_MODEL:
        name = _MODEL_NAMES.get(model.model_type, str(model.model_type))
        raise UserError(f"{where}: is a SentencePiece {name} model, not bpe; {remedy}")
    if not model.byte_fallback:
        raise UserError(
            f"{where}: has no byte fallback, so characters outside its vocabulary would be lost; "
            f"{remedy}"
        )
    odd = {
        "a normalization of its own": bool(model.charsmap),
        "remove_extra_whitespaces": model.remove_extra_whitespaces,
        "treat_whitespace_as_suffix": model.space_as_suffix,
        "no escape_whitespaces": not model.escape_whitespaces,
        "unused pieces": any(piece.type == PieceType.UNUSED for piece in model.pieces),
        "user-defined pieces of ordinary text": any(
            piece.type == PieceType.USER_DEFINED and not _in_brackets(piece.text)
            for piece in model.pieces
        ),
    }
    found = [name for name, present in odd.items() if present]
    if found:
        raise UserError(
            f"{where}: has {', '.join(found)}, which cannot be converted exactly; "
            "give the tokenizer as tokenizer.json instead"
        )


def _in_brackets(text: str) -> bool:
    return (text[:1], text[-1:]) in {("[", "]"), ("<", ">")}


def _joins_across_space(piece: Piece) -> bool:
    return piece.type == PieceType.NORMAL and SPACE_MARK in piece.text.lstrip(SPACE_MARK)


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """All splits of all normal pieces into two such pieces, highest score first."""
    normal = {piece.text for piece in model.pieces if piece.type == PieceType.NORMAL}
    # sorted() keeps the order of equals: pieces of one score stay in the order of their ids, and
    # splits of one piece in the order of the cut.
    ordered = sorted(
        (piece for piece in model.pieces if piece.type == PieceType.NORMAL),
        key=lambda piece: -piece.score,
    )
    return [
        (piece.text[:cut], piece.text[cut:])
        for piece in ordered
        for cut in range(1, len(piece.text))
        if piece.text[:cut] in normal and piece.text[cut:] in normal
    ]


def _parse_model(data: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(data):
        if field == 1:
            pieces.append(_parse_piece(value))
        elif field == 2:
            trainer = dict(_fields(value))
        elif field == 3:
            normalizer = dict(_fields(value))
    return SentencePieceModel(
        pieces=tuple(pieces),
        model_type=trainer.get(3, _UNIGRAM_MODEL),
        byte_fallback=bool(trainer.get(35, 0)),
        space_as_suffix=bool(trainer.get(24, 0)),
        charsmap=normalizer.get(2, b""),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        escape_whitespaces=bool(normalizer.get(5, 1)),
    )


def _parse_piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return Piece(fields.get(1, b"").decode(), score, fields.get(3, PieceType.NORMAL))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protocol buffer message: numbers as int, the rest as bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield field, value
            continue
        if wire == 2:
            size, position = _varint(data, position)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire}")
        if position + size > len(data):
            raise ValueError("the file ends in the middle of a field")
        yield field, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
