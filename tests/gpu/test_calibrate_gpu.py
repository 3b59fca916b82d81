"""`dcpbench calibrate` on two GPUs: every kind of microbatch is timed, and the profile is that of these GPUs.

How well the fit describes a machine that may be busy is not asserted; the command says it, and ends with 0 or 1.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcpbench.dcp import cost_profiles
from dcpbench.spec import Spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
SPEC = """
name: small
model: {flavour: classic, layers: 4, hidden_size: 1024, ffn_hidden_size: 4096, attention_heads: 8, vocab_size: 32000}
topology: {device: cuda, gpus_per_node: 2, cp: 2}
training: {dtype: bfloat16, global_batch_size: 16}
data: {kind: lognormal, mean: 1024, sigma: 1.5, min_length: 128, max_length: 8192, tokens: zipf}
cases: {max_seqlen_per_dp_cp_rank: 4096}
launches: {pairs: 1, timeout: 300}
"""


def test_two_gpus_are_calibrated(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SPEC)
    command = [sys.executable, "-m", "dcpbench", "calibrate", str(tmp_path / "small.yaml")]
    command += ["--out", str(tmp_path / "small.json"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stderr
    document = json.loads(done.stdout)
    assert document["usable"] is (done.returncode == 0)
    profile = cost_profiles.load(tmp_path / "small.json")
    assert profile.key is not None
    assert profile.key.gpu == torch.cuda.get_device_name(0)
    assert profile.key.dtype == "bfloat16"
    assert "nccl" in profile.key.versions
    found = profile.coefficients
    # Between a tenth of, and a hundred times, what the data sheet of an H200 would give this model.
    assumed = cost_profiles.assumed(Spec.model_validate(_model())).cost
    assert 0.1 * assumed.token < found.token < 100 * assumed.token
    assert found.base + found.floor > 0
    assert profile.iteration is not None
    assert profile.fit is not None
    assert profile.fit.most_tokens == 4096


def _model() -> dict[str, object]:
    sizes = {"layers": 4, "hidden_size": 1024, "ffn_hidden_size": 4096, "attention_heads": 8, "vocab_size": 32000}
    return {"model": {"flavour": "classic", **sizes}}
