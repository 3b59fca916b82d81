"""What the user asks for: one immutable pydantic tree, unknown keys forbidden.

Field names are the words of the field; lengths and capacities are in tokens, times in seconds.
A spec knows nothing of the machine it will run on: what depends on it is `preflight.py`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

CASES: tuple[str, str] = ("baseline", "dcp")
FEWEST_TO_REFIT = 8
"""Iterations that a refit of the cost profile needs."""


class Section(BaseModel):
    """A part of the spec: frozen, no unknown keys, defaults checked, no input echoed in errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True, allow_inf_nan=False
    )


class Model(Section):
    """The dense decoder-only GPT that both cases train."""

    flavour: Literal["modern", "classic"] = Field(
        "modern",
        description="modern: RMSNorm, RoPE, SwiGLU, grouped KV heads, no biases. "
        "classic: LayerNorm, learned positions, GELU, biases.",
    )
    layers: int = Field(2, ge=1, description="Transformer blocks.")
    hidden_size: int = Field(64, ge=1, description="Width of the residual stream.")
    ffn_hidden_size: int = Field(256, ge=1, description="Inner width of the feed-forward network.")
    attention_heads: int = Field(4, ge=1, description="Query heads.")
    kv_heads: int | None = Field(None, ge=1, description="Key/value heads; default: as many as query heads.")
    head_dim: int | None = Field(None, ge=2, description="Width of one head; default: hidden_size / attention_heads.")
    vocab_size: int = Field(512, ge=2, description="Number of token ids.")
    max_position_embeddings: int | None = Field(
        None, ge=1, description="Rows of the learned position table (classic); default: the longest sample."
    )
    rope_theta: float = Field(10_000.0, gt=0, description="RoPE base (modern).")
    norm_eps: float = Field(1e-5, gt=0, description="Epsilon of the normalisation layers.")
    tie_embeddings: bool | None = Field(
        None, description="Share input and output embeddings; default: true for classic, false for modern."
    )
    init_std: float = Field(0.02, gt=0, description="Standard deviation of the initial weights.")

    @property
    def kv(self) -> int:
        """Number of key/value heads."""
        return self.kv_heads or self.attention_heads

    @property
    def dim(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.attention_heads

    @property
    def tied(self) -> bool:
        """Whether input and output embeddings share one matrix."""
        return self.flavour == "classic" if self.tie_embeddings is None else self.tie_embeddings

    @model_validator(mode="after")
    def _shapes(self) -> Model:
        if self.head_dim is None and self.hidden_size % self.attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of attention_heads {self.attention_heads}; "
                "change one or set head_dim"
            )
        if self.attention_heads % self.kv:
            raise ValueError(f"attention_heads {self.attention_heads} is not a multiple of kv_heads {self.kv}")
        if self.flavour == "modern" and self.dim % 2:
            raise ValueError(f"RoPE needs an even head_dim; it is {self.dim}")
        return self


class Topology(Section):
    """How many ranks, and how they are divided. Data parallelism follows: ranks / (TP x CP x PP)."""

    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="auto takes CUDA where there are GPUs; cpu ranks communicate through gloo."
    )
    nodes: int = Field(1, ge=1, description="Number of machines.")
    gpus_per_node: int = Field(4, ge=1, description="Ranks on each machine (GPUs, or processes on CPU).")
    tp: int = Field(1, ge=1, description="Tensor-parallel size.")
    cp: int = Field(4, ge=1, description="Context-parallel size of the baseline.")
    pp: int = Field(1, ge=1, description="Pipeline-parallel size.")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.gpus_per_node

    @property
    def dp(self) -> int:
        """Data-parallel size of the baseline."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def domain_size(self) -> int:
        """Ranks of one DPxCP domain, over which a scheduler distributes samples."""
        return self.dp * self.cp

    @model_validator(mode="after")
    def _divides(self) -> Topology:
        if self.world_size % (self.tp * self.cp * self.pp):
            raise ValueError(
                f"{self.world_size} ranks (nodes x gpus_per_node) cannot be divided into TP {self.tp} x CP {self.cp} "
                f"x PP {self.pp}; make the number of ranks a multiple of {self.tp * self.cp * self.pp}"
            )
        return self


Recompute = Literal["none", "selective", "full"]


class Training(Section):
    """Optimisation; the same in both cases."""

    iterations: int = Field(20, ge=1, description="Optimizer steps of each launch, warm-up included.")
    warmup_iterations: int = Field(5, ge=0, description="First iterations left out of the statistics.")
    global_batch_size: int = Field(16, ge=1, description="Samples of one iteration.")
    seed: int = Field(1234, ge=0, description="Seed of the initial weights.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Compute type; auto is bfloat16 on CUDA and float32 on CPU. Master weights are float32."
    )
    lr: float = Field(1.5e-4, gt=0, description="Peak learning rate.")
    min_lr: float = Field(1e-5, ge=0, description="Learning rate at the end of the cosine.")
    lr_warmup_iterations: int = Field(0, ge=0, description="Iterations of linear learning-rate warm-up.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay; biases and norms are exempt.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW first-moment decay.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW second-moment decay.")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    clip_grad: float = Field(1.0, ge=0, description="Global gradient-norm limit; 0 switches clipping off.")
    deterministic: bool = Field(False, description="Ask every kernel for repeatable results.")
    recompute: Recompute = Field(
        "none",
        description="Activations computed again in the backward: none; selective (norms and activation functions); "
        "full (whole blocks).",
    )
    overlap_gradient_reduction: bool = Field(
        True, description="Sum gradients over ranks while the last microbatch's backward is still running."
    )
    optimizer_sharding: bool = Field(
        False, description="Divide float32 weights and optimizer state over the ranks of the DPxCP domain (ZeRO-1)."
    )
    profile_iterations: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="Iterations of which each rank records a profiler trace; they are slower than the others."
    )
    load_path: Path | None = Field(None, description="Checkpoint both cases start from (torch.distributed.checkpoint).")
    save_path: Path | None = Field(None, description="Folder for the checkpoint each launch writes at its end.")

    @model_validator(mode="after")
    def _window(self) -> Training:
        if self.warmup_iterations >= self.iterations:
            raise ValueError(
                f"warmup_iterations {self.warmup_iterations} leaves nothing to measure of {self.iterations} iterations"
            )
        beyond = [iteration for iteration in self.profile_iterations if iteration > self.iterations]
        if beyond:
            raise ValueError(f"profile_iterations names iteration {beyond[0]} of {self.iterations}")
        return self


class MockTokens(Section):
    """Generated samples: only their lengths come from somewhere."""

    tokens: Literal["counting", "zipf"] = Field(
        "counting",
        description="counting: 1, 2, 3, ... as Megatron-LM's mock data, so the loss soon collapses. "
        "zipf: drawn from a Zipf distribution, different in every sample.",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the length draws and tokens (Megatron-LM's mock uses 0).")


class LognormalData(MockTokens):
    """Lengths as Megatron-LM's mock draws them: lognormal, clipped, truncated to integers."""

    kind: Literal["lognormal"] = "lognormal"
    mean: float = Field(256.0, gt=0, description="Mean of the lognormal before clipping.")
    sigma: float = Field(1.1, ge=0, le=100, description="Sigma of the underlying normal.")
    min_length: int = Field(16, ge=2, description="Shortest sample.")
    max_length: int = Field(1024, ge=2, lt=2**31, description="Longest sample.")

    @model_validator(mode="after")
    def _range(self) -> LognormalData:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length {self.min_length} is above max_length {self.max_length}")
        return self


class UniformData(MockTokens):
    """Lengths uniform in [min_length, max_length]."""

    kind: Literal["uniform"] = "uniform"
    min_length: int = Field(16, ge=2, description="Shortest sample.")
    max_length: int = Field(1024, ge=2, lt=2**31, description="Longest sample.")

    @model_validator(mode="after")
    def _range(self) -> UniformData:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length {self.min_length} is above max_length {self.max_length}")
        return self


class ListData(MockTokens):
    """A fixed list of lengths, repeated when it is exhausted."""

    kind: Literal["list"] = "list"
    lengths: tuple[Annotated[int, Field(ge=2, lt=2**31)], ...] = Field(
        min_length=1, description="The lengths, in order."
    )


class CsvData(MockTokens):
    """Lengths from a CSV file, with or without a header, read row by row."""

    kind: Literal["csv"] = "csv"
    path: Path = Field(description="The CSV file.")
    column: str | None = Field(None, description="Column to read when the file has a header and several columns.")


class TextData(Section):
    """Real text: JSONL or Parquet with `messages`, or with prompt and response columns, or with `text`."""

    kind: Literal["text"] = "text"
    path: Path = Field(description="A .jsonl or .parquet file.")
    messages_column: str | None = Field(None, description="Column that holds chat messages; default: `messages`.")
    prompt_column: str | None = Field(None, description="Column that holds the prompt; goes with response_column.")
    response_column: str | None = Field(None, description="Column that holds the response; goes with prompt_column.")
    text_column: str | None = Field(None, description="Column that holds plain text.")
    tokenizer: str = Field(
        "byte",
        description="`byte` (built in: 256 bytes, an end mark, four role marks) or a Hugging Face tokenizer directory.",
    )
    max_length: int | None = Field(None, ge=2, description="Length limit in tokens; see too_long.")
    too_long: Literal["refuse", "drop", "cut"] = Field("refuse", description="What happens to samples over max_length.")
    loss_on: Literal["all", "response"] = Field(
        "all", description="all: every token is trained on. response: only what the assistant says."
    )

    @model_validator(mode="after")
    def _columns(self) -> TextData:
        if (self.prompt_column is None) != (self.response_column is None):
            raise ValueError("prompt_column and response_column go together; set both or neither")
        if sum(x is not None for x in (self.messages_column, self.prompt_column, self.text_column)) > 1:
            raise ValueError("choose one of messages_column, prompt_column with response_column, and text_column")
        return self


Data = Annotated[
    LognormalData | UniformData | ListData | CsvData | TextData,
    Field(discriminator="kind"),
]


class Case(Section):
    """One side of the comparison."""

    scheduler: str = Field(description="Name of a scheduler of `dcpbench.dcp.schedulers`.")


class Cases(Section):
    """The two cases, and what they share: capacity, padding policy, attention backend."""

    baseline: Case = Case(scheduler="dp_balanced")
    dcp: Case = Case(scheduler="default_dynamic_cp")
    max_seqlen_per_dp_cp_rank: int = Field(
        1024, ge=1, description="Capacity: tokens one rank may hold in one microbatch."
    )
    min_dynamic_context_parallel_size: int = Field(1, ge=1, description="Smallest CP size of the dcp case.")
    padding: Literal["megatron", "minimal"] = Field(
        "minimal",
        description="megatron: multiples of 2xCP (baseline) and 2xDPxCP (dcp). minimal: 2xk for the group really used.",
    )
    attention: str = Field("auto", description="Attention backend; auto takes the fastest that is correct.")


class Schedule(Section):
    """What plans are judged by, and which group sizes they may use."""

    menu: Literal["pow2", "even", "any"] = Field(
        "pow2",
        description="CP sizes that `laminar` chooses from, in both cases. pow2: powers of two, in aligned groups. "
        "even: 1 and even sizes. any: all. The last two in groups of any ranks in a row; above a node, whole nodes.",
    )

    costs: str = Field(
        "auto",
        min_length=1,
        description="Cost profile for `laminar`, `dcpbench plan` and predicted times: auto (a measured one that "
        "matches model and GPU, else assumed rates of an H200), a name, or the path of a profile file.",
    )

    refit: int = Field(
        0, ge=0, description="Iterations between refits of the cost profile while a launch runs; 0: never."
    )

    @model_validator(mode="after")
    def _enough(self) -> Schedule:
        if 0 < self.refit < FEWEST_TO_REFIT:
            raise ValueError(
                f"refit {self.refit} is too often: a refit needs {FEWEST_TO_REFIT} iterations; "
                f"set it to {FEWEST_TO_REFIT} or more, or to 0 for none"
            )
        return self


class Lockstep(Section):
    """What only `mode: lockstep` needs to know: both cases in one launch, on the same weights."""

    launches: int = Field(1, ge=1, description="Lockstep launches; `--pairs`, `--quick` and `--rigorous` set it.")
    control: Literal["auto", "always", "never"] = Field(
        "auto",
        description="One more lockstep launch at the end, the baseline on both sides (A/A): what the two places in one "
        "process do to each other. auto: unless the run itself is such a comparison; `--quick` makes it never.",
    )


class Launches(Section):
    """How often, in which order and within which limits the cases are launched."""

    pairs: int = Field(6, ge=1, description="Launches of each case; an even number balances the order.")
    order: Literal["balanced", "baseline_first", "dcp_first"] = Field(
        "balanced", description="balanced alternates AB, BA, AB, ..."
    )
    timeout: float = Field(3600.0, gt=0, description="Seconds one launch may take.")
    collective_timeout: float = Field(600.0, gt=0, description="Seconds a rank waits in one collective.")
    grace: float = Field(10.0, gt=0, description="Seconds between SIGTERM and SIGKILL.")
    cooldown: float = Field(0.0, ge=0, description="Seconds of rest before each launch.")
    keep_going: bool = Field(False, description="Go on with the other launches after one has failed.")
    layout_control: Literal["auto", "always", "never"] = Field(
        "auto",
        description="One more launch of the baseline at the end, packed in another order, from which the gates of loss "
        "parity learn what rounding does (built-in worker). auto: in bfloat16, with two pairs, and with more where "
        "launches of the same case turn out equal to the last bit.",
    )


class Tolerances(Section):
    """Loss parity: |dcp - baseline| <= loss_atol + loss_rtol x |baseline| at every iteration, and sharper gates."""

    loss_atol: float = Field(
        0.0, ge=0, description="Absolute difference of losses that is accepted anywhere, at the sharp gates too."
    )
    first_step_rtol: float | None = Field(
        None,
        ge=0,
        description="Relative difference accepted at iteration 1, before any update, whatever loss_atol says; "
        "default: 5e-4, in float32 1e-5, or loss_atol where that is more.",
    )
    loss_rtol: float = Field(1e-2, ge=0, description="Relative tolerance of the loss.")
    check_loss_parity: bool = Field(True, description="Whether a finite loss outside the tolerance fails the run.")


class Decision(Section):
    """When a speed-up counts, and what is asked of it."""

    margin: float = Field(0.01, gt=0, lt=1, description="Speed-ups within this share of 1 count as no difference.")
    min_speedup: float | None = Field(
        None, gt=0, description="Fail unless the lower end of the 95 % interval of the speed-up reaches this."
    )
    interval: Literal["t", "hierarchical"] = Field(
        "t",
        description="How the interval is made: t, Student's t over pairs; hierarchical, a bootstrap of pairs and of "
        "blocks of iterations within them, from 10 pairs on.",
    )
    required: bool = Field(
        False, description="End with exit code 3 unless it is decided which case is faster, or none."
    )


class Megatron(Section):
    """What only `runner: megatron_lm` needs to know; the built-in worker ignores it."""

    checkout: Path | None = Field(
        None, description="Root of a Megatron-LM checkout whose `pretrain_gpt.py` knows dynamic context parallelism."
    )
    attention_backend: Literal["fused", "flash", "auto"] = Field(
        "fused",
        description="Attention backend of Transformer Engine; flash needs FlashAttention 3 for packed samples.",
    )
    prompt_format: Literal["default", "nemotron-h-aligned", "nemotron-nano-v2"] = Field(
        "default",
        description="How conversations become tokens. default: the tokenizer's chat template, every token trained on. "
        "The others leave system and user turns out of the loss (data.loss_on: response).",
    )
    extra_flags: tuple[str, ...] = Field(
        (), description="Further arguments for `pretrain_gpt.py`, the same in both cases; none that the spec decides."
    )


class Output(Section):
    """Where the run folder goes."""

    dir: Path | None = Field(None, description="The run folder; default: runs/<spec name>-<date and time>.")


class Spec(Section):
    """A whole comparison."""

    name: str = Field(
        "comparison",
        min_length=1,
        max_length=80,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the comparison.",
    )
    runner: Literal["builtin", "megatron_lm"] = Field(
        "builtin", description="What trains: the built-in worker, or `pretrain_gpt.py` of a Megatron-LM checkout."
    )
    mode: Literal["launches", "lockstep"] = Field(
        "launches",
        description="launches: each case has launches of its own. lockstep: one launch computes every global batch "
        "under both cases on the same weights (built-in worker).",
    )
    model: Model = Model()
    topology: Topology = Topology()
    training: Training = Training()
    data: Data = LognormalData()
    cases: Cases = Cases()
    schedule: Schedule = Schedule()
    launches: Launches = Launches()
    lockstep: Lockstep = Lockstep()
    megatron: Megatron = Megatron()
    tolerances: Tolerances = Tolerances()
    decision: Decision = Decision()
    output: Output = Output()

    @property
    def compared_with_itself(self) -> bool:
        """Whether both cases are the same (an A/A comparison), so that any difference is the measurement's own."""
        return self.cases.baseline == self.cases.dcp

    @model_validator(mode="after")
    def _interval(self) -> Spec:
        if self.decision.interval == "hierarchical" and self.mode == "launches" and self.launches.pairs < 10:
            raise ValueError(
                f"decision.interval hierarchical needs launches.pairs of at least 10; it is {self.launches.pairs}"
            )
        return self

    @model_validator(mode="after")
    def _refit(self) -> Spec:
        if self.schedule.refit and self.runner != "builtin":
            raise ValueError(
                f"schedule.refit needs the built-in worker, which plans with a cost profile; runner is {self.runner}: "
                "set schedule.refit to 0"
            )
        if self.schedule.refit and self.mode == "lockstep":
            raise ValueError(
                "schedule.refit is not defined in mode lockstep, where both cases share an iteration; set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _lockstep(self) -> Spec:
        if self.mode == "lockstep" and self.runner != "builtin":
            raise ValueError(f"mode lockstep needs the built-in worker; runner is {self.runner}")
        if self.mode == "lockstep" and self.training.profile_iterations:
            raise ValueError(
                "training.profile_iterations profiles launches of one case; mode lockstep has both in an iteration"
            )
        return self
