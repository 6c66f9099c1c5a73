"""What is kept out of a corpus: counted by kind, within the limit that the user set."""

from collections import Counter

from lib.data.options import CorpusOptions
from lib.errors import UserError

EMPTY = "empty"
DUPLICATE = "duplicate"
MALFORMED = "malformed_json"
NOT_AN_OBJECT = "not_an_object"
MISSING_KEY = "missing_key"
NOT_TEXT = "not_text"
BAD_ENCODING = "bad_encoding"
BAD_UNICODE = "bad_unicode"

_EXAMPLES = 5


class WrongRecord(Exception):
    """A record that cannot be used.

    Attributes:
        kind: one of the kinds of this module.
        detail: what is wrong with it.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


def checked_text(value: object, text_key: str) -> str:
    """The value under the text key, if it is a text.

    Raises:
        WrongRecord: if it is no string, or one that UTF-8 cannot write.
    """
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise WrongRecord(NOT_TEXT, f"the value of {text_key!r} is {kind}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise WrongRecord(
            BAD_UNICODE, f"half of a surrogate pair at character {error.start}: no valid Unicode"
        ) from None
    return value


class Rejections:
    """Counts what is kept out of one corpus and applies its ``on_bad_record``.

    Attributes:
        section: the corpus in the parameter file, as messages name it: ``corpora.NAME``.
        counts: how many of each kind, empty documents and duplicates included.
        examples: the first few bad records, each as ``file:line: what is wrong``.
    """

    def __init__(self, section: str, options: CorpusOptions) -> None:
        self.section = section
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []
        self._stop = options.on_bad_record == "stop"
        self._limit = options.max_bad_records
        self._bad = 0

    def count(self, kind: str) -> None:
        """Counts an empty document or a duplicate, which is no fault."""
        self.counts[kind] += 1

    def leave_out(self, kind: str, place: str, detail: str) -> None:
        """Counts a bad record whatever the policy: for a source that the user cannot mend."""
        self.counts[kind] += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{place}: {detail}")

    def reject(self, kind: str, place: str, detail: str) -> None:
        """Counts a bad record.

        Args:
            kind: one of the kinds of this module.
            place: file and physical line, as ``file:line``.
            detail: what is wrong with it.

        Raises:
            UserError: if bad records stop the stage, or this is one too many.
        """
        if self._stop:
            raise UserError(
                f"{place}: {detail}; mend that record, or set {self.section}.on_bad_record "
                "to skip so that such records are left out and counted"
            )
        self.leave_out(kind, place, detail)
        self._bad += 1
        if self._bad > self._limit:
            raise UserError(
                f"more than {self._limit} bad records ({self.section}.max_bad_records); "
                f"the first: {' | '.join(self.examples)}; mend the corpus, or raise "
                f"{self.section}.max_bad_records if so many may be left out"
            )
