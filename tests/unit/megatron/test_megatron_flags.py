"""A spec as Megatron-LM's arguments: complete, equal in both cases, and safe from extra flags."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.errors import SpecError
from dcpbench.megatron import flags
from dcpbench.plan import build, command
from dcpbench.spec import Spec

STANDIN = Path(__file__).parents[2] / "data" / "megatron_checkout" / "megatron" / "training" / "arguments.py"
TEXT = {"kind": "text", "path": "rows.jsonl", "tokenizer": "tok", "max_length": 4000}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "classic": {"model": {"flavour": "classic", "tie_embeddings": True}},
    "grouped heads": {"model": {"kv_heads": 2, "head_dim": 32}},
    "tensor parallel": {"topology": {"tp": 2, "pp": 2, "cp": 2, "gpus_per_node": 8}},
    "full recompute": {"training": {"recompute": "full", "optimizer_sharding": True}},
    "deterministic": {"training": {"recompute": "selective", "deterministic": True, "load_path": "weights"}},
    "list": {"data": {"kind": "list", "lengths": [5, 70]}},
    "seeded": {"data": {"kind": "lognormal", "seed": 3}},
    "text": {"data": TEXT},
    "plain text": {"data": {**TEXT, "text_column": "text"}},
    "extra": {"megatron": {"extra_flags": ["--moe-token-dispatcher-type", "alltoall"]}},
}


def spec(**sections: Any) -> Spec:
    megatron = {"checkout": "/opt/megatron", **sections.pop("megatron", {})}
    return Spec.model_validate({"runner": "megatron_lm", "megatron": megatron, **sections})


def both(s: Spec) -> tuple[list[str], list[str]]:
    found = [flags.arguments(s, case, folder=Path("/run/x"), data=Path("/run/data")) for case in ("baseline", "dcp")]
    return found[0], found[1]


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_cases_differ_in_nothing_but_the_case(name: str) -> None:
    s = spec(**VARIANTS[name])
    baseline, dcp = both(s)
    common = len(baseline) - len(flags.case_flags(s, "baseline"))
    assert baseline[:common] == dcp[:common]
    assert baseline[common:] == ["--sequence-packing-scheduler", "dp_balanced"]
    assert dcp[common:] == [
        *("--sequence-packing-scheduler", "default_dynamic_cp", "--dynamic-context-parallel"),
        *("--min-dynamic-context-parallel-size", "1"),
    ]


def test_the_launches_of_a_plan_differ_in_the_case_and_their_own_folder(tmp_path: Path) -> None:
    first, second = (command(launch) for launch in build(spec(launches={"pairs": 1}), tmp_path))
    assert first.environment == second.environment
    assert first.folder == second.folder == Path("/opt/megatron")
    own = {"--rdzv-id=01-baseline", "--rdzv-id=01-dcp"}
    own |= {str(tmp_path / "launches" / name / "tensorboard") for name in ("01-baseline", "01-dcp")}
    own |= {word for case in ("baseline", "dcp") for word in flags.case_flags(spec(), case)}
    assert set(first.argv) ^ set(second.argv) <= own


@pytest.mark.parametrize("name", VARIANTS)
def test_every_flag_is_one_that_extra_flags_may_not_override(name: str) -> None:
    s = spec(**VARIANTS[name])
    for words in both(s):
        given_flags = [word for word in words if word.startswith("--") and word not in s.megatron.extra_flags]
        assert not [flag for flag in given_flags if flag not in flags.CONTROLLED]
        assert len(set(given_flags)) == len(given_flags)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "extra"])
def test_the_strict_parser_takes_every_variant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = spec(**VARIANTS[name])
    loader = importlib.util.spec_from_file_location("standin_arguments", STANDIN)
    assert loader is not None
    assert loader.loader is not None
    arguments: ModuleType = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(arguments)
    monkeypatch.setattr(arguments, "check", lambda *_: None)
    for words in both(s):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
        parsed = arguments.parse(s.topology.world_size)
        assert parsed.train_iters == s.training.iterations
        assert parsed.max_seqlen_per_dp_cp_rank == s.cases.max_seqlen_per_dp_cp_rank


def test_flavours() -> None:
    modern, classic = both(spec())[0], both(spec(**VARIANTS["classic"]))[0]
    assert {"--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"} <= set(modern)
    assert (value(modern, "--normalization"), value(modern, "--position-embedding-type")) == ("RMSNorm", "rope")
    assert value(modern, "--rotary-base") == "10000"
    assert not {"--swiglu", "--disable-bias-linear", "--rotary-base", "--untie-embeddings-and-output-weights"} & set(
        classic
    )
    assert value(classic, "--position-embedding-type") == "learned_absolute"


def test_mock_data_of_seed_0_are_drawn_by_megatron_and_others_come_as_a_file() -> None:
    drawn = json.loads(value(both(spec())[0], "--varlen-mock-dataset-config-json"))
    assert drawn == {
        **{"mode": "distribution", "type": "lognormal", "format": "thd", "min_seq_len": 16, "max_seq_len": 1024},
        **{"mean_seq_len": 256.0, "lognormal_sigma": 1.1},
    }
    for name in ("list", "seeded"):
        words = both(spec(**VARIANTS[name]))[0]
        assert json.loads(value(words, "--varlen-mock-dataset-config-json"))["path"] == "/run/data/lengths.csv"
        assert int(value(words, "--eval-iters")) >= 1


def test_no_evaluation_falls_into_the_training() -> None:
    words = both(spec(training={"iterations": 50}))[0]
    assert int(value(words, "--eval-interval")) > 50


def test_text_is_read_by_megatron() -> None:
    words = both(spec(**VARIANTS["text"]))[0]
    assert value(words, "--data-path") == str(Path("rows.jsonl").absolute())
    assert (value(words, "--split"), value(words, "--eval-iters")) == ("100,0,0", "0")
    assert value(words, "--sft-tokenizer-prompt-format") == "default"
    assert "--mock-data" not in words
    assert value(both(spec(**VARIANTS["plain text"]))[0], "--tokenizer-type") == "HuggingFaceTokenizer"


def test_weights_are_shared_without_their_optimizer() -> None:
    words = both(spec(**VARIANTS["deterministic"]))[1]
    assert value(words, "--load") == str(Path("weights").absolute())
    assert {"--finetune", "--exit-on-missing-checkpoint"} <= set(words)


@given(
    cp=st.sampled_from([1, 2, 4, 8]),
    capacity=st.integers(16, 5000),
    longest=st.integers(2, 40_000),
)
def test_the_sequence_length_is_one_that_both_cases_can_hold(cp: int, capacity: int, longest: int) -> None:
    s = spec(
        topology={"cp": cp, "gpus_per_node": 8},
        cases={"max_seqlen_per_dp_cp_rank": capacity},
        data={"kind": "list", "lengths": [longest]},
    )
    length = flags.sequence_length(s)
    assert length % (2 * cp) == 0
    assert length <= cp * capacity
    assert length >= min(longest, cp * capacity - 2 * cp)


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (["--lr", "1"], "--lr is decided by training.lr;"),
        (["--lr=1"], "--lr is decided by training.lr;"),
        (["--train_iters", "5"], "--train-iters is decided by training.iterations;"),
        (["--context-par", "4"], "--context-par (a beginning of --context-parallel-size) is decided by topology.cp;"),
        (["--fp16"], "--fp16 is decided by training.dtype;"),
        (["5"], "must begin with a flag, not with '5'"),
    ],
)
def test_an_extra_flag_that_the_spec_decides_is_refused(extra: list[str], sentence: str) -> None:
    s = spec(megatron={"extra_flags": extra})
    assert any(sentence in found for found in flags.extra_flag_conflicts(s.megatron.extra_flags))
    with pytest.raises(SpecError, match=r"megatron\.extra_flags"):
        both(s)


def test_extra_flags_reach_both_cases() -> None:
    for words in both(spec(**VARIANTS["extra"])):
        assert value(words, "--moe-token-dispatcher-type") == "alltoall"


def test_a_spec_without_a_checkout_has_no_command(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"megatron\.checkout is not set"):
        command(build(Spec(runner="megatron_lm"), tmp_path)[0])
