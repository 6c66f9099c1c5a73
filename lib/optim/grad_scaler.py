"""The loss scale: what keeps small fp16 gradients from being rounded to zero.

The loss is multiplied by the scale before the backward pass and the gradients are divided by it
afterwards. A step whose gradients overflowed is skipped. The dynamic scale is Megatron's
(megatron/core/optimizer/grad_scaler.py):

    overflow:   good = 0; left -= 1; if left <= 0: scale = max(scale / 2, min_scale)
    good step:  good += 1; if good == window: good = 0; left = hysteresis; scale *= 2

``left`` is filled up by growth alone, not by a good step: once the hysteresis is used up, every
overflow halves the scale until the next growth. Whether a step overflowed is read off the global
gradient norm, which is the same number on all ranks, and so is the scale.

A scale that can fall no further and overflows step after step trains nothing, so after
``STUCK_STEPS`` of them in a row ``stop_advice`` says that the run must end, and what to change.
"""

from dataclasses import dataclass

STUCK_STEPS = 10

State = dict[str, float | int | str]


class LossScale:
    """No scale, for number types that need none: a constant 1, and no step is skipped for it.

    Attributes:
        scale: what the loss is multiplied by.
    """

    kind = "none"

    def __init__(self) -> None:
        self.scale = 1.0

    def update(self, overflow: bool) -> bool:
        """Takes note of one step's outcome and sets the scale of the next.

        Args:
            overflow: whether the step's gradients held a value that is not finite.

        Returns:
            Whether the overflow is the scale's doing, so that the step is to be skipped.
        """
        del overflow
        return False

    @property
    def stop_advice(self) -> str | None:
        """Why the run must stop and what to change; None while it may go on."""
        return None

    def state(self) -> State:
        """All that a resumed run must have to go on in the same way, as JSON scalars."""
        return {"kind": self.kind}

    def restore(self, state: State) -> None:
        """Takes up what ``state`` gave.

        A scale of another kind, whose precision settings were changed for the resume, keeps its
        own start. Steps stuck at the floor are counted anew: the resumed run may have followed
        the advice.
        """
        if state["kind"] == self.kind:
            self._restore(state)

    def _restore(self, state: State) -> None:
        """Takes up the state of a scale of the same kind."""


class _Skipping(LossScale):
    """A scale that skips overflowed steps and counts those at its floor."""

    def __init__(self, scale: float) -> None:
        assert scale > 0
        super().__init__()
        self.scale = scale
        self.stuck_steps = 0

    def update(self, overflow: bool) -> bool:
        """See the base class."""
        self.stuck_steps = self.stuck_steps + 1 if overflow and self._at_floor() else 0
        self._adapt(overflow=overflow)
        return overflow

    def _at_floor(self) -> bool:
        return True

    def _adapt(self, *, overflow: bool) -> None:
        """Sets the next step's scale."""

    @property
    def stop_advice(self) -> str | None:
        """See the base class."""
        if self.stuck_steps < STUCK_STEPS:
            return None
        return (
            f"{self.stuck_steps} steps in a row overflowed fp16 and were skipped at a loss scale "
            f"of {self.scale:g}, {self._remedy()}"
        )

    def _remedy(self) -> str:
        return "which is fixed: set precision.loss_scale lower, or to null to have it found"


class StaticLossScale(_Skipping):
    """A constant scale chosen by the user; overflowed steps are skipped."""

    kind = "static"


@dataclass(frozen=True)
class ScaleRules:
    """How a dynamic scale moves; the defaults are Megatron's.

    Attributes:
        initial: the first scale.
        minimum: the floor.
        window: steps in a row without overflow after which it doubles.
        hysteresis: overflows, since the start or the last growth, from which on it halves.
    """

    initial: float = 2.0**32
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2


class DynamicLossScale(_Skipping):
    """The scale of the module's docstring: as large as the gradients allow."""

    kind = "dynamic"

    def __init__(self, rules: ScaleRules) -> None:
        assert 0 < rules.minimum <= rules.initial
        super().__init__(rules.initial)
        self._rules = rules
        self._good_steps = 0
        self._overflows_left = rules.hysteresis

    def _at_floor(self) -> bool:
        return self.scale <= self._rules.minimum

    def _adapt(self, *, overflow: bool) -> None:
        rules = self._rules
        if overflow:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale * 0.5, rules.minimum)
            return
        self._good_steps += 1
        if self._good_steps == rules.window:
            self._good_steps = 0
            self._overflows_left = rules.hysteresis
            self.scale *= 2.0

    def _remedy(self) -> str:
        return (
            "its floor (precision.min_loss_scale): the model has diverged or needs a wider range. "
            "Set precision.compute to bf16, or lower optimizer.lr, and look at the data of the "
            "last steps"
        )

    def state(self) -> State:
        """See the base class."""
        return {
            "kind": self.kind,
            "scale": self.scale,
            "good_steps": self._good_steps,
            "overflows_left": self._overflows_left,
        }

    def _restore(self, state: State) -> None:
        self.scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])
        self._overflows_left = int(state["overflows_left"])


def build_loss_scale(compute: str, fixed: float | None, rules: ScaleRules) -> LossScale:
    """The loss scale of a number type.

    Args:
        compute: ``"fp16"``, or another one, which gets the constant 1.
        fixed: a scale that stays; None: one that moves by ``rules``.
        rules: for the moving one.
    """
    if compute != "fp16":
        return LossScale()
    return DynamicLossScale(rules) if fixed is None else StaticLossScale(fixed)
