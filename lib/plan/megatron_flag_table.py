"""Flags of Megatron-LM, of all its years and of its best known forks, that set no parameter here.

Forks: Megatron-DeepSpeed (bigscience and Microsoft), EleutherAI's, Megatron-LLM, BigCode, llm-jp,
Pai-Megatron-Patch, Habana's. ``RENAMED`` are flags that today's Megatron-LM no longer has; the
other two tables are those that have no counterpart here, by the reason: without those of
``CHANGES_RESULT`` a run is another run. ``*`` in a name stands for any letters.
"""

RENAMED: dict[str, str] = {
    # the same value under another name
    "activations-checkpoint-granularity": "--recompute-granularity",
    "activations-checkpoint-method": "--recompute-method",
    "activations-checkpoint-num-layers": "--recompute-num-layers",
    "batch-size": "--micro-batch-size",
    "checkpoint-granularity": "--recompute-granularity",
    "checkpoint-method": "--recompute-method",
    "checkpoint-num-layers": "--recompute-num-layers",
    "enable-activation-checkpointing": "--recompute-activations",
    "intermediate-size": "--ffn-hidden-size",
    "layernorm-epsilon": "--norm-epsilon",
    "min-scale": "--min-loss-scale",
    "model-parallel-size": "--tensor-model-parallel-size",
    "no-tie-embed-logits": "--untie-embeddings-and-output-weights",
    "pipe-parallel-size": "--pipeline-model-parallel-size",
    "rope-theta": "--rotary-base",
    "rotary-position-embeddings-theta": "--rotary-base",
    "rotary-theta": "--rotary-base",
    "save-iters": "--save-interval",
    "tokenizer-file": "--tokenizer-model",
    "tokenizer-name-or-path": "--tokenizer-model",
    "tokenizer-path": "--tokenizer-model",
    "train-data": "--data-path",
    "valid-data": "--valid-data-path",
    "vocab": "--vocab-file",
    "test-data": "--test-data-path",
    "warmup": "--lr-warmup-fraction",
    # something else does it now
    "all-gather-buffer-size": "--ddp-bucket-size",
    "async-tensor-model-parallel-allreduce": "none: always on",
    "checkpoint-activations": "--recompute-granularity full --recompute-method uniform",
    "ckpt-fully-parallel-save": "none: the default (--no-ckpt-fully-parallel-save is off)",
    "contigious-checkpointing": "none",
    "data-impl": "none: files are always mapped into memory",
    "dataset-impl": "none: files are always mapped into memory",
    "ddp-impl": "none: there is one implementation",
    "delay-grad-reduce": "--no-align-grad-reduce",
    "delay-param-gather": "--no-align-param-gather",
    "dist-ckpt-format": "--ckpt-format",
    "distribute-checkpointed-activations": "--distribute-saved-activations",
    "enable-cuda-graph": "--cuda-graph-impl local",
    "epochs": "--train-iters or --train-samples",
    "external-cuda-graph": "--cuda-graph-impl transformer_engine",
    "fp8-e4m3": "--fp8-format e4m3",
    "fp8-hybrid": "--fp8-format hybrid",
    "fp32-allreduce": "--accumulate-allreduce-grads-in-fp32",
    "fp32-embedding": "none",
    "fp32-layernorm": "none",
    "fp32-tokentypes": "none",
    "gas": "none: --global-batch-size / (--micro-batch-size x copies)",
    "glu-activation": "--swiglu",
    "lazy-loader": "none: files are always mapped into memory",
    "load-all-rng": "none: the default (--no-load-rng)",
    "load-optim": "none: the default (--no-load-optim)",
    "load-rng": "none: the default (--no-load-rng)",
    "log-batch-size-to-tensorboard": "none: always written",
    "log-learning-rate-to-tensorboard": "none: always written",
    "loose-json": "none: tools/preprocess_data.py",
    "mmap-warmup": "none",
    "moe-extended-tp": "--expert-tensor-parallel-size",
    "moe-layer-recompute": "--recompute-modules moe",
    "no-async-tensor-model-parallel-allreduce": "none",
    "no-contiguous-buffers-in-local-ddp": "none: there is one implementation",
    "no-delay-grad-reduce": "--no-align-grad-reduce",
    "no-log-learnig-rate-to-tensorboard": "none: always written",
    "no-position-embedding": "--position-embedding-type rope or none",
    "no-query-key-layer-scaling": "none: the default (--apply-query-key-layer-scaling)",
    "num-attention-heads-kv": "--group-query-attention --num-query-groups",
    "num-key-value-heads": "--group-query-attention --num-query-groups",
    "num-microbatches": "none: --global-batch-size / (--micro-batch-size x copies)",
    "num-microbatches-in-minibatch": "none: --global-batch-size / (--micro-batch-size x copies)",
    "overlap-p2p-communication": "none: the default (--no-overlap-p2p-communication)",
    "override-lr-scheduler": "--override-opt_param-scheduler",
    "pipeline-model-parallel-split-rank": "none",
    "reduce-scatter-buffer-size": "--ddp-bucket-size",
    "resume-dataloader": "none: always",
    "save-all-rng": "none: the default (--no-save-rng)",
    "save-optim": "none: the default (--no-save-optim)",
    "save-rng": "none: the default (--no-save-rng)",
    "scatter-gather-tensors-in-pipeline": "none: the default",
    "standalone-embedding-stage": "--pipeline-model-parallel-layout",
    "text-key": "none: tools/preprocess_data.py --json-keys",
    "use-checkpoint-lr-scheduler": "--use-checkpoint-opt_param-scheduler",
    "use-contiguous-buffers-in-ddp": "none: there is one implementation",
    "use-contiguous-buffers-in-local-ddp": "none: there is one implementation",
    "use-custom-fsdp": "--use-megatron-fsdp",
    "use-dist-ckpt": "--ckpt-format torch_dist",
    "use-flash-attn": "--attention-backend flash",
    "use-mcore-models": "none: the default",
    "use-rms-norm": "--normalization RMSNorm",
    "use-rotary-position-embeddings": "--position-embedding-type rope",
}
"""Old name -> modern name, or "none" and why."""


CHANGES_RESULT: dict[str, str] = {
    "weights to start from: stages.import_model, then training.initial_weights": (
        "finetune load-main-params-from-ckpt load-openai pretrained-* pretrained-checkpoint "
        "reset-iteration reset-progress"
    ),
    "fp8 and fp4: products are in bf16 here": (
        "activation-func-fp8-* disable-parameter-transpose-cache first-last-layers-bf16 fp4-* "
        "quant-recipe tp-only-amax-red cache-fp8-* "
        "fp8-* keep-fp8-* kitchen-* moe-router-padding-for-* no-fp8-* num-layers-at-end-in-bf16 "
        "num-layers-at-start-in-bf16 reuse-grad-buf-for-mxfp8-* use-kitchen*"
    ),
    "other number types: gradients and master weights are fp32 here": (
        "exp-avg-dtype exp-avg-sq-dtype fp16-lm-cross-entropy fp32-residual-connection "
        "grad-reduce-in-bf16 main-grads-dtype main-params-dtype params-dtype "
        "store-param-remainders use-bnb-optimizer use-precision-aware-optimizer"
    ),
    "mixture of experts: layers here have one MLP": (
        "first-k-dense-replace n-shared-experts norm-topk-prob "
        "create-moe-param-group disable-moe-* enable-expert-* ep-overlap-* expert-* mlp-type "
        "moe-* num-experts overlap-moe-* topk use-tutel"
    ),
    "multi-latent attention: not here": (
        "beta-fast beta-slow cache-mla-latents kv-lora-rank mscale mscale-all-dim "
        "multi-latent-attention original-max-position-embeddings q-lora-rank qk-head-dim "
        "qk-pos-emb-head-dim rotary-scaling-factor v-head-dim"
    ),
    "prediction of several tokens: not here": ("mtp-*"),
    "layers of another kind: only attention and MLP here": (
        "csa-* o-groups o-lora-rank "
        "disable-mamba-* dsa-* experimental-attention-variant heterogeneous-* hybrid-* "
        "is-hybrid-model linear-* mamba-* spec use-mamba-*"
    ),
    "another attention or position: not here": (
        "attention-output-gate mrope-section no-rope-freq qk-clip* qk-l2-norm "
        "relative-attention-* rope-* rope-scaling-factor rotary-interleaved sparsity "
        "rotary-seq-len-interpolation-factor sliding-window-size softmax-scale softmax-type "
        "use-alibi-position-embeddings use-rope-scaling window-attn-skip-freq window-size"
    ),
    "another layer: not here": (
        "activation-func-clamp-value apply-layernorm-1p "
        "apply-residual-connection-post-layernorm drop-path-rate embed-layernorm geglu "
        "glu-linear-offset layernorm-1p liglu lima-dropout parallel-attn parallel-layernorm "
        "quick-geglu reglu squared-relu use-post-ln xielu"
    ),
    "another start of the weights: normal with model.init_std here": (
        "data-parallel-random-init embedding-init-method-* init-method-xavier-uniform"
    ),
    "another optimizer or rate: AdamW with one rate and one weight decay here": (
        "adaptive-muon-* ademamix-* apply-wd-to-qk-layernorm cpu-optimizer cpu-torch-adam "
        "decoupled-lr decoupled-min-lr dump-param-to-param-group-map end-weight-decay "
        "head-lr-mult mup-* muon-* optimizer-* sgd-momentum start-weight-decay "
        "use-mup use-torch-optimizer-for-cpu-offload weight-decay-incr-style"
    ),
    "models other than a decoder of text: not here": (
        "bert-* biencoder-* block-data-path classes-fraction data-per-class-fraction decoder-* "
        "deep-init "
        "dino-* embedding-path encoder-* evidence-data-path ict-* img-* indexer-* "
        "iter-per-epoch mask-* max-preds-per-seq no-data-sharding num-channels num-classes "
        "output-bert-* patch-dim prefix-lm-* query-in-block-prob retriever-* retro-* "
        "short-seq-prob swin-* titles-data-path tokentype-size use-one-sent-docs use-prefix-lm "
        "use-tfrecords vision-*"
    ),
    "learning by rewards or from conversations: not here": (
        "norm-target-loss "
        "data-type grpo-* instruct-* langrl-* loss-on-targets-only no-langrl-* no-rl-* "
        "perform-rl-step "
        "pad-packed-seq-alignment reweight-loss-* rl-* scalar-loss-mask sequence-packing-scheduler "
        "sft sft-* use-varlen-dataset variable-seq-lengths varlen-*"
    ),
    "another mix of the data: not here": (
        "curriculum-* data-efficiency-* disable-doc-shuffling fim-* goldfish-* goldfish-loss "
        "iterations-to-skip no-seq-len-plus-one-tokens phase-transition-* random-ltd* "
        "repeated-dataloader return-data-index sample-rate skip-train-iteration-range "
        "train-data-exact-num-epochs train-desc-path train-doc-idx-path "
        "train-idx-path train-sample-idx-path train-shuffle-idx-path"
    ),
    "a list of data in another file, which is not read: write data.imported and data.blend": (
        "*-weighted-split-paths *-weighted-split-paths-path data-args-path per-split-data-args-path"
    ),
    "data and tokenizer that a fork prepares by itself: write the sections data and tokenizer": (
        "dataset max-padding-length patch-tokenizer-type train-mode"
    ),
    "another loss: training.z_loss is one factor of it here": ("use-z-loss"),
    "made-up data: the corpora of params.yaml are read instead": ("mock-data"),
    "learning from a teacher: not here": (
        "*-teacher distill* export-kd-* hidden-size-teacher kd kd-* load-teacher mos "
        "num-attention-heads-teacher num-experts-teacher num-layers-teacher teacher-*"
    ),
}
"""Why -> flags."""

CHANGES_NOTHING: dict[str, str] = {
    "output: log lines, results/ and plots are this project's own": (
        "app-tag-* codecarbon-dir config-logger-dir enable-one-logger log-* logging-level "
        "metrics moe-per-layer-logging no-barrier-with-level-1-timing no-log-* no-one-logger "
        "one-logger-* structured-logs* tensorboard-* timing-log-* transformer-timer-* wandb-*"
    ),
    "profiling: docs/performance.md says how": (
        "disable-straggler-on-startup memory-snapshot-path nvtx-ranges profile profile-* "
        "pytorch-profiler-* record-memory-history run-workload-inspector-server straggler-* "
        "use-pytorch-profiler"
    ),
    "checkpoints lie in state/, and a run goes on from there by itself": (
        "no-shared-storage "
        "async-ckpt-* async-strategy auto-detect-ckpt-format ckpt-* dist-ckpt-* "
        "distrib-optim-fully-reshardable-* exit-on-missing-checkpoint load load-iteration "
        "load-tag no-ckpt-fully-parallel-* no-initialization no-load-lr-state no-load-optim "
        "no-load-rng no-save-optim no-save-rng no-strict-fsdp-* "
        "no-use-tokenizer-model-from-checkpoint-args non-persistent-* "
        "override-opt-param-scheduler replication replication-* save universal-checkpoint "
        "use-checkpoint-args use-checkpoint-opt-param-scheduler "
        "use-gcp-dynamic-checkpointing "
        "use-mp-args-from-checkpoint-args use-persistent-ckpt-worker verify-checkpoint*"
    ),
    "Ctrl-C and SIGTERM save and stop; raise training.train_iters later to go on": (
        "adlr-autoresume adlr-autoresume-interval calc-ft-timeouts enable-ft-package "
        "eval-loss-exit-value exit-duration-in-mins exit-interval exit-signal "
        "exit-signal-handler exit-signal-handler-* ft-* inprocess-* kill-switch-*"
    ),
    "checks and repeats of its own: a run here stops at a loss that is no number": (
        "abort-on-unmet-fused-kernel-constraints check-* error-injection-* "
        "no-check-for-nan-in-loss-and-grad rerun-mode result-rejected-tracker-filename"
    ),
    "TransformerEngine is not used: kernels are this project's own (runtime.kernels)": (
        "te-* transformer-impl use-te-* use-transformer-engine"
    ),
    "which operations are fused is up to runtime.kernels alone": (
        "apply-rope-fusion bias-dropout-fusion bias-gelu-fusion cross-entropy-fusion-impl "
        "cross-entropy-loss-fusion fused-* gradient-accumulation-fusion masked-softmax-fusion "
        "memory-efficient-layer-norm no-bias-dropout-fusion no-bias-gelu-fusion "
        "no-bias-swiglu-fusion no-gradient-accumulation-fusion no-masked-softmax-fusion "
        "no-persist-layer-norm no-rope-fusion onnx-safe compiled-autograd-fallback-mode "
        "use-fast-softmax use-fused-* use-torch-compile use-torch-compiled-autograd"
    ),
    "softmax, sums of gradients and the loss are in fp32 here in any case": (
        "accumulate-allreduce-grads-in-fp32 apply-query-key-layer-scaling "
        "attention-softmax-in-fp32 ddp-reduce-scatter-with-fp32-accumulation "
        "disable-bf16-reduced-precision-matmul"
    ),
    "communication is overlapped and sized here without being told": (
        "create-all-gather-group ddp-* defer-embedding-wgrad-compute delay-wgrad-compute "
        "disable-gloo-process-groups disable-symmetric-registration disable-tp-comm-* "
        "distribute-saved-activations distributed-backend distributed-timeout-* "
        "enable-full-sharding-in-hsdp "
        "enable-gloo-process-groups fsdp-* gradient-reduce-div-fusion "
        "high-priority-stream-groups init-model-with-meta-device lazy-mpu-init local-rank "
        "microbatch-group-size-per-virtual-pipeline-stage nccl-* no-align-* "
        "no-gradient-reduce-div-fusion no-overlap-* no-scatter-gather-tensors-in-pipeline "
        "outer-dp-sharding-strategy overlap-* pipeline-model-parallel-comm-backend "
        "sharp-enabled-group suggested-communication-unit-size torch-fsdp2-* tp-comm-* "
        "use-mpi use-nccl-ub use-ring-exchange-p2p use-sharp use-tp-pp-dp-mapping "
        "wgrad-deferral-limit"
    ),
    "layers are dealt out so that no chunk is slow, or by parallel.layers_per_chunk": (
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split "
        "no-pipeline-parallel pipeline-model-parallel-layout pp-partition-method"
    ),
    "context parallelism: not here; parallel.sequence and runtime.recompute save memory": (
        "context-parallel-size cp-comm-type ds-sequence-parallel-* dynamic-context-parallel "
        "force-ds-sequence-parallel "
        "hierarchical-context-parallel-sizes hybrid-context-parallel max-seqlen-per-dp-cp-rank "
        "min-dynamic-context-parallel-size"
    ),
    "initial weights do not depend on the layout here in any case": ("use-cpu-initialization"),
    "memory and garbage are handled by themselves": (
        "clone-scatter-output-in-embedding cpu-offload* cpu-offloading cpu-offloading-* "
        "empty-unused-memory-level fine-grained-* manual-gc manual-gc-interval "
        "min-offloaded-tensor-size no-clone-scatter-output-in-embedding no-manual-gc-eval "
        "no-pin-cpu-* offload-* recompute-modules train-sync-interval"
    ),
    "generation of text: docs/pipeline.md and stages.evaluate": (
        "use-inference-optimized-layers genfile greedy "
        "cuda-graph-* decode-only-* disable-chunked-prefill ds-inference eval-batch-size "
        "flash-decode inference inference-* max-tokens-to-oom mlp-chunks-for-prefill "
        "nccl-all-reduce-* num-samples out-seq-length recompute sample-input-file "
        "sample-output-file symmetric-ar-type temperature top-k top-p use-legacy-static-engine"
    ),
    "the order of the data is computed here: no index files, one reader": (
        "allow-ambiguous-pad-tokens aml-data-download-path cache-dir data-cache-path data-epochs "
        "data-loader data-sharding dataloader-* dataloader-type delim disable-msc eval-text-key "
        "input-data-sizes-file max-num-samples presplit-sentences shuffle skip-mmap-warmup "
        "mid-level-dataset-surplus mmap-bin-files no-create-attention-mask-in-dataloader "
        "no-mmap-bin-files num-dataset-builder-threads object-storage-cache-path s3-cache-path "
        "valid-num-workers"
    ),
    "evaluation: each corpus of data.validation is measured by itself": (
        "cloze-eval eval-hf eval-max-preds-per-seq eval-only eval-seq-length full-validation "
        "multiple-validation-sets overlapping-eval skip-train strict-lambada test-mode"
    ),
    "the tokenizer's files say it": (
        "extra-vocab-size force-system-message image-tag-type legacy-tokenizer no-new-tokens "
        "pad-vocab-size-to padded-vocab-size tiktoken-* tokenizer-metadata tokenizer-model-type "
        "trust-remote-code vocab-extra-ids vocab-extra-ids-list vocab-size"
    ),
    "DeepSpeed is not used: parallel.sharding splits what ZeRO splits": (
        "checkpoint-in-cpu compression-training deepscale deepscale-* deepspeed deepspeed-* "
        "enable-zbh1-* memory-centric-tiled-linear no-zero-* partition-activations "
        "profile-backward remote-device split-transformers synchronize-each-layer tile-factor "
        "use-pin-memory zero-*"
    ),
    "settings of its own program": (
        "use-legacy-models "
        "batch-invariant-mode decrease-batch-size-if-needed enable-experimental enable-msc "
        "model-name yaml-cfg"
    ),
    "always so here": ("calculate-per-token-loss"),
}
"""Why -> flags."""
