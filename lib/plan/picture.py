"""A picture of the plan: what fills the memory of a rank of each pipeline stage, as SVG."""

from collections.abc import Sequence

from lib.plan.memory import GIB, StageMemory

_COLORS = {
    "weights": "#6699cc",
    "gradients": "#99c2a2",
    "optimizer": "#c9b26b",
    "activations": "#cc8888",
    "logits": "#a88bc4",
    "buffers": "#bbbbbb",
}
_ROW, _GAP, _LEFT, _TOP, _WIDTH = 26, 8, 72, 72, 720  # pixels
_CHARACTER = 7.0
_FONT = "font-family='monospace' font-size='11'"


def as_svg(memories: Sequence[StageMemory], limit: float, title: str) -> str:
    """Draws a bar per stage, and a line at what a GPU has.

    Args:
        memories: of all stages.
        limit: bytes of a GPU; 0 draws no line.
        title: a line above, without characters that XML gives a meaning to.
    """
    longest = max([limit, *(each.kinds.total for each in memories)])
    scale = _WIDTH / longest
    height = _TOP + len(memories) * (_ROW + _GAP) + 24
    width = round(_LEFT + max(_WIDTH, len(title) * _CHARACTER)) + 110
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' {_FONT}>",
        f"<rect width='{width}' height='{height}' fill='white'/>",
        f"<text x='{_LEFT}' y='20'>{title}</text>",
    ]
    for place, (kind, color) in enumerate(_COLORS.items()):
        left = _LEFT + place * 110
        lines.append(f"<rect x='{left}' y='34' width='14' height='14' fill='{color}'/>")
        lines.append(f"<text x='{left + 20}' y='45'>{kind}</text>")
    for place, memory in enumerate(memories):
        lines += _bar(memory, _TOP + place * (_ROW + _GAP), scale)
    if limit:
        x, foot = _LEFT + limit * scale, height - 20
        lines.append(f"<path d='M{x:.1f} {_TOP - 6}V{foot}' stroke='#b00000' stroke-width='2'/>")
        lines.append(f"<text x='{x - 60:.1f}' y='{foot + 14}'>{limit / GIB:.1f} GiB</text>")
    return "\n".join([*lines, "</svg>", ""])


def _bar(memory: StageMemory, top: int, scale: float) -> list[str]:
    lines = [f"<text x='4' y='{top + 17}'>stage {memory.stage}</text>"]
    left = float(_LEFT)
    for kind, size in memory.kinds.by_name().items():
        wide = size * scale
        lines.append(
            f"<g><title>{kind}: {size / GIB:.2f} GiB</title><rect x='{left:.1f}' y='{top}' "
            f"width='{wide:.1f}' height='{_ROW}' fill='{_COLORS[kind]}' stroke='white'/></g>"
        )
        left += wide
    text = f"{memory.kinds.total / GIB:.1f} GiB, {memory.moment}"
    return [*lines, f"<text x='{left + 6:.1f}' y='{top + 17}'>{text}</text>"]
