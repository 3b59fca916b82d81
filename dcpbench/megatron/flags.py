"""A spec as the argument list of Megatron-LM's `pretrain_gpt.py`. Pure: reads and starts nothing.

Both cases get one list; `case_flags` is all in which they differ, apart from the folder that each
launch writes its event files to. Flag names and defaults: Megatron-LM, branch `dev`, commit d48bd6be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from dcpbench.errors import SpecError
from dcpbench.spec import ListData, LognormalData, Model, Spec, TextData, Topology, Training, UniformData

LENGTHS_FILE = "lengths.csv"
"""In the folder of prepared data: the sample lengths of mock data that Megatron-LM cannot draw by itself."""

_FIELDS = {
    "model.layers": ("--num-layers", "--encoder-num-layers", "--decoder-num-layers"),
    "model.hidden_size": ("--hidden-size",),
    "model.ffn_hidden_size": ("--ffn-hidden-size",),
    "model.attention_heads": ("--num-attention-heads",),
    "model.kv_heads": ("--group-query-attention", "--num-query-groups"),
    "model.head_dim": ("--kv-channels",),
    "model.vocab_size": ("--vocab-size", "--padded-vocab-size", "--make-vocab-size-divisible-by"),
    "model.max_position_embeddings": ("--max-position-embeddings",),
    "model.rope_theta": ("--rotary-base", "--rotary-percent", "--use-rope-scaling"),
    "model.norm_eps": ("--norm-epsilon",),
    "model.tie_embeddings": ("--untie-embeddings-and-output-weights",),
    "model.init_std": ("--init-method-std", "--init-method-xavier-uniform", "--embedding-init-method-std"),
    "model.flavour": (
        *("--swiglu", "--squared-relu", "--quick-geglu", "--normalization", "--disable-bias-linear"),
        *("--position-embedding-type", "--use-rotary-position-embeddings", "--no-position-embedding"),
        *("--attention-dropout", "--hidden-dropout", "--spec", "--num-experts", "--multi-latent-attention"),
    ),
    "topology.tp": ("--tensor-model-parallel-size", "--sequence-parallel"),
    "topology.pp": (
        *(
            "--pipeline-model-parallel-size",
            "--num-layers-per-virtual-pipeline-stage",
            "--pipeline-model-parallel-layout",
        ),
        *("--num-virtual-stages-per-pipeline-rank", "--microbatch-group-size-per-virtual-pipeline-stage"),
    ),
    "topology.cp": ("--context-parallel-size", "--hierarchical-context-parallel-sizes"),
    "topology.device": ("--distributed-backend",),
    "training.iterations": (
        *("--train-iters", "--train-samples", "--exit-interval", "--exit-duration-in-mins", "--skip-train"),
        *("--lr-decay-iters", "--lr-decay-samples", "--eval-interval", "--eval-iters", "--iterations-to-skip"),
        *(
            "--log-interval",
            "--log-throughput",
            "--timing-log-level",
            "--tensorboard-dir",
            "--tensorboard-log-interval",
        ),
    ),
    "training.global_batch_size": (
        *("--global-batch-size", "--micro-batch-size", "--rampup-batch-size", "--step-batch-size-schedule"),
        *("--decrease-batch-size-if-needed", "--eval-global-batch-size", "--eval-micro-batch-size"),
    ),
    "training.seed": ("--seed", "--data-parallel-random-init"),
    "training.dtype": ("--bf16", "--fp16", "--fp8-format", "--fp4-format"),
    "training.lr": ("--lr", "--lr-decay-style", "--optimizer", "--decoupled-lr"),
    "training.min_lr": ("--min-lr", "--decoupled-min-lr"),
    "training.lr_warmup_iterations": (
        *("--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-fraction", "--lr-warmup-init"),
    ),
    "training.weight_decay": (
        *("--weight-decay", "--start-weight-decay", "--end-weight-decay", "--weight-decay-incr-style"),
    ),
    "training.adam_beta1": ("--adam-beta1",),
    "training.adam_beta2": ("--adam-beta2",),
    "training.adam_eps": ("--adam-eps",),
    "training.clip_grad": ("--clip-grad",),
    "training.deterministic": ("--deterministic-mode",),
    "training.recompute": (
        *("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-modules"),
        "--recompute-activations",
    ),
    "training.overlap_gradient_reduction": ("--overlap-grad-reduce",),
    "training.optimizer_sharding": ("--use-distributed-optimizer",),
    "training.load_path": (
        *("--load", "--finetune", "--exit-on-missing-checkpoint", "--no-load-optim", "--no-load-rng", "--ckpt-step"),
        *("--pretrained-checkpoint", "--use-checkpoint-args"),
    ),
    "training.save_path": ("--save", "--save-interval"),
    "data": (
        *("--use-varlen-dataset", "--varlen-mock-dataset-config-json", "--varlen-sbhd-validation", "--mock-data"),
        *("--data-path", "--data-args-path", "--per-split-data-args-path", "--train-data-path", "--valid-data-path"),
        *("--test-data-path", "--split", "--data-cache-path", "--dataloader-type", "--num-workers", "--sft"),
        *("--sft-mock-dataset-config-json", "--no-create-attention-mask-in-dataloader", "--reset-position-ids"),
        *("--reset-attention-mask", "--seq-length", "--encoder-seq-length", "--decoder-seq-length"),
    ),
    "data.tokenizer": (
        *("--tokenizer-type", "--tokenizer-model", "--null-tokenizer-pad-id", "--null-tokenizer-eod-id"),
        *("--vocab-file", "--merge-file"),
    ),
    "megatron.prompt_format": ("--sft-tokenizer-prompt-format",),
    "megatron.attention_backend": (*("--attention-backend", "--transformer-impl", "--use-flash-attn"),),
    "cases": (
        *("--dynamic-context-parallel", "--hybrid-context-parallel", "--sequence-packing-scheduler"),
        *("--calculate-per-token-loss", "--cuda-graph-impl", "--enable-cuda-graph", "--external-cuda-graph"),
        *("--pad-packed-seq-alignment", "--thd-max-packed-sequences", "--thd-tail-padding-policy"),
        *("--no-gradient-accumulation-fusion", "--use-megatron-fsdp", "--cp-partition-mode"),
    ),
    "cases.max_seqlen_per_dp_cp_rank": ("--max-seqlen-per-dp-cp-rank",),
    "cases.min_dynamic_context_parallel_size": ("--min-dynamic-context-parallel-size",),
    "launches.collective_timeout": ("--distributed-timeout-minutes", "--distributed-timeout-seconds-after-init"),
}
CONTROLLED: dict[str, str] = {flag: field for field, flags in _FIELDS.items() for flag in flags}
"""Every flag that a field of the spec decides, also those that it decides by leaving them out."""


def arguments(spec: Spec, case: str, *, folder: Path, data: Path) -> list[str]:
    """What follows `pretrain_gpt.py`, for one launch.

    Args:
        spec: what to train.
        case: `baseline` or `dcp`.
        folder: the launch's own folder, absolute; event files go to `tensorboard/` in it.
        data: the folder of prepared data, absolute, with `LENGTHS_FILE` where the data need it.

    Raises:
        SpecError: an extra flag is one that the spec decides.
    """
    if conflicts := extra_flag_conflicts(spec.megatron.extra_flags):
        raise SpecError("; ".join(conflicts))
    return [
        *_model(spec.model, sequence_length(spec)),
        *_topology(spec.topology),
        *_training(spec.training),
        *_data(spec, data),
        *_logging(spec, folder),
        *("--distributed-backend", "nccl"),
        *("--distributed-timeout-minutes", str(max(1, math.ceil(spec.launches.collective_timeout / 60)))),
        *("--transformer-impl", "transformer_engine", "--attention-backend", spec.megatron.attention_backend),
        *("--calculate-per-token-loss", "--no-gradient-accumulation-fusion", "--cuda-graph-impl", "none"),
        *("--max-seqlen-per-dp-cp-rank", str(spec.cases.max_seqlen_per_dp_cp_rank)),
        *spec.megatron.extra_flags,
        *case_flags(spec, case),
    ]


def case_flags(spec: Spec, case: str) -> list[str]:
    """The flags that make the case."""
    if case == "baseline":
        return ["--sequence-packing-scheduler", "dp_balanced"]
    smallest = str(spec.cases.min_dynamic_context_parallel_size)
    return [
        *("--sequence-packing-scheduler", "default_dynamic_cp", "--dynamic-context-parallel"),
        *("--min-dynamic-context-parallel-size", smallest),
    ]


def extra_flag_conflicts(extra: Sequence[str]) -> list[str]:
    """A sentence for each extra argument that is none, or that names a flag of `CONTROLLED`.

    argparse takes any beginning of a flag for the flag, so beginnings count too.
    """
    found: list[str] = []
    if extra and not extra[0].startswith("--"):
        found.append(f"megatron.extra_flags must begin with a flag, not with {extra[0]!r}")
    for word in extra:
        if not word.startswith("--"):
            continue
        name = word.partition("=")[0].replace("_", "-")
        hit = name if name in CONTROLLED else next((flag for flag in CONTROLLED if flag.startswith(name)), None)
        if hit is not None:
            meant = "" if hit == name else f" (a beginning of {hit})"
            found.append(f"megatron.extra_flags: {name}{meant} is decided by {CONTROLLED[hit]}; set that instead")
    return found


def sequence_length(spec: Spec) -> int:
    """`--seq-length`: tokens of the longest sample that may come, a multiple of 2 x CP that the baseline can hold.

    Megatron-LM demands CP x capacity >= seq_length, and cuts samples that are longer than it.
    """
    granularity = 2 * spec.topology.cp
    most = spec.cases.max_seqlen_per_dp_cp_rank * spec.topology.cp // granularity * granularity
    data = spec.data
    longest: int | None = None
    if isinstance(data, LognormalData | UniformData | TextData):
        longest = data.max_length
    elif isinstance(data, ListData):
        longest = max(data.lengths)
    if longest is None:
        return most
    return min(most, math.ceil(longest / granularity) * granularity)


def draws_its_own_lengths(spec: Spec) -> bool:
    """Whether Megatron-LM's mock makes the very lengths of the spec by itself: lognormal, of its fixed seed 0."""
    return isinstance(spec.data, LognormalData) and spec.data.seed == 0


def _model(model: Model, length: int) -> list[str]:
    flags = [
        *("--num-layers", str(model.layers), "--hidden-size", str(model.hidden_size)),
        *("--ffn-hidden-size", str(model.ffn_hidden_size), "--num-attention-heads", str(model.attention_heads)),
        *("--kv-channels", str(model.dim), "--norm-epsilon", _number(model.norm_eps)),
        *("--init-method-std", _number(model.init_std), "--seq-length", str(length)),
        *("--max-position-embeddings", str(model.max_position_embeddings or length)),
        *("--attention-dropout", "0.0", "--hidden-dropout", "0.0"),
    ]
    if model.kv != model.attention_heads:
        flags += ["--group-query-attention", "--num-query-groups", str(model.kv)]
    if model.flavour == "modern":
        flags += ["--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"]
        flags += ["--position-embedding-type", "rope", "--rotary-base", str(int(model.rope_theta))]
    else:
        flags += ["--normalization", "LayerNorm", "--position-embedding-type", "learned_absolute"]
    return flags if model.tied else [*flags, "--untie-embeddings-and-output-weights"]


def _topology(topology: Topology) -> list[str]:
    flags = [
        *("--tensor-model-parallel-size", str(topology.tp), "--pipeline-model-parallel-size", str(topology.pp)),
        *("--context-parallel-size", str(topology.cp)),
    ]
    return [*flags, "--sequence-parallel"] if topology.tp > 1 else flags


_RECOMPUTE: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": ("--recompute-granularity", "selective"),
    "full": ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
}


def _training(training: Training) -> list[str]:
    flags = [
        *("--micro-batch-size", "1", "--global-batch-size", str(training.global_batch_size)),
        *("--train-iters", str(training.iterations), "--seed", str(training.seed), "--bf16"),
        *("--lr", _number(training.lr), "--min-lr", _number(training.min_lr), "--lr-decay-style", "cosine"),
        *("--lr-decay-iters", str(training.iterations), "--lr-warmup-iters", str(training.lr_warmup_iterations)),
        *("--weight-decay", _number(training.weight_decay), "--clip-grad", _number(training.clip_grad)),
        *("--adam-beta1", _number(training.adam_beta1), "--adam-beta2", _number(training.adam_beta2)),
        *("--adam-eps", _number(training.adam_eps)),
        *_RECOMPUTE[training.recompute],
    ]
    if training.overlap_gradient_reduction:
        flags.append("--overlap-grad-reduce")
    if training.optimizer_sharding:
        flags.append("--use-distributed-optimizer")
    if training.deterministic:
        flags.append("--deterministic-mode")
    if training.load_path is not None:
        # --finetune: start at iteration 0, without the checkpoint's optimizer and random state
        flags += ["--load", str(training.load_path.absolute()), "--finetune", "--exit-on-missing-checkpoint"]
    return flags


def _data(spec: Spec, folder: Path) -> list[str]:
    data = spec.data
    flags = ["--use-varlen-dataset", "--data-cache-path", str(folder / "megatron-cache")]
    flags += ["--dataloader-type", "single", "--num-workers", "0"]
    if isinstance(data, TextData):
        plain = data.text_column is not None
        return [
            *flags,
            *("--data-path", str(data.path.absolute()), "--split", "100,0,0", "--eval-iters", "0"),
            "--no-create-attention-mask-in-dataloader",
            *("--tokenizer-type", "HuggingFaceTokenizer" if plain else "SFTTokenizer"),
            *("--tokenizer-model", str(Path(data.tokenizer).absolute())),
            *(() if plain else ("--sft-tokenizer-prompt-format", spec.megatron.prompt_format)),
        ]
    return [
        *flags,
        # Mock data are divided into thirds whatever --split says, and an evaluation of none of them fails.
        *("--mock-data", "--split", "99,1,0", "--eval-iters", "1"),
        *("--varlen-mock-dataset-config-json", json.dumps(_mock(spec, folder), separators=(",", ":"))),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(spec.model.vocab_size)),
        *("--null-tokenizer-pad-id", "0"),
    ]


def _mock(spec: Spec, folder: Path) -> dict[str, str | int | float]:
    data = spec.data
    if isinstance(data, LognormalData) and draws_its_own_lengths(spec):
        return {
            "mode": "distribution",
            "type": "lognormal",
            "format": "thd",
            "min_seq_len": data.min_length,
            "max_seq_len": data.max_length,
            "mean_seq_len": data.mean,
            "lognormal_sigma": data.sigma,
        }
    return {"mode": "file", "path": str(folder / LENGTHS_FILE), "format": "thd"}


def _logging(spec: Spec, folder: Path) -> list[str]:
    return [
        *("--log-interval", "1", "--log-throughput", "--timing-log-level", "0"),
        # Never within training: the one evaluation of mock data comes after the last iteration.
        *("--eval-interval", str(spec.training.iterations + 1)),
        *("--tensorboard-dir", str(folder / "tensorboard")),
    ]


def _number(value: float) -> str:
    return repr(float(value))
