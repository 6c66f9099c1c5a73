"""Pictures of how long the documents of a corpus are: bars of text, or SVG."""

from lib.data.corpus_summary import LengthHistogram

_COLOR, _TOKENS_COLOR = "#7896c8", "#d6b36a"
_ROW, _LEFT, _TOP, _WIDTH = 20, 180, 64, 480  # pixels
_FONT = "font-family='monospace' font-size='11'"


def as_text(lengths: LengthHistogram, width: int) -> str:
    """One line for each bin: lengths, documents, a bar of their share, their share of all tokens.

    Args:
        lengths: what to draw, with at least one document.
        width: columns of the terminal.
    """
    rows = _rows(lengths)
    head = max(len(name) for name, _, _, _ in rows)
    count = max(len(f"{documents:,}") for _, documents, _, _ in rows)
    most = max(share for _, _, share, _ in rows)
    room = max(10, width - head - count - 38)
    lines = [f"{'tokens':>{head}}  {'documents':>{count + 8}}"]
    for name, documents, share, of_tokens in rows:
        bar = "#" * round(room * share / most)
        left = f"{name:>{head}}  {documents:>{count},} {share:7.2%} "
        lines.append(f"{left}{bar:<{room}} {of_tokens:7.2%} of the tokens")
    return "\n".join(lines)


def as_svg(lengths: LengthHistogram, title: str) -> str:
    """Two bars for each bin, as SVG text that needs nothing else: share of documents, of tokens.

    Args:
        lengths: what to draw, with at least one document.
        title: a line above the picture, without characters that XML gives a meaning to.
    """
    rows = _rows(lengths)
    most = max(max(share, of_tokens) for _, _, share, of_tokens in rows)
    height = _TOP + len(rows) * _ROW + 10
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{_LEFT + _WIDTH + 140}' "
        f"height='{height}' {_FONT}>",
        f"<rect width='100%' height='{height}' fill='white'/>",
        f"<text x='8' y='20'>{title}</text>",
        f"<text x='{_LEFT}' y='45' fill='{_COLOR}'>share of documents</text>",
        f"<text x='{_LEFT + 160}' y='45' fill='{_TOKENS_COLOR}'>share of tokens</text>",
    ]
    for number, (name, documents, share, of_tokens) in enumerate(rows):
        top = _TOP + number * _ROW
        shares = f"{share:.2%}, {of_tokens:.2%}"
        lines += [
            f"<g><title>{name} tokens: {documents:,} documents</title>",
            f"<text x='8' y='{top + 12}'>{name}</text>",
            _bar(top, _WIDTH * share / most, _COLOR),
            _bar(top + 8, _WIDTH * of_tokens / most, _TOKENS_COLOR),
            f"<text x='{_LEFT + _WIDTH + 8}' y='{top + 12}'>{shares}</text></g>",
        ]
    return "\n".join([*lines, "</svg>", ""])


def _bar(top: int, width: float, color: str) -> str:
    return f"<rect x='{_LEFT}' y='{top}' width='{width:.1f}' height='8' fill='{color}'/>"


def _rows(lengths: LengthHistogram) -> list[tuple[str, int, float, float]]:
    """For each bin its name, documents, their share, and the share of their tokens."""
    bins = lengths.bins()
    documents = sum(count for _, _, count, _ in bins)
    tokens = max(1, sum(count for _, _, _, count in bins))
    return [
        (
            f"{first:,}" if first == last else f"{first:,} to {last:,}",
            count,
            count / documents,
            of_tokens / tokens,
        )
        for first, last, count, of_tokens in bins
    ]
