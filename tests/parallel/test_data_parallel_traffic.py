"""What is sent when, what is in memory when, and that nobody computes with weights of yesterday."""

from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist

from lib.model.loss import MicroBatch
from lib.model.recompute import Recompute
from lib.parallel.data_parallel import MOST_REDUCTIONS
from lib.parallel.mesh import build_mesh
from lib.parallel.storage import local
from tests.distributed import run_on_ranks
from tests.model.models import CONFIGS, GPT2, build, drawn_tokens
from tests.parallel.engine import make_engine, poisoned_memory
from tests.stored import values_of

LAYERS = 3
CONFIG = GPT2.model_copy(update={"num_layers": LAYERS})
SHARDINGS = ["optimizer", "gradients", "parameters"]
GATHER, REDUCE = "all_gather", "reduce_scatter"


def micro_batches(count):
    batches = []
    for number in range(count):
        tokens, labels = drawn_tokens(10 * dist.get_rank() + number, 2, 8)
        weights = torch.ones(8, 2, dtype=torch.float64)
        batches.append(MicroBatch(tokens.T, labels.T, weights, 16))
    return batches


def bytes_there(tensor):
    return tensor.untyped_storage().nbytes()


@dataclass
class Watched:
    """An engine, and a log: collectives, and passes of layers with who is in memory then."""

    sharding: str
    recompute: Recompute | None = None
    log: list = field(default_factory=list)

    def __post_init__(self):
        mesh = build_mesh("cpu", tensor=1, pipeline=1, data=dist.get_world_size())
        self.engine = make_engine(
            CONFIG,
            mesh,
            sharding=self.sharding,
            recompute=self.recompute,
            watch=lambda call, _: self.log.append(call),
        )
        model = self.engine.model
        self.units = {"embedding": model.embedding, **model.layers, "end": model.final_layernorm}
        for name, layer in model.layers.items():
            layer.forward = self._told(layer.forward, name)

    def _told(self, forward, name):
        def told(*inputs):
            self.log.append((f"F{name}", *self.in_memory()))
            outputs = forward(*inputs)
            if outputs[1].requires_grad:
                outputs[1].register_hook(lambda _: self.log.append((f"B{name}", *self.in_memory())))
            return outputs

        return told

    def in_memory(self):
        """Whose parameters, and whose gradients."""
        first = {name: next(unit.parameters()) for name, unit in self.units.items()}
        values = {name for name, value in first.items() if bytes_there(value)}
        return values, {name for name, value in first.items() if bytes_there(value.grad)}

    def passes(self):
        return [entry for entry in self.log if isinstance(entry, tuple)]

    def order(self):
        """The log with names alone."""
        return [entry if isinstance(entry, str) else entry[0] for entry in self.log]


def counts_on_rank(sharding, recompute, batches):
    """Gathers and reductions of a validation and of two steps."""
    found = []
    with poisoned_memory():
        watched = Watched(sharding, recompute)
        for run in (watched.engine.validate, watched.engine.step, watched.engine.step):
            watched.log.clear()
            run(micro_batches(batches))
            found.append((watched.log.count(GATHER), watched.log.count(REDUCE)))
    return found


RECOMPUTE = {
    "none": None,
    "selective": Recompute("selective"),
    "each": Recompute("full", "uniform", 1),
    "pairs": Recompute("full", "uniform", 2),
    "all": Recompute("full", "uniform", 3),
    "first": Recompute("full", "block", 1),
}


@pytest.mark.parametrize("recompute", RECOMPUTE.values(), ids=RECOMPUTE)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_step_gathers_and_reduces_as_often_as_the_table_says(sharding, recompute):
    """Fault: layers that were computed again fetched the layer behind them once more."""
    batches, blocks = 2, LAYERS + 2
    by_use = sharding == "parameters"
    gathers = (
        {1: 2 + batches * LAYERS, 2: 2 + 2 * batches * LAYERS} if by_use else {1: blocks, 2: blocks}
    )
    reductions = blocks if sharding == "optimizer" else batches * blocks
    expected = [(gathers[1], 0), (gathers[2], reductions), (gathers[2], reductions)]
    for found in run_on_ranks(2, counts_on_rank, sharding, recompute, batches):
        assert found == expected


def order_on_rank(sharding):
    watched = Watched(sharding)
    watched.engine.step(micro_batches(1))
    return watched.order()


ORDERS = {
    "optimizer": f"{GATHER} " * 5
    + f"F0 F1 F2 {REDUCE} B2 {REDUCE} B1 {REDUCE} B0"
    + f" {REDUCE}" * 2,
}


def compact(order):
    return " ".join({GATHER: "G", REDUCE: "R"}.get(entry, entry) for entry in order)


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        # The ends first; then always the next layer before this one computes; each layer's
        # gradients while backward goes on.
        ("optimizer", "G G G G F0 G F1 F2 R B2 R B1 R B0 R R"),
        ("gradients", "G G G G F0 G F1 F2 R B2 R B1 R B0 R R"),
        ("parameters", "G G G G F0 G F1 F2 R G G B2 R G B1 R B0 R R"),
    ],
)
def test_the_next_is_on_its_way_while_this_one_computes(sharding, expected):
    for order in run_on_ranks(2, order_on_rank, sharding):
        assert compact(order) == expected


def under_way_on_rank(sharding):
    """How many reductions are not waited for yet when the next one begins."""
    watched = Watched(sharding)
    found = []
    blocks = watched.engine.data_parallel._blocks

    def told(call, _):
        if call == REDUCE:
            found.append(sum(block._reducing is not None for block in blocks))

    for block in blocks:
        block.plan = replace(block.plan, shards=replace(block.plan.shards, watch=told))
    for _ in range(2):
        watched.engine.step(micro_batches(2))
    return found


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_what_is_sent_is_waited_for_before_much_is_there(sharding):
    """Fault: each micro batch's gradients stayed, whole and in fp32, until the end of the next."""
    for found in run_on_ranks(2, under_way_on_rank, sharding):
        assert max(found) == MOST_REDUCTIONS - 1
        assert len(found) == (LAYERS + 2) * (2 if sharding == "optimizer" else 4)


def memory_on_rank(sharding, recompute):
    """Passes of a step of two micro batches, what is left after it, and after a validation."""
    watched = Watched(sharding, recompute)
    ends = []
    for run in (watched.engine.step, watched.engine.validate):
        watched.log.clear()
        run(micro_batches(2))
        ends.append((watched.passes(), watched.in_memory()))
    return ends


ENDS, EACH = {"embedding", "end"}, [{str(number)} for number in range(LAYERS)]
ALL = ENDS.union(*EACH)


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_and_gradients_of_one_layer_at_a_time(size):
    forward = [(f"F{n}", ENDS | layer, set()) for n, layer in enumerate(EACH)]
    # Gradients of the last norm and of the output are reduced by then, unlike a tied table's.
    backward = [(f"B{n}", ENDS | layer, {"embedding"} | layer) for n, layer in enumerate(EACH)]
    for step, validation in run_on_ranks(size, memory_on_rank, "parameters", None):
        assert step == (2 * (forward + backward[::-1]), (ENDS, set()))
        assert validation == (2 * forward, (ENDS, set()))


def test_a_layer_that_is_computed_again_is_there_once():
    """Its parameters stay from the second forward to its backward, which is next."""
    for step, _ in run_on_ranks(2, memory_on_rank, "parameters", Recompute("full", "uniform", 1)):
        passes, left = step
        assert left == (ENDS, set())
        for name, values, _ in passes:
            assert values == ENDS | {name[1:]}
        names = [name for name, *_ in passes[: 3 * LAYERS]]
        assert sorted(names) == sorted(["F0", "F1", "F2"] * 2 + ["B0", "B1", "B2"])


def test_gradients_of_one_layer_at_a_time():
    forward = [(f"F{n}", ALL, set()) for n in range(LAYERS)]
    backward = [(f"B{n}", ALL, {"embedding"} | layer) for n, layer in enumerate(EACH)]
    for step, validation in run_on_ranks(2, memory_on_rank, "gradients", None):
        assert step == (2 * (forward + backward[::-1]), (ALL, set()))
        assert validation == (2 * forward, (ALL, set()))


@pytest.mark.parametrize(("size", "sharding"), [(1, "parameters"), (2, "optimizer")])
def test_all_stay_where_nothing_is_sharded_between_uses(size, sharding):
    for step, validation in run_on_ranks(size, memory_on_rank, sharding, None):
        assert {name: rest for name, *rest in step[0] + validation[0]} == {
            f"{way}{n}": [ALL, ALL] for n in range(LAYERS) for way in "FB"
        }
        assert step[1] == validation[1] == (ALL, ALL)


def masters_moved(engine, factor):
    with torch.no_grad():
        for master in engine.masters.values():
            local(master).mul_(factor)


def fresh_on_rank(sharding, leftover):
    """Losses with masters that were changed at every place where a step may have left something."""
    mesh = build_mesh("cpu", tensor=1, pipeline=1, data=dist.get_world_size())
    recompute = Recompute("full", "uniform", 1)
    engine = make_engine(CONFIGS["llama"], mesh, sharding=sharding, recompute=recompute)
    batches = micro_batches(2)
    if leftover == "step":
        engine.step(batches)
    elif leftover == "validation":
        engine.validate(batches)
    else:  # one that was begun only
        engine.data_parallel.start(trains=leftover == "begun step")
    masters_moved(engine, 0.5)
    validation = engine.validate(batches)
    masters_moved(engine, 2.0)
    losses = engine.step(batches)
    expected = []
    for factor in (0.5, 1.0):
        other = make_engine(CONFIGS["llama"], mesh, sharding=sharding)
        masters_moved(other, factor)
        expected.append(other.validate(batches))
    return validation, losses, expected


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("leftover", ["step", "validation", "begun step", "begun validation"])
def test_every_start_takes_the_masters_of_now(size, sharding, leftover):
    """Fault: a gather that was still under way from before counted as the newest."""
    for validation, losses, expected in run_on_ranks(size, fresh_on_rank, sharding, leftover):
        for found, truth in zip((validation, losses), expected, strict=True):
            assert torch.equal(torch.stack(found), torch.stack(truth))
        assert not torch.equal(torch.stack(validation), torch.stack(losses))


def shards_on_rank(sharding):
    mesh = build_mesh("cpu", tensor=1, pipeline=1, data=dist.get_world_size())
    engine = make_engine(GPT2, mesh, torch.bfloat16, sharding)
    shares = {name: local(value).clone() for name, value in engine.masters.items()}
    losses = engine.validate(micro_batches(1))
    for name, value in engine.masters.items():
        assert torch.equal(local(value), shares[name])
        assert bytes_there(local(value)) == 4 * local(value).numel()
    gathered = {value.dtype for value in engine.model.parameters()}
    return {name: value.numel() for name, value in shares.items()}, losses[0].dtype, gathered


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_each_rank_stores_its_share_before_and_after_a_validation(sharding):
    whole = {name: value.numel() for name, value in values_of(build(GPT2)).items()}
    for shares, dtype, gathered in run_on_ranks(2, shards_on_rank, sharding):
        assert {name: 2 * count for name, count in shares.items()} == whole
        assert dtype == torch.float64  # of losses times weights; with bf16 logits
        assert gathered == {torch.bfloat16}
