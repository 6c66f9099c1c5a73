"""Megatron-LM's flags of the model, the number type, the optimizer and recomputation."""

from collections.abc import Callable
from typing import Literal

from lib.plan.megatron_flags import REQUIRED, Importing

Kind = Literal["whole", "number", "text"]

# Flag, field, type of its value, Megatron's default.
_PLAIN: tuple[tuple[str, str, Kind, object], ...] = (
    ("hidden-size", "model.hidden_size", "whole", REQUIRED),
    ("num-attention-heads", "model.num_attention_heads", "whole", REQUIRED),
    ("kv-channels", "model.head_dim", "whole", None),
    ("max-position-embeddings", "model.max_position_embeddings", "whole", None),
    ("rotary-base", "model.rope_theta", "number", 10000.0),
    ("norm-epsilon", "model.norm_epsilon", "number", 1e-5),
    ("attention-dropout", "model.attention_dropout", "number", 0.1),
    ("hidden-dropout", "model.hidden_dropout", "number", 0.1),
    ("init-method-std", "model.init_std", "number", 0.02),
    ("make-vocab-size-divisible-by", "model.vocab_size_multiple", "whole", 128),
    ("initial-loss-scale", "precision.initial_loss_scale", "number", 2.0**32),
    ("min-loss-scale", "precision.min_loss_scale", "number", 1.0),
    ("loss-scale-window", "precision.loss_scale_window", "whole", 1000),
    ("hysteresis", "precision.loss_scale_hysteresis", "whole", 2),
    ("lr", "optimizer.lr", "number", REQUIRED),
    ("adam-beta1", "optimizer.beta1", "number", 0.9),
    ("adam-beta2", "optimizer.beta2", "number", 0.999),
    ("adam-eps", "optimizer.epsilon", "number", 1e-8),
    ("weight-decay", "optimizer.weight_decay", "number", 0.01),
    ("clip-grad", "optimizer.clip_grad", "number", 1.0),
    ("min-lr", "schedule.min_lr", "number", 0.0),
    ("seed", "training.seed", "whole", 1234),
    ("micro-batch-size", "training.micro_batch_size", "whole", REQUIRED),
    ("eval-interval", "training.eval_interval", "whole", 1000),
    ("eval-iters", "training.eval_iters", "whole", 100),
    ("save-interval", "checkpoint.save_interval", "whole", 0),
    ("save-retain-interval", "checkpoint.keep_every", "whole", None),
    ("log-interval", "runtime.log_interval", "whole", 100),
)
# Flag, field, value with it, value without it.
_SWITCHES: tuple[tuple[str, str, object, object], ...] = (
    ("disable-bias-linear", "model.bias", False, True),
    ("add-qkv-bias", "model.qkv_bias", True, None),
    ("qk-layernorm", "model.qk_norm", True, False),
    ("untie-embeddings-and-output-weights", "model.tie_embeddings", False, True),
    ("reset-position-ids", "data.positions", "document", "window"),
    ("reset-attention-mask", "data.attention", "document", "window"),
    ("deterministic-mode", "runtime.deterministic", True, False),
)
# What no flag of Megatron says as it is meant here, in its neutral position.
_NEUTRAL: dict[str, object] = {
    "training.label_smoothing": 0.0,
    "training.z_loss": 0.0,
    "training.initial_weights": None,
    "data.phases": [],
    "data.eod_in_loss": True,
}
_ADAM = {"adam", "adamw", "fusedadam", "fusedadamw"}
_ATTENTION = {
    "auto": "auto",
    "flash": "flash",
    "fused": "cudnn",
    "unfused": "fused_softmax",
    "local": "fused_softmax",
}


def import_model(importing: Importing) -> None:
    """Puts what the model, the number type, the optimizer and the reports are."""
    if "use-checkpoint-args" in importing.arguments.given:
        importing.notes.append(
            "--use-checkpoint-args takes the model's sizes from a checkpoint: add their flags"
        )
    for flag, name, kind, default in _PLAIN:
        _plain(importing, flag, (name, kind, default))
    for flag, name, with_it, without_it in _SWITCHES:
        if importing.arguments.has(flag):
            importing.put(name, with_it, flag)
        else:
            importing.put_default(name, without_it, flag)
    for name, value in _NEUTRAL.items():
        importing.put(name, value, why="no flag of Megatron says it")
    parts: tuple[Callable[[Importing], None], ...] = (
        _layers,
        _mlp,
        _query_groups,
        _normalization,
        _positions,
        _precision,
        _optimizer,
        _recompute,
        _attention,
        _reading,
    )
    for part in parts:
        part(importing)


def _plain(importing: Importing, flag: str, target: tuple[str, Kind, object]) -> None:
    name, kind, default = target
    arguments = importing.arguments
    if not arguments.has(flag):
        if default is REQUIRED:
            importing.refuse(flag, "the run needs it", f"add --{flag} VALUE")
        else:
            importing.put_default(name, default, flag)
        return
    read: Callable[[str], object] = arguments.whole if kind == "whole" else arguments.number
    if (value := read(flag)) is not None:
        importing.put(name, value, flag)


def _layers(importing: Importing) -> None:
    flag = "num-layers" if importing.arguments.has("num-layers") else "encoder-num-layers"
    _plain(
        importing,
        flag if importing.arguments.has(flag) else "num-layers",
        ("model.num_layers", "whole", REQUIRED),
    )


def _mlp(importing: Importing) -> None:
    """The activation, and the MLP's width, which Megatron derives from it."""
    arguments = importing.arguments
    gate = (arguments.text("glu-activation") or "").lower()
    if gate and gate != "swiglu":
        importing.leave("glu-activation", "gates of another function: not here")
    if arguments.has("swiglu") or gate == "swiglu":
        importing.put("model.activation", "swiglu", "swiglu", "glu-activation")
    else:
        importing.put_default("model.activation", "gelu", "swiglu")
    importing.agree("openai-gelu", "gelu here is this form of it")
    width, hidden = arguments.whole("ffn-hidden-size"), importing.value("model.hidden_size")
    if arguments.has("ffn-hidden-size"):
        importing.put("model.ffn_hidden_size", width, "ffn-hidden-size")
    elif importing.value("model.activation") == "swiglu" and isinstance(hidden, int):
        why = "Megatron rounds 8/3 hidden_size down to a multiple of 64, here it is rounded up"
        importing.put("model.ffn_hidden_size", 8 * hidden // 3 // 64 * 64, why=why)
    else:
        importing.put_default("model.ffn_hidden_size", None, "ffn-hidden-size")


def _query_groups(importing: Importing) -> None:
    arguments, name = importing.arguments, "model.num_query_groups"
    for flag in ("num-key-value-heads", "num-attention-heads-kv"):
        if arguments.has(flag):
            importing.put(name, arguments.whole(flag), flag)
            return
    if arguments.text("attention-head-type") == "multiquery":
        importing.put(name, 1, "attention-head-type")
    elif arguments.has("group-query-attention"):
        groups = arguments.whole("num-query-groups") if arguments.has("num-query-groups") else 1
        importing.put(name, groups, "group-query-attention", "num-query-groups")
    else:
        importing.agree("attention-head-type", "one key and value head per head, as by default")
        importing.leave(
            "num-query-groups",
            "Megatron reads it with --group-query-attention only",
            changes_result=False,
        )
        importing.put_default(name, None, "group-query-attention")


def _normalization(importing: Importing) -> None:
    arguments, name = importing.arguments, "model.normalization"
    written = (arguments.text("normalization") or "").lower()
    if arguments.has("use-rms-norm") or written == "rmsnorm":
        importing.put(name, "rmsnorm", "normalization", "use-rms-norm")
    elif written in ("", "layernorm"):
        importing.put(name, "layernorm", "normalization", why="Megatron's default")
    else:
        importing.leave("normalization", "layernorm and rmsnorm are here")


def _positions(importing: Importing) -> None:
    arguments, name = importing.arguments, "model.position_embedding"
    flags = ("position-embedding-type", "use-rotary-position-embeddings", "no-position-embedding")
    kind = arguments.text("position-embedding-type") or "learned_absolute"
    if arguments.has("use-rotary-position-embeddings"):
        kind = "rope"
    if kind in ("rope", "rotary"):
        importing.put(name, "rope", *flags)
    elif kind in ("learned_absolute", "absolute") and not arguments.has("no-position-embedding"):
        importing.put(name, "learned", *flags, why="Megatron's default")
    else:
        importing.put_default(name, "learned", flags[0])
        for flag in flags:
            importing.leave(flag, "positions here are learned or rope")
    if (share := arguments.number("rotary-percent")) is not None and share != 1:
        importing.leave("rotary-percent", "rope turns whole heads here")
    importing.agree("rotary-percent", "rope turns whole heads")
    factor = arguments.number("rotary-seq-len-interpolation-factor")
    if factor is not None and factor != 1:
        importing.leave("rotary-seq-len-interpolation-factor", "positions are not stretched here")
    importing.agree("rotary-seq-len-interpolation-factor", "positions are as they are")


def _precision(importing: Importing) -> None:
    arguments = importing.arguments
    half, brain = arguments.has("fp16"), arguments.has("bf16")
    if half and brain:
        importing.refuse("fp16", "--bf16 is given as well", "keep one of the two")
    kind = "fp16" if half else "bf16" if brain else "fp32"
    importing.put("precision.compute", kind, "fp16", "bf16", why="" if half or brain else "no flag")
    scale = arguments.number("loss-scale")
    if scale is not None and not half:
        importing.leave("loss-scale", "bf16 and fp32 need none", changes_result=False)
        scale = None
    if scale == 0:  # an old spelling of: found by itself
        scale = None
    importing.put("precision.loss_scale", scale, *(("loss-scale",) if half else ()))


def _optimizer(importing: Importing) -> None:
    kind = importing.arguments.text("optimizer")
    if kind is not None and kind.lower() not in _ADAM:
        importing.leave("optimizer", "AdamW is here")
    importing.agree("optimizer", "Adam, whose weight decay is AdamW's there too")


def _recompute(importing: Importing) -> None:
    arguments = importing.arguments
    flags = ("recompute-granularity", "recompute-activations", "checkpoint-activations")
    kind = arguments.text("recompute-granularity")
    if arguments.has("checkpoint-activations") or arguments.has(
        "deepspeed-activation-checkpointing"
    ):
        kind = "full"
    if kind is None and arguments.has("recompute-activations"):
        kind = "selective"
    if kind is None and arguments.has("recompute-method"):
        kind = "full"  # where the method alone switched it on
    flags = (*flags, "deepspeed-activation-checkpointing")
    if kind not in (None, "full", "selective"):
        importing.leave("recompute-granularity", "none, selective and full are here")
        kind = None
    importing.put("runtime.recompute", kind or "none", *flags)
    method = arguments.text("recompute-method")
    importing.put(
        "runtime.recompute_method", "block" if method == "block" else "uniform", "recompute-method"
    )
    layers = arguments.whole("recompute-num-layers")
    importing.put("runtime.recompute_layers", layers or 1, "recompute-num-layers")


def _attention(importing: Importing) -> None:
    arguments, name = importing.arguments, "runtime.attention"
    kind = arguments.text("attention-backend")
    if kind in _ATTENTION:
        importing.put(name, _ATTENTION[kind], "attention-backend")
    elif kind is not None:
        importing.leave(
            "attention-backend", "docs/performance.md has those here", changes_result=False
        )
    importing.agree("use-flash-attn", "runtime.attention: auto takes the fastest")


def _reading(importing: Importing) -> None:
    importing.leave(
        "eod-mask-loss",
        "Megatron leaves out of the loss what follows the end of a document; data.eod_in_loss: "
        "false leaves out that end itself",
    )
    workers = importing.arguments.whole("num-workers")
    if workers is not None:
        importing.put("runtime.num_workers", max(1, workers), "num-workers")
    if importing.arguments.has("async-save"):
        importing.put("runtime.background_save", True, "async-save")  # noqa: FBT003
