"""How long a training step takes, from work and rates.

Of one layer and micro batch on one rank (M tokens, H hidden, q = N D, k = G D, F feed-forward
width, S sequence, e bytes a number; T tensor-parallel ranks divide q, k, F):

    products    6 M H (2 q + 2 k + 2 or 3 F) / T at a rate that falls for narrow and few rows
    attention   7 M q S / T: forward 2, backward 5, of the causal half
    pointwise   e M (16 H + 4 (q + k) + 2 (q + 2 k) + 8 or 5 F) bytes: norms, positions, activation
    sums        8 bytes a parameter: gradients that products add up in fp32

The head: a product of 6 M H V / T and three passes over the logits. Once a step: 38 bytes of
memory for each master (norm, update, copies). The host launches kernels meanwhile, and whichever
takes longer, host or GPU, sets the pace, unless micro batches are replayed from CUDA graphs. Then
what is exposed of transfers:

    tensor      10 messages of e M H a layer under sequence parallelism (4 sums of twice that
                without), of which products hide a part
    data        a gather and a reduction of the parameters, of which little is exposed as long as
                there is work to hide behind
    pipeline    stages wait as the schedule says: (m V - 1) of the slowest chunk and one of each
"""

from dataclasses import dataclass
from functools import cached_property

from lib.model.flops import training_flops_per_token
from lib.plan.ceilings import Ceilings, interpolated
from lib.plan.parameters import chunk_blocks
from lib.plan.work import Work

# Rows, or columns, of a product that as much time again is lost for: the last wave of tiles is
# not full, and the first loads hide behind nothing.
_LOST_ROWS, _LOST_COLUMNS = 256, 48
# Exponentials, not bytes, set the pace of the loss: measured 4 ms where copies would take 1.2.
_LOSS_SLOWNESS = 3.3
# Shares of transfers that computing does not hide, measured at 2 GPUs on the 1.4B reference.
_EXPOSED_SEQUENCE, _EXPOSED_DATA = 0.8, 0.25
# Products are slower beside transfers that wait on multiprocessors of theirs: measured, with 2
# held of 132.
_BESIDE_TRANSFERS = 1.12
_MASTER_BYTES_MOVED = 38
_SLOWER_TYPES = {"bf16": 1.0, "fp16": 1.0, "fp32": 15.0, "fp64": 15.0}
# Launches of a layer, forward and backward, as its functions make them; of the rest of a step.
_LAYER_LAUNCHES, _HEAD_LAUNCHES, _STEP_LAUNCHES = 31, 25, 60


@dataclass(frozen=True)
class StepTime:
    """An expected step.

    Attributes:
        seconds: of all of it.
        exposed: of transfers that nothing hides.
        host_bound: whether the host sets the pace.
        bubble: share of the step in which a pipeline stage waits.
        tokens: of a step.
        flops: model FLOPs of a step over all ranks, recomputation not counted.
        ranks: of the run.
    """

    seconds: float
    exposed: float
    host_bound: bool
    bubble: float
    tokens: int
    flops: float
    ranks: int

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens / self.seconds

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s of each rank."""
        return self.flops / self.seconds / self.ranks / 1e12


def step_time(work: Work, ceilings: Ceilings, gpus_per_node: int | None = None) -> StepTime:
    """The expected time of a step.

    Args:
        work: what is computed.
        ceilings: of each GPU.
        gpus_per_node: ranks that share a node; None: all.
    """
    return _Step(work, ceilings, gpus_per_node or work.ranks).found()


def pipeline_seconds(chunk_seconds: list[float], stages: int, micro_batches: int) -> float:
    """How long a pipeline takes by the schedule.

    In closed form: the slowest stage works all the time but while the first micro batch comes to
    it and the last one leaves it, which takes a chunk of each other stage. Exact for equal chunks;
    where the first stage is much slower than others and micro batches are few, up to a quarter more
    than the schedule takes, since its forwards run while it would wait here.

    Args:
        chunk_seconds: forward and backward of a micro batch through each chunk, by depth.
        stages: chunk c belongs to stage c % stages.
        micro_batches: of the step.
    """
    by_stage = [sum(chunk_seconds[stage::stages]) for stage in range(stages)]
    chunks = len(chunk_seconds) // stages
    slowest = max(by_stage)
    others = (sum(by_stage) - slowest) / chunks
    # With fewer micro batches than stages a stage waits for its own output to come around.
    around = (chunks - 1) * max(0, stages - micro_batches) * slowest / chunks
    return micro_batches * slowest + others + around


@dataclass(frozen=True)
class _Step:
    work: Work
    rates: Ceilings
    gpus_per_node: int

    def found(self) -> StepTime:
        work = self.work
        stages, count = work.parallel.pipeline, work.micro_batches
        gpu = [self._chunk_gpu(chunk) for chunk in range(len(work.layers_of_chunks))]
        host = [self._chunk_host(chunk) for chunk in range(len(work.layers_of_chunks))]
        exposed = [self._tensor_exposed * layers for layers in work.layers_of_chunks]
        if not self._is_launched:
            host = [0.0] * len(host)
        each = [max(g + x, h) for g, x, h in zip(gpu, exposed, host, strict=True)]
        if stages > 1:
            each = [seconds * _BESIDE_TRANSFERS + self._hop for seconds in each]
        whole = pipeline_seconds(each, stages, count)
        mean = count * sum(each) / stages
        data = self._data_exposed(mean)
        seconds = whole + self._update + data
        place = max(range(stages), key=lambda stage: sum(each[stage::stages]))
        transfers = count * sum(exposed[place::stages]) + data
        flops = training_flops_per_token(work.model, work.seq_length, work.vocab_size)
        return StepTime(
            seconds=seconds,
            exposed=transfers,
            host_bound=sum(host[place::stages])
            >= sum(gpu[place::stages]) + sum(exposed[place::stages]),
            bubble=1 - mean / whole,
            tokens=work.tokens_per_step,
            flops=flops * work.tokens_per_step,
            ranks=work.ranks,
        )

    @cached_property
    def _is_launched(self) -> bool:
        """Whether the host launches kernels one by one (``lib.train.graphs``).

        Several ranks replay theirs too, but how fast is not known: none was measured.
        """
        work = self.work
        model, runtime = work.model, work.runtime
        draws = model.hidden_dropout > 0 or model.attention_dropout > 0
        return runtime.cuda_graphs == "off" or draws or work.within_documents or work.ranks > 1

    def _product_rate(self, columns: int) -> float:
        """FLOP/s where the narrowest side of a product is this."""
        rows = self.work.tokens
        share = rows / (rows + _LOST_ROWS) * columns / (columns + _LOST_COLUMNS)
        return self.rates.product_tflops * 1e12 * share / _SLOWER_TYPES[self.work.compute]

    def _copy(self, size: float) -> float:
        return size / (self.rates.copy_gb_per_s * 1e9)

    @cached_property
    def _layer(self) -> tuple[float, float]:
        """Seconds of a layer and micro batch: all of it, and attention's core alone."""
        work, model, tensor = self.work, self.work.model, self.work.parallel.tensor
        hidden, wide = model.hidden_size, model.ffn_hidden_size / tensor
        queries = model.num_attention_heads * model.head_dim / tensor
        keys = max(1.0, model.num_query_groups / tensor) * model.head_dim
        is_gated = model.activation == "swiglu"
        columns = 2 * queries + 2 * keys + (3 if is_gated else 2) * wide
        narrowest = int(min(hidden, queries, wide))
        products = 6 * work.tokens * hidden * columns / self._product_rate(narrowest)
        rate = self.rates.attention(model.head_dim, work.seq_length) * 1e12
        core = 7 * work.tokens * queries * work.seq_length / (rate / _SLOWER_TYPES[work.compute])
        norms = 16 * hidden * work.own_tokens
        turned = 4 * (queries + keys) if model.position_embedding == "rope" else 0
        rest = work.tokens * (turned + 2 * (queries + 2 * keys) + (8 if is_gated else 5) * wide)
        pointwise = self._copy(work.element_bytes * (norms + rest))
        sums = self._copy(2 * work.master_bytes * hidden * columns)
        return products + core + pointwise + sums, core

    def _chunk_gpu(self, chunk: int) -> float:
        work, layers = self.work, self.work.layers_of_chunks[chunk]
        whole, core = self._layer
        seconds = layers * whole
        # Forward is a third of products, 2 of 7 parts of attention.
        if work.runtime.recompute == "full":
            block = work.runtime.recompute_method == "block"
            again = min(layers, work.runtime.recompute_layers) if block else layers
            seconds += again * (whole / 3)
        elif work.runtime.recompute == "selective":
            seconds += layers * core * 2 / 7
        if chunk == len(work.layers_of_chunks) - 1:
            rows = work.vocab_size / work.parallel.tensor
            product = 6 * work.tokens * work.model.hidden_size * rows
            seconds += product / self._product_rate(work.model.hidden_size)
            logits = 3 * work.element_bytes * work.tokens * rows
            seconds += self._copy(_LOSS_SLOWNESS * logits)
        return seconds

    def _chunk_host(self, chunk: int) -> float:
        work, layers = self.work, self.work.layers_of_chunks[chunk]
        again = 4 / 3 if work.runtime.recompute == "full" else 1
        launches = _LAYER_LAUNCHES * layers * again
        launches += _HEAD_LAUNCHES if chunk == len(work.layers_of_chunks) - 1 else 0
        collectives = 0
        if work.parallel.tensor > 1:
            collectives = layers * again * (10 if work.parallel.sequence else 4)
        latency = self.rates.latency_us
        return (launches * latency.kernel + collectives * latency.collective) / 1e6

    def _link_seconds(self, message: float, ranks: int, *, crosses: bool) -> float:
        """A gather, or a reduce-scatter, of a message over so many ranks."""
        links = self.rates.link_gb_per_s
        rates = links.nodes if crosses else links.collective
        rate = interpolated(rates, max(message / 1e6, 1e-3)) * 1e9
        return message * (ranks - 1) / ranks / rate

    @cached_property
    def _tensor_exposed(self) -> float:
        """Of a layer and micro batch."""
        work, tensor = self.work, self.work.parallel.tensor
        if tensor == 1:
            return 0.0
        message = work.element_bytes * work.tokens * work.model.hidden_size
        one = self._link_seconds(message, tensor, crosses=tensor > self.gpus_per_node)
        if work.parallel.sequence:
            again = 3 if work.runtime.recompute == "full" else 0
            return _EXPOSED_SEQUENCE * (10 + again) * one
        # Sums of the forward pass wait for all; of those of backward products hide a part.
        again = 4 if work.runtime.recompute == "full" else 0
        return (4 + again + 4 * _EXPOSED_SEQUENCE) * one

    @cached_property
    def _hop(self) -> float:
        """A micro batch's way to the next stage, and its gradient's way back."""
        work = self.work
        message = work.element_bytes * work.own_tokens * work.model.hidden_size
        links = self.rates.link_gb_per_s
        spans_nodes = work.ranks > self.gpus_per_node
        rate = interpolated(links.nodes if spans_nodes else links.p2p, max(message / 1e6, 1e-3))
        return 2 * (message / (rate * 1e9) + self.rates.latency_us.collective / 1e6)

    @cached_property
    def _parameters(self) -> tuple[int, int]:
        """Of the fullest stage: numbers that it computes with, and those of its masters."""
        chunks, stages = len(self.work.layers_of_chunks), self.work.parallel.pipeline
        found = []
        for stage in range(stages):
            blocks = [b for c in range(stage, chunks, stages) for b in chunk_blocks(self.work, c)]
            found.append((sum(b.values for b in blocks), sum(b.width for b in blocks)))
        return max(found)

    @cached_property
    def _update(self) -> float:
        moved = self._copy(_MASTER_BYTES_MOVED * self._parameters[1])
        return moved + self._packing + _STEP_LAUNCHES * self.rates.latency_us.kernel / 1e6

    @cached_property
    def _packing(self) -> float:
        """Copies between parameters or gradients and what ranks exchange."""
        work, (values, masters) = self.work, self._parameters
        if work.shards == 1:
            return 0.0
        gathers, reductions = self._exchanges
        unpacked = 2 * work.element_bytes * values
        packed = (work.master_bytes + work.element_bytes) * masters
        sent = work.master_bytes * (2 * values + 3 * masters)
        return self._copy(gathers * (unpacked + packed) + reductions * sent)

    @property
    def _exchanges(self) -> tuple[int, int]:
        """Gathers and reductions of all parameters in a step."""
        work = self.work
        gathers = 2 * work.micro_batches if work.sharding == "parameters" else 1
        return gathers, 1 if work.sharding == "optimizer" else work.micro_batches

    def _data_exposed(self, computing: float) -> float:
        """Of gathers and reductions over the copies, beside so many seconds of computing."""
        work = self.work
        if work.copies == 1:
            return 0.0
        values = self._parameters[0]
        layer = values / max(1, work.model.num_layers // work.parallel.pipeline)
        # Copies of a pipeline stage lie side by side (``lib.parallel.mesh``).
        inside = max(1, self.gpus_per_node // work.parallel.tensor)
        shards = work.shards
        crosses = shards > inside
        gathers, reductions = self._exchanges
        rates = {
            size: self._link_seconds(size * layer, shards, crosses=crosses) * values / layer
            for size in (work.element_bytes, work.master_bytes)
        }
        seconds = gathers * rates[work.element_bytes] + reductions * rates[work.master_bytes]
        replicas = work.copies // shards
        if replicas > 1:
            size = work.master_bytes * self._parameters[1]
            seconds += 2 * self._link_seconds(size, replicas, crosses=work.copies > inside)
        # It can hide behind the micro batches that have the same parameters at work: the last one.
        window = computing if gathers + reductions > 2 else computing / work.micro_batches
        return max(_EXPOSED_DATA * seconds, seconds - 0.75 * window)
