"""Trains a byte-level BPE: every text can be encoded, and decoding gives it back exactly."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from lib.errors import UserError

# The trainer gathers 256 texts before it counts words, so texts are handed over in pieces of at
# most so many characters: 256 whole documents could take any amount of memory.
_PIECE = 1 << 16


class TrainingText(NamedTuple):
    """A corpus to train on.

    Attributes:
        texts: its documents, in random order.
        text_bytes: UTF-8 bytes of all of them.
    """

    texts: Iterable[str]
    text_bytes: int


def in_turn(corpora: Sequence[TrainingText]) -> Iterator[str]:
    """The texts of all corpora, mixed so that any beginning has each by its share of all text.

    The next text is always of the corpus of which the smallest part was read, the first among
    equals: exact arithmetic, so the same corpora give the same order.
    """
    waiting = [iter(corpus.texts) for corpus in corpora]
    taken = [0] * len(corpora)
    left = list(range(len(corpora)))
    while left:
        number = min(left, key=lambda n: Fraction(taken[n], corpora[n].text_bytes))
        text = next(waiting[number], None)
        if text is None:
            left.remove(number)
        else:
            yield text
            taken[number] += len(text.encode())


def train_byte_level_bpe(
    texts: Iterable[str],
    vocab_size: int,
    end_of_document: str,
    max_bytes: int,
    advance: Callable[[int], None],
) -> Tokenizer:
    """Trains on the start of some texts.

    The result depends on the texts alone: the library counts words in parallel, but merges by
    count and, among equals, by the ids of the pair.

    Args:
        texts: the documents; no more of them is read than needed.
        vocab_size: entries of the vocabulary. ``end_of_document`` is id 0, then come the 256 bytes.
        end_of_document: the control token that ends a document.
        max_bytes: UTF-8 bytes of text to train on, at most.
        advance: told the bytes taken in.

    Raises:
        UserError: when the texts are too few for a vocabulary of that size.
    """
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_of_document],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_training_pieces(texts, max_bytes, advance), trainer)
    found = backend.get_vocab_size()
    if found != vocab_size:
        remedy = (
            f"set tokenizer.vocab_size to at most {found}, or use a larger corpus"
            if found < vocab_size
            else f"set tokenizer.vocab_size to at least {found}"
        )
        raise UserError(
            f"tokenizer.vocab_size = {vocab_size}: the text trained on gives a vocabulary of "
            f"{found}; {remedy}"
        )
    return backend


def _training_pieces(
    texts: Iterable[str], max_bytes: int, advance: Callable[[int], None]
) -> Iterator[str]:
    left = max_bytes
    for text in texts:
        for piece in _cut_at_lines(text):
            data = piece.encode()
            if len(data) > left:
                piece = data[:left].decode(errors="ignore")
            if piece:
                yield piece
            taken = min(len(data), left)
            left -= taken
            advance(taken)
            if left == 0:
                return


def _cut_at_lines(text: str) -> Iterator[str]:
    """Pieces of at most ``_PIECE`` characters, cut after a line where there is one."""
    start = 0
    while len(text) - start > _PIECE:
        end = text.rfind("\n", start, start + _PIECE) + 1
        end = end if end > start else start + _PIECE
        yield text[start:end]
        start = end
    yield text[start:]
