import numpy as np
import pytest

from dcpbench.stats.profile import case_profile, count_cp_sizes
from dcpbench.stats.steadiness import settling


def test_profile_of_a_case() -> None:
    profile = case_profile(
        tokens=np.array([[900, 100]]),
        padding_tokens=np.array([[200, 50]]),
        cp_sizes=np.array([[b"1x6,2x3", b"4x1"]]),
        microbatches=np.array([[2, 3]]),
        scheduling_seconds=np.array([[0.001, 0.003]]),
        peak_memory_bytes=np.array([[np.nan, 2.0**30]]),
        tflops_per_gpu=np.array([[100.0, np.nan]]),
    )
    assert profile.padding_share == pytest.approx(0.2)
    assert profile.cp_sizes == {1: 6, 2: 3, 4: 1}
    assert profile.microbatches == 2.5
    assert profile.scheduling_ms == pytest.approx(2.0)
    assert profile.peak_memory_bytes == 2**30
    assert profile.logged_tflops_per_gpu == 100.0


def test_a_profile_of_nothing() -> None:
    profile = case_profile(None, None, None, None, np.array([[np.nan]]), np.array([[np.nan]]), None)
    assert set(vars(profile).values()) == {None}
    assert case_profile(np.array([0]), np.array([0]), None, None, None, None, None).padding_share is None


def test_cp_sizes_are_summed_over_iterations() -> None:
    words = np.array([[b"1x6,2x3", b"1x6,2x3", b"8x1", b""]])
    assert count_cp_sizes(words) == {1: 12, 2: 6, 8: 1}


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        ([1400.0] + [1000.0] * 6, 1),
        ([50000.0, 1400.0] + [1000.0] * 6, 2),
        ([1000.0] * 7, 0),
        ([1040.0] + [1000.0] * 6, 0),
        ([1000.0, 1400.0] + [1000.0] * 5, 0),
        ([5000.0, 1000.0, 1000.0], 0),
        ([], 0),
    ],
)
def test_a54_settling(times: list[float], slow: int) -> None:
    assert settling(np.array(times)) == slow


def test_batches_of_all_lengths_are_not_taken_for_settling() -> None:
    rng = np.random.default_rng(0)
    times = rng.lognormal(0, 0.6, (400, 30))
    assert np.mean([settling(row) > 0 for row in times]) < 0.05
