"""The letters in which byte-level tokenizers write bytes, so that a vocabulary is plain text.

The rule is GPT-2's: a byte that is a printable character of Latin-1 other than the space is written
as that character, and the others, in order, as the characters from U+0100.
"""

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))

# The letter of each byte, and back.
_LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + number) for number, byte in enumerate(_OTHERS)
}
_BYTES = {letter: byte for byte, letter in _LETTERS.items()}


def in_byte_alphabet(data: bytes) -> str:
    """Bytes as letters, one for each."""
    return data.decode("latin-1").translate(_LETTERS)


def from_byte_alphabet(token: str) -> bytes | None:
    """The bytes that a token stands for; None if it has a letter that stands for none."""
    try:
        return bytes([_BYTES[letter] for letter in token])
    except KeyError:
        return None
