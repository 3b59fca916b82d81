"""The arguments of the stand-in, as strict as the real ones: unknown flags and impossible values end it."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

INTEGERS = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "kv-channels"),
    *("seq-length", "max-position-embeddings", "micro-batch-size", "global-batch-size", "train-iters", "seed"),
    *("lr-decay-iters", "lr-warmup-iters", "tensor-model-parallel-size", "pipeline-model-parallel-size"),
    *("context-parallel-size", "recompute-num-layers", "log-interval", "timing-log-level", "eval-interval"),
    *("eval-iters", "distributed-timeout-minutes", "max-seqlen-per-dp-cp-rank", "vocab-size", "num-workers"),
    *("null-tokenizer-pad-id", "min-dynamic-context-parallel-size", "rotary-base"),
)
FLOATS = (
    *("attention-dropout", "hidden-dropout", "norm-epsilon", "init-method-std", "lr", "min-lr", "weight-decay"),
    *("clip-grad", "adam-beta1", "adam-beta2", "adam-eps"),
)
WORDS = {
    "transformer-impl": ("transformer_engine", "local"),
    "attention-backend": ("flash", "fused", "unfused", "local", "auto"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "position-embedding-type": ("learned_absolute", "rope", "none"),
    "lr-decay-style": ("constant", "linear", "cosine"),
    "cuda-graph-impl": ("none", "local", "transformer_engine"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "dataloader-type": ("single", "cyclic", "external"),
    "distributed-backend": ("nccl", "gloo"),
    "sequence-packing-scheduler": ("dp_balanced", "default_dynamic_cp"),
    "tokenizer-type": ("NullTokenizer", "SFTTokenizer", "HuggingFaceTokenizer"),
}
TEXTS = (
    *("split", "data-cache-path", "data-path", "tensorboard-dir", "varlen-mock-dataset-config-json", "load"),
    *("tokenizer-model", "sft-tokenizer-prompt-format", "standin-fault"),
)
SWITCHES = (
    *("bf16", "swiglu", "disable-bias-linear", "group-query-attention", "untie-embeddings-and-output-weights"),
    *("calculate-per-token-loss", "no-gradient-accumulation-fusion", "sequence-parallel", "use-varlen-dataset"),
    *("mock-data", "log-throughput", "overlap-grad-reduce", "use-distributed-optimizer", "deterministic-mode"),
    *("dynamic-context-parallel", "finetune", "exit-on-missing-checkpoint", "no-create-attention-mask-in-dataloader"),
)


def parse(world_size: int) -> argparse.Namespace:
    """The arguments, checked as the real ones are."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in INTEGERS:
        parser.add_argument(f"--{name}", type=int)
    for name in FLOATS:
        parser.add_argument(f"--{name}", type=float)
    for name, choices in WORDS.items():
        parser.add_argument(f"--{name}", choices=choices)
    for name in TEXTS:
        parser.add_argument(f"--{name}")
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    check(args, world_size)
    return args


def check(args: argparse.Namespace, world_size: int) -> None:
    """The rules that a spec could break."""
    cp = args.context_parallel_size
    ranks = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * cp
    assert world_size % ranks == 0, "world size"
    dp = world_size // ranks
    assert args.global_batch_size % (args.micro_batch_size * dp) == 0, "global batch size"
    assert args.seq_length % (2 * cp) == 0, "sequence length"
    assert args.max_position_embeddings >= args.seq_length, "position embeddings"
    assert args.calculate_per_token_loss, "per-token loss"
    assert args.dataloader_type == "single", "dataloader"
    assert args.dynamic_context_parallel == (args.sequence_packing_scheduler == "default_dynamic_cp"), "scheduler"
    assert args.dynamic_context_parallel == (args.min_dynamic_context_parallel_size is not None), "smallest size"
    held = cp * (dp if args.dynamic_context_parallel else 1)
    assert held * args.max_seqlen_per_dp_cp_rank >= args.seq_length, "Packed sequence buffer size"
    assert (args.min_dynamic_context_parallel_size or 1) <= dp * cp, "smallest size"
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1", "CUDA_DEVICE_MAX_CONNECTIONS"
    assert not any(name.endswith("_ATTN") and name.startswith("NVTE_") for name in os.environ), "NVTE_*_ATTN"
    deterministic = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
    assert deterministic == args.deterministic_mode, "deterministic mode"
    assert args.mock_data != (args.data_path is not None), "one data source"
    if args.mock_data:
        assert args.eval_iters >= 1, "no sample to consume"
        config = json.loads(args.varlen_mock_dataset_config_json)
        if config["mode"] == "file":
            first, *lengths = Path(config["path"]).read_text().split()
            assert not first.isdigit(), "the first line is lost"
            longest = max(map(int, lengths[: len(lengths) // 3]))
        else:
            assert config["type"] == "lognormal", "distribution"
            longest = config["max_seq_len"]
        assert longest < args.vocab_size, "vocabulary"
