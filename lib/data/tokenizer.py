"""Text to token ids and back, with a tokenizer that the project keeps as two files.

``tokenizer.json`` is the format of the ``tokenizers`` library; ``tokenizer_info.json`` says what
the rest of the pipeline needs to know of it. Text never turns into control tokens: a document
that spells out ``<|endoftext|>`` gets ordinary tokens, and only the pipeline itself ends a
document.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError
from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.models import BPE

from lib.atomic import atomic_directory, write_text_atomically
from lib.data.long_texts import PIECE, LongTexts, MarkedTexts
from lib.data.split_pattern import SPACE_MARK, mark_before_text, spelt_out, split_pattern_of
from lib.data.tiktoken_encoding import TiktokenEncoding, exact_tiktoken
from lib.errors import UserError

TOKENIZER_FILE = "tokenizer.json"
INFO_FILE = "tokenizer_info.json"

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class EndOfDocument(BaseModel):
    """The token that ends a document."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str
    """Its text, such as ``<|endoftext|>``."""

    id: int
    """Its number."""


class TokenizerInfo(BaseModel):
    """What ``tokenizer_info.json`` holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    """Version of this file's layout."""

    kind: str
    """Where the tokenizer came from: train_bpe, tokenizer_json, gpt2 or sentencepiece."""

    vocab_size: int
    """Ids run from 0 to vocab_size - 1."""

    end_of_document: EndOfDocument
    """The token that ends a document."""

    special_tokens: dict[str, int]
    """Control tokens, the end of document among them: text never produces them."""

    fingerprint: str
    """sha256 of tokenizer.json in canonical form, so that spacing does not count."""


@dataclass(frozen=True)
class _Encoders:
    """How a tokenizer encodes.

    Attributes:
        tiktoken: the same in tiktoken, where that gives the same ids.
        long: what encodes long texts piece by piece, where words end at known places.
    """

    tiktoken: TiktokenEncoding | None = None
    long: LongTexts | MarkedTexts | None = None


class TextTokenizer:
    """A tokenizer with its facts at hand.

    Attributes:
        info: what is known of it.
        backend: the tokenizer of the ``tokenizers`` library.
    """

    def __init__(self, backend: Tokenizer, info: TokenizerInfo) -> None:
        # Not stored in tokenizer.json: without it a document that spells out a control token
        # would get that token.
        backend.encode_special_tokens = True
        self.backend = backend
        self.info = info

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to vocab_size - 1."""
        return self.info.vocab_size

    @property
    def eod_id(self) -> int:
        """The id of the end-of-document token."""
        return self.info.end_of_document.id

    @property
    def fingerprint(self) -> str:
        """sha256 of the tokenizer in canonical form."""
        return self.info.fingerprint

    def encode(self, text: str) -> list[int]:
        """The ids of a text, no control token among them."""
        return next(self.encode_many([text])).tolist()

    def encode_many(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.int32]]:
        """The ids of each text, in order.

        By tiktoken where that gives the same ids, and else by the library, which takes all short
        texts in one call.
        """
        long = self._encoders.long
        encoded = self._encode_short([t for t in texts if long is None or len(t) <= PIECE])
        for text in texts:
            yield next(encoded) if long is None or len(text) <= PIECE else long.encode(text)

    @property
    def library(self) -> str:
        """The library that encodes: tiktoken or tokenizers."""
        return "tiktoken" if self._encoders.tiktoken else "tokenizers"

    @cached_property
    def _encoders(self) -> _Encoders:
        """Made when first asked for: who only needs the facts need not wait a second for them."""
        content = _as_json(self.backend)
        before, pattern = mark_before_text(content), split_pattern_of(content)
        if before is not None:
            return _Encoders(long=MarkedTexts(self.backend, before))
        if pattern is None or not isinstance(self.backend.model, BPE):
            return _Encoders()
        split = spelt_out(pattern)
        tiktoken = exact_tiktoken(self.backend, content, split)
        return _Encoders(tiktoken, LongTexts(split, self.backend.model, self._encode_one))

    def _encode_one(self, text: str) -> npt.NDArray[np.int32]:
        return next(self._encode_short([text]))

    def _encode_short(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.int32]]:
        if self._encoders.tiktoken:
            return map(self._encoders.tiktoken.encode, texts)
        return map(_ids, self.backend.encode_batch_fast(texts, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; control tokens stand for no text."""
        return self.backend.decode(ids, skip_special_tokens=True)


def describe_tokenizer(backend: Tokenizer, kind: str, end_of_document: str) -> TokenizerInfo:
    """Collects the facts of a tokenizer.

    Raises:
        UserError: when ``end_of_document`` is no token of it, or text produces a control token.
    """
    eod_id = backend.token_to_id(end_of_document)
    special = _special_tokens(backend)
    if eod_id is None:
        names = ", ".join(repr(token) for token in special) or "none"
        raise UserError(
            f"tokenizer.end_of_document = {end_of_document!r}: the tokenizer has no such token; "
            f"its special tokens are: {names}; name the one that ends a document"
        )
    backend.encode_special_tokens = True
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    if end_of_document not in added:
        _refuse_ordinary(backend, end_of_document, eod_id)
    if end_of_document not in special:
        backend.add_special_tokens([AddedToken(end_of_document, special=True, normalized=False)])
        special = _special_tokens(backend)
    _refuse_ordinary(backend, end_of_document, eod_id)
    _refuse_controls_in_text(backend, special)
    return TokenizerInfo(
        kind=kind,
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
        end_of_document=EndOfDocument(token=end_of_document, id=eod_id),
        special_tokens=special,
        fingerprint=fingerprint_of(_as_json(backend)),
    )


def _refuse_ordinary(backend: Tokenizer, end_of_document: str, eod_id: int) -> None:
    if eod_id in backend.encode(end_of_document, add_special_tokens=False).ids:
        raise UserError(
            f"tokenizer.end_of_document = {end_of_document!r}: ordinary text gives this token, so "
            "it cannot mark the end of a document; name a special token of the tokenizer"
        )


def _refuse_controls_in_text(backend: Tokenizer, special: dict[str, int]) -> None:
    """The other control tokens; the one for what is unknown may come from text."""
    unknown = _as_json(backend)["model"].get("unk_token")
    for token, number in special.items():
        if token != unknown and number in backend.encode(token, add_special_tokens=False).ids:
            raise UserError(
                f"the tokenizer's special token {token!r} is what ordinary text with these letters "
                "becomes, so that text could pass for control; take it out of its vocabulary or "
                "its added tokens"
            )


def save_tokenizer(folder: Path, tokenizer: TextTokenizer) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_info.json``, both or neither."""
    with atomic_directory(folder) as partial:
        write_text_atomically(partial / TOKENIZER_FILE, tokenizer.backend.to_str(pretty=True))
        text = json.dumps(tokenizer.info.model_dump(), indent=2, ensure_ascii=True) + "\n"
        write_text_atomically(partial / INFO_FILE, text)


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Opens the tokenizer of a folder (``data/tokenizer`` or a ``model``).

    Raises:
        UserError: when a file is missing or damaged, or the two do not belong together.
    """
    for name in (TOKENIZER_FILE, INFO_FILE):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: not there; the prepare_tokenizer stage writes it")
    info_text = (folder / INFO_FILE).read_text(encoding="utf-8")
    try:
        info = TokenizerInfo.model_validate_json(info_text)
    except ValidationError as error:
        raise UserError(f"{folder / INFO_FILE}: damaged, run prepare_tokenizer: {error}") from None
    backend, content = read_tokenizer_json(folder / TOKENIZER_FILE)
    if fingerprint_of(content) != info.fingerprint:
        raise UserError(
            f"{folder / TOKENIZER_FILE}: is not the tokenizer that {INFO_FILE} describes; "
            "run prepare_tokenizer again, so that both are written together"
        )
    return TextTokenizer(backend, info)


def read_tokenizer_json(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Reads a tokenizer.json: the tokenizer and the file's content.

    Raises:
        UserError: when it is missing or no tokenizer.json.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a tokenizer.json: {error}") from None
    return parse_tokenizer_json(text, str(path)), json.loads(text)


def parse_tokenizer_json(text: str, where: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json's text; ``where`` names its file in the error."""
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{where}: is no tokenizer.json: {error}") from None


def fingerprint_of(content: dict[str, Any]) -> str:
    """sha256 of a tokenizer.json's content in canonical form: sorted keys, no spaces, ASCII."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def token_byte_lengths(tokenizer: TextTokenizer) -> npt.NDArray[np.int32]:
    """The UTF-8 bytes that each id stands for: what turns a loss per token into one per byte.

    0 for control tokens (and for ids that no token has). For a byte-level BPE, as trained here or
    GPT-2's, the sum over a text's ids is the text's size, exactly. For a SentencePiece model a
    space is one byte and a byte token is one; the space that SentencePiece puts before every text
    counts too, so the sum is the text's size plus 1. For any other kind it is the size of the
    token's own text, which leaves out the white space that such tokenizers drop.
    """
    content = _as_json(tokenizer.backend)
    count = len if _has_byte_level(content) else _bytes_of_piece
    lengths = np.zeros(tokenizer.vocab_size, dtype=np.int32)
    for token, number in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        lengths[number] = count(token)
    for number, added in tokenizer.backend.get_added_tokens_decoder().items():
        # Added tokens are written as they are, whatever the other tokens' spelling.
        lengths[number] = 0 if added.special else len(added.content.encode())
    return lengths


def _ids(encoding: Encoding) -> npt.NDArray[np.int32]:
    return np.asarray(encoding.ids, dtype=np.int32)


def _bytes_of_piece(token: str) -> int:
    if _BYTE_TOKEN.fullmatch(token):
        return 1
    return len(token.replace(SPACE_MARK, " ").encode())


def _special_tokens(backend: Tokenizer) -> dict[str, int]:
    added = backend.get_added_tokens_decoder()
    return {token.content: number for number, token in sorted(added.items()) if token.special}


def _as_json(backend: Tokenizer) -> dict[str, Any]:
    return json.loads(backend.to_str())


def _components(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder as the list of its steps."""
    if part is None:
        return []
    return part[inner] if part["type"] == "Sequence" else [part]


def _has_byte_level(content: dict[str, Any]) -> bool:
    steps = _components(content["pre_tokenizer"], "pretokenizers")
    steps += _components(content["decoder"], "decoders")
    return any(step["type"] == "ByteLevel" for step in steps)
