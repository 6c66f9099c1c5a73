"""Long texts to ids piece by piece: time by their size, memory for their ids and little more.

A piece ends where the tokenizer's pattern ends a word anyway (see ``split_pattern``), so the ids
are those of the whole text. Where no word ends for long (a genome, a drawing of dashes, a page of
spaces) the word itself is encoded in chunks. That rests on a property of BPE: tokens t1 ... tn are
the encoding of their text if each two neighbours are the encoding of theirs. For suppose that a
merge crosses the border of two of them, and take the first that does. Until then every token's
bytes have been merged as they are without the others, since merges are taken by rank and then from
left to right, and leaving some of them out does not change the order of the rest. So the same merge
would be the next one in the text of these two tokens alone, and their encoding would be another.
"""

from array import array
from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.models import BPE

from lib.data.byte_alphabet import in_byte_alphabet
from lib.data.split_pattern import MARKED_WORDS, SPACE_MARK, WordPlaces

# Characters of a piece. In one go a text of 20 MB takes 2.7 GB in the tokenizers library, and a
# run of a million spaces is more than tiktoken's engine takes.
PIECE = 1 << 17
# Bytes of a word that are encoded at once, and tokens at the end of such a chunk that are left for
# the next one, since what follows often changes them.
_CHUNK = 1 << 14
_UNSURE = 8

Ids = npt.NDArray[np.int32]


class LongTexts:
    """Encodes texts of any length with an encoder for short ones."""

    def __init__(self, places: WordPlaces, model: BPE | None, short: Callable[[str], Ids]) -> None:
        """Takes where words end, the merges, and what encodes a few times ``PIECE`` characters.

        Without merges (those of a byte-level tokenizer) a long word is encoded at once.
        """
        self._places = places
        self._model = model
        self._short = short

    def encode(self, text: str) -> Ids:
        """The ids of a text."""
        parts: list[Ids] = []
        start = 0
        while start < len(text):
            end = self._end_of_piece(text, start)
            piece = text[start:end]
            if self._model is None or len(piece) <= 2 * PIECE:
                parts.append(self._short(piece))
            else:
                parts.append(_word(self._model, piece))
            start = end
        return np.concatenate(parts)

    def _end_of_piece(self, text: str, start: int) -> int:
        """Where to end the piece that begins at ``start``.

        At most two pieces' length away, unless a single word is longer.
        """
        if len(text) - start <= PIECE:
            return len(text)
        cut = self._places.cut.search(text, start + PIECE, start + 2 * PIECE)
        if cut:
            return cut.start()
        end = start
        for word in self._places.words.finditer(text, start):
            if end > start and word.end() > start + PIECE:
                return end
            # White space is cut in view of what follows it. Where nothing follows, it is one word.
            joins = word[0].isspace() and text[word.start() - 1].isspace()
            if word.start() == start or not joins:
                end = word.end()
        return len(text)


def _word(model: BPE, word: str) -> Ids:
    """The ids of one word of a byte-level tokenizer, chunk by chunk."""
    data = word.encode()
    ids = array("i")
    start = end = 0
    while end < len(data):
        end = min(end + _CHUNK, len(data))
        chunk = _merge(model, in_byte_alphabet(data[start:end]))
        while ids and not _adjoin(model, ids[-1], chunk[0]):
            start -= len(_letters(model, ids.pop()))
            chunk = _merge(model, in_byte_alphabet(data[start:end]))
        kept = chunk if end == len(data) else chunk[:-_UNSURE]
        ids.extend(kept)
        start += sum(len(_letters(model, number)) for number in kept)
    return np.array(ids, dtype=np.int32)


def _adjoin(model: BPE, left: int, right: int) -> bool:
    """Whether two tokens stay as they are when they stand side by side."""
    return _merge(model, _letters(model, left) + _letters(model, right)) == [left, right]


def _merge(model: BPE, text: str) -> list[int]:
    return [token.id for token in model.tokenize(text)]


def _letters(model: BPE, number: int) -> str:
    """A token in the byte alphabet: one letter for each byte."""
    return model.id_to_token(number) or ""


class MarkedTexts:
    """Encodes long texts for the tokenizers that ``sentencepiece_model`` makes.

    Their normalizer comes before the cutting into words and puts a mark before each text it gets,
    so it is done here, once for the whole text.
    """

    def __init__(self, backend: Tokenizer, before: str) -> None:
        """Takes the tokenizer, and what it puts before a text."""
        self._backend = backend
        self._before = before

    def encode(self, text: str) -> Ids:
        """The ids of a text."""
        return self._long.encode(self._before + text.replace(" ", SPACE_MARK))

    @cached_property
    def _long(self) -> LongTexts:
        bare = Tokenizer.from_str(self._backend.to_str())
        bare.normalizer = None
        bare.encode_special_tokens = True

        def short(text: str) -> Ids:
            (encoding,) = bare.encode_batch_fast([text], add_special_tokens=False)
            return np.asarray(encoding.ids, dtype=np.int32)

        return LongTexts(MARKED_WORDS, None, short)
