"""What ``runtime.attention`` asks for and cannot be had, told before a process is started.

No torch here: the limits are those of ``lib.layers.attention_limits``, which the workers keep as
well. The shapes of a run stand here too, since the workers time the backends on them.

Rules have the form of ``lib.config.rule``. ``config`` is a run configuration, or the
parameters that one is made of.
"""

from collections.abc import Iterator

from lib.config.nearest import multiples_near
from lib.config.operation import RuntimeConfig
from lib.config.run_config import Params, RunConfig, phases_of, resolved_model
from lib.errors import Problem
from lib.layers.attention_limits import LIMITS, AttentionCase
from lib.layers.gpu_limits import Capability

# One of each that limits tell apart: V100, T4, A100, RTX 4090, H100, B200, RTX 5090.
GPU_GENERATIONS = ((7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
# Backends that come with torch and never form the S x S weights.
_FUSED = ("cudnn", "flash", "efficient")


def attention_cases(config: RunConfig | Params, runtime: RuntimeConfig) -> list[AttentionCase]:
    """What the attention of one rank has to serve, for each phase of the training."""
    model, tensor = resolved_model(config), config.parallel.tensor
    return [
        AttentionCase(
            seq_length=phase.seq_length,
            micro_batch_size=phase.micro_batch_size,
            heads=model.num_attention_heads // tensor,
            kv_heads=max(1, model.num_query_groups // tensor),
            head_dim=model.head_dim,
            dtype=config.precision.compute,
            dropout=model.attention_dropout,
            documents=config.data.attention == "document",
            deterministic=runtime.deterministic,
        )
        for phase in phases_of(config)
    ]


def limit(name: str, cases: list[AttentionCase], capability: Capability) -> str | None:
    """Why a backend cannot serve all cases on such a device; None if nothing speaks against it."""
    reasons = (LIMITS[name](case, capability) for case in cases)
    return next((reason for reason in reasons if reason is not None), None)


def choose_another(cases: list[AttentionCase], capability: Capability) -> str:
    """The remedy where a backend cannot serve: those that can, without packages."""
    own = [name for name in LIMITS if not name.startswith("flash_attn")]
    serving = [name for name in own if limit(name, cases, capability) is None]
    return f"write auto, or one that can serve this run: {', '.join(serving)}"


def attention_serves_on_some_gpu(
    config: RunConfig | Params, runtime: RuntimeConfig
) -> Iterator[Problem]:
    """A backend whose number type, heads or dropout the run has not got serves nowhere."""
    name, cases = runtime.attention, attention_cases(config, runtime)
    if name == "auto":
        return
    reasons = {each: limit(name, cases, each) for each in GPU_GENERATIONS}
    if all(reasons.values()):
        newest = GPU_GENERATIONS[-3]  # H100, which all backends know
        yield Problem(
            "runtime.attention",
            name,
            f"no GPU can run it for this model: it {reasons[newest]}",
            choose_another(cases, newest),
        )


def heads_fit_fused_attention(
    config: RunConfig | Params, runtime: RuntimeConfig
) -> Iterator[Problem]:
    """Without a fused kernel the S x S weights are formed, which costs memory and time."""
    size, cases = resolved_model(config).head_dim, attention_cases(config, runtime)
    if config.precision.compute not in ("bf16", "fp16"):
        return  # the number types of GPUs that are there for speed
    reasons = [limit(name, cases, each) for name in _FUSED for each in GPU_GENERATIONS]
    if size % 8 and all(reasons):
        yield Problem(
            "model.head_dim",
            str(size),
            "no fused attention takes it, which wants a multiple of 8 in bf16 and fp16 (16 bytes; "
            "torch's sdp_utils.cpp), so a slower one that forms S x S weights will run",
            f"nearest: {multiples_near(size, 8)}",
        )


ATTENTION_RULES = (attention_serves_on_some_gpu,)
ATTENTION_ADVICE = (heads_fit_fused_attention,)
