"""Pictures of a simulated pipeline step, for a terminal and as a self-contained SVG file.

A row is a stage and time runs to the right. ``F3`` is the forward of micro batch 3 and ``B3`` its
backward; with several chunks per stage ``F3.1`` is that of chunk 1.
"""

from lib.pipeline.schedule import Action, Kind
from lib.pipeline.simulate import Span, Timeline

_BANDS = 4  # rows of a wide text picture before it is cut
_FILL = {Kind.FORWARD: "-", Kind.BACKWARD: "="}
_COLORS = {Kind.FORWARD: (60, 120, 200), Kind.BACKWARD: (50, 150, 90)}
_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}
_ROW, _GAP, _LEFT, _TOP = 24, 6, 64, 64  # pixels
_CHARACTER = 7.0  # width of one at the font size below, pixels
_FONT = "font-family='monospace' font-size='11'"


def as_text(timeline: Timeline, width: int) -> str:
    """Draws a timeline with characters: ``-`` forward, ``=`` backward, ``.`` idle.

    Args:
        timeline: what to draw, with at least one action.
        width: columns of the terminal. A longer picture goes on below, and is cut after four rows.
    """
    scale = _characters_per_time(timeline)
    columns = round(timeline.makespan * scale)
    heads = [f"stage {stage} " for stage in range(len(timeline.stages))]
    indent = max(len(head) for head in heads)
    rows = [_text_row(timeline, stage, columns) for stage in range(len(heads))]
    band = max(20, width - indent)
    text = "\n\n".join(
        "\n".join(
            head.ljust(indent) + row[start : start + band]
            for head, row in zip(heads, rows, strict=True)
        )
        for start in range(0, min(columns, band * _BANDS), band)
    )
    hidden = columns - band * _BANDS
    return f"{text}\n({hidden:,} more columns are cut off)" if hidden > 0 else text


def as_svg(timeline: Timeline, title: str) -> str:
    """Draws a timeline as SVG text that needs nothing else.

    Args:
        timeline: what to draw, with at least one action.
        title: a line above the picture, without characters that XML gives a meaning to.
    """
    chunks = _count_chunks(timeline)
    scale = _characters_per_time(timeline) * _CHARACTER
    end = timeline.makespan * scale
    width = round(_LEFT + max(end, len(title) * _CHARACTER, 2 * chunks * 110)) + 16
    height = _TOP + len(timeline.stages) * (_ROW + _GAP) + 10
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' {_FONT}>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        f"<text x='{_LEFT}' y='20'>{title}</text>",
        *_legend(chunks),
    ]
    for stage, spans in enumerate(timeline.stages):
        top = _TOP + stage * (_ROW + _GAP)
        lines += [
            f"<text x='4' y='{top + 16}'>stage {stage}</text>",
            f"<rect x='{_LEFT}' y='{top}' width='{end:.1f}' height='{_ROW}' fill='#eeeeee'/>",
        ]
        lines += [_svg_span(span, scale, top, chunks) for span in spans]
    return "\n".join([*lines, "</svg>", ""])


def _text_row(timeline: Timeline, stage: int, columns: int) -> str:
    scale, chunks = _characters_per_time(timeline), _count_chunks(timeline)
    row = ["."] * columns
    for span in timeline.stages[stage]:
        start, end = round(span.start * scale), round(span.end * scale)
        row[start:end] = _label(span.action, chunks).ljust(end - start, _FILL[span.action.kind])
    return "".join(row)


def _svg_span(span: Span, scale: float, top: int, chunks: int) -> str:
    left, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    color = _color(span.action.kind, span.action.chunk, chunks)
    label = _label(span.action, chunks)
    return (
        f"<g><title>{label}: {span.start:g} to {span.end:g}</title>"
        f"<rect x='{left:.1f}' y='{top}' width='{width:.1f}' height='{_ROW}' fill='{color}' "
        f"stroke='white'/><text x='{left + 3:.1f}' y='{top + 16}'>{label}</text></g>"
    )


def _legend(chunks: int) -> list[str]:
    lines: list[str] = []
    for place, (kind, chunk) in enumerate((k, c) for c in range(chunks) for k in Kind):
        left = _LEFT + place * 110
        name = _NAMES[kind] + (f" .{chunk}" if chunks > 1 else "")
        color = _color(kind, chunk, chunks)
        lines.append(f"<rect x='{left}' y='34' width='14' height='14' fill='{color}'/>")
        lines.append(f"<text x='{left + 20}' y='45'>{name}</text>")
    return lines


def _color(kind: Kind, chunk: int, chunks: int) -> str:
    """The kind's color, lighter for later chunks; light enough throughout for black letters."""
    white = 0.35 + 0.45 * chunk / chunks
    return "#" + "".join(f"{round(c + (255 - c) * white):02x}" for c in _COLORS[kind])


def _label(action: Action, chunks: int) -> str:
    return str(action) if chunks > 1 else f"{action.kind.value}{action.micro_batch}"


def _count_chunks(timeline: Timeline) -> int:
    return 1 + max(span.action.chunk for spans in timeline.stages for span in spans)


def _characters_per_time(timeline: Timeline) -> float:
    """So many that the longest label and a space fit the shortest action."""
    chunks = _count_chunks(timeline)
    spans = [span for spans in timeline.stages for span in spans]
    longest = max(len(_label(span.action, chunks)) for span in spans)
    return (longest + 1) / min(span.end - span.start for span in spans)
