"""Refits beside the training: who asks when, who waits for what, and what ends the helper process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import psutil
import pytest

from dcpbench import records
from dcpbench.dcp import refit_log, schedulers
from dcpbench.dcp.cost_profiles import CostProfile, coefficients_of
from dcpbench.dcp.costs import H200_1B, CostModel
from dcpbench.dcp.iterations import PlannedIteration, iteration_times
from dcpbench.dcp.refit_log import READY, Refitted
from dcpbench.dcp.workload import Domain
from dcpbench.errors import LaunchError
from dcpbench.plan import Launch, build
from dcpbench.records import IterationRecord
from dcpbench.spec import Spec
from dcpbench.worker.batches import BatchBuilder
from dcpbench.worker.refit_helper import Refitter, follow
from dcpbench.worker.refitting import Helper, Refits, RefittedBuilder

TRUTH = replace(H200_1B, token=1.3 * H200_1B.token)


class Shared:
    """A store of ranks in one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str, /) -> bytes:
        return self.values[key].encode()


def a_launch(folder: Path, iterations: int = 40, warmup: int = 2) -> Launch:
    spec = Spec.model_validate(
        {
            "topology": {"device": "cpu", "gpus_per_node": 2, "cp": 2},
            "training": {"iterations": iterations, "warmup_iterations": warmup},
            "cases": {"dcp": {"scheduler": "laminar"}},
            "schedule": {"refit": 10},
        }
    )
    profile = CostProfile(name="x", kind="measured", coefficients=coefficients_of(H200_1B))
    return build(spec, folder, profile)[1]


def answering(delay: float = 0.0, end: int | None = None) -> Helper:
    """A helper that answers each question after so many seconds, or ends with a code instead."""
    instead = f"sys.exit({end})" if end is not None else "pass"
    text = f"""
import sys, time
print({READY!r}, flush=True)
for line in sys.stdin:
    {instead}
    time.sleep({delay})
    after = int(line)
    print('{{"after": %d, "applies_from": %d, "adopted": false}}' % (after, after + 10), flush=True)
"""
    return Helper([sys.executable, "-c", text])


def test_all_ranks_take_up_a_refit_before_the_same_iteration(tmp_path: Path) -> None:
    store, launch = Shared(), a_launch(tmp_path)
    first, second = Refits(launch, store, answering()), Refits(launch, store, None)
    try:
        for refits in (first, second):
            refits.ready()
        seen = []
        for iteration in range(1, 41):
            found = [refits.before(iteration) for refits in (first, second)]
            assert found[0] == found[1]
            if found[0] is not None:
                seen.append((iteration, found[0].after))
        assert seen == [(20, 10), (30, 20), (40, 30)]
    finally:
        first.close()
        second.close()


def test_a_refit_that_is_late_is_waited_for_and_not_longer_than_the_limit(tmp_path: Path) -> None:
    store, launch = Shared(), a_launch(tmp_path)
    patient, hasty = Refits(launch, store, answering(0.3)), Refits(launch, Shared(), answering(60), wait=0.2)
    after = refit_log.starts(launch.spec.training, 10)[0]
    try:
        for refits in (patient, hasty):
            refits.ready()
            assert [refits.before(iteration) for iteration in range(1, after + 10)] == [None] * (after + 9)
        found = patient.before(after + 10)
        assert found is not None
        assert found.after == after
        with pytest.raises(LaunchError, match=f"the refit after iteration {after} was not ready 0.2 s after the plan"):
            hasty.before(after + 10)
    finally:
        patient.close()
        hasty.close()


def through(refits: Refits) -> None:
    for iteration in range(1, 41):
        refits.before(iteration)


def test_where_the_helper_ends_every_rank_says_why(tmp_path: Path) -> None:
    store, launch = Shared(), a_launch(tmp_path)
    first, second = Refits(launch, store, answering(end=3)), Refits(launch, store, None)
    try:
        first.ready()
        sentences = []
        for refits in (first, second):
            with pytest.raises(LaunchError) as caught:
                through(refits)
            sentences.append(str(caught.value))
        assert sentences[0] == sentences[1]
        assert "ended with exit code 3; set schedule.refit to 0" in sentences[0]
    finally:
        first.close()
        second.close()


def test_a_rank_that_hears_nothing_gives_up(tmp_path: Path) -> None:
    launch = a_launch(tmp_path)
    after = refit_log.starts(launch.spec.training, 10)[0]
    with pytest.raises(LaunchError, match=r"was not ready 0\.2 s after"):
        Refits(launch, Shared(), None, wait=0.1).before(after + 10)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_of_a_launch_ends_waits_and_blames_nobody(tmp_path: Path, rank: int) -> None:
    store, launch = Shared(), a_launch(tmp_path)
    refits = Refits(launch, store, answering(60) if rank == 0 else None)
    after = refit_log.starts(launch.spec.training, 10)[0]
    refits.ready()
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            for iteration in range(1, after + 11):
                refits.before(iteration)
        except LaunchError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    refits.close()
    thread.join(20)
    assert not thread.is_alive()
    assert len(caught) == 1
    assert store.values == {}


class Planner:
    """Stands for a `BatchBuilder`: says with which coefficients it plans."""

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self, iteration: int) -> str:
        return f"{iteration} {self.name}"


class Scripted:
    """Stands for `Refits`."""

    def before(self, iteration: int) -> Refitted | None:
        if iteration not in (3, 4):
            return None
        return Refitted(after=1, applies_from=iteration, adopted=iteration == 3, coefficients=coefficients_of(TRUTH))


def test_only_an_adopted_refit_changes_the_planner() -> None:
    builder = RefittedBuilder(
        cast(BatchBuilder, Planner("old")),
        cast(Refits, Scripted()),
        lambda found: cast(BatchBuilder, Planner(f"{found.cost.token == TRUTH.token}")),
    )
    built = [cast(str, builder.build(iteration)) for iteration in range(1, 6)]
    assert built == ["1 old", "2 old", "3 True", "4 True", "5 True"]


def recorded(count: int, truth: CostModel, slow: tuple[int, ...] = ()) -> list[IterationRecord]:
    random = np.random.default_rng(3)
    scheduler = schedulers.create("laminar", domain=Domain(2, 2), capacity=1024)
    found = []
    for number in range(1, count + 1):
        lengths = np.clip(random.lognormal(5.5, 1.2, 16), 16, 2000).astype(int).tolist()
        one = PlannedIteration.of(scheduler.plan(lengths), lengths, scheduler.padding)
        summary = zip(one.first, one.size, one.tokens, one.real, strict=True)
        jobs = tuple(int(value) for job in summary for value in job)
        seconds = 0.002 + iteration_times([PlannedIteration.recorded(jobs, 2)], truth)[0]
        found.append(IterationRecord(iteration=number, seconds=seconds * (9 if number in slow else 1), jobs=jobs))
    return found


def test_refits_follow_what_is_recorded_and_are_written_down(tmp_path: Path) -> None:
    launch = a_launch(tmp_path)
    launch.folder.mkdir(parents=True)
    refitter = Refitter(launch, "collective/sdpa")
    rows = recorded(20, TRUTH, slow=(1, 2))  # the warm-up
    for row in rows[:10]:
        refitter.record(row)
    first = refitter.refit(10)
    for row in rows[10:]:
        refitter.record(row)
    second = refitter.refit(20)
    assert first.adopted
    assert (first.iterations, second.iterations) == (8, 18)
    assert first.error_before is not None
    assert second.error_before is not None
    assert first.error_after is not None
    assert first.error_after < 0.05 < 0.1 < first.error_before
    assert second.error_before < 0.06  # against the coefficients in use by then
    assert first.cost.token == pytest.approx(TRUTH.token, rel=0.15)
    log = refit_log.read(launch.folder)
    assert log is not None
    assert log.refits == (first, second)
    assert (log.interval, log.half_life, log.basis) == (10, 20, "measured profile x")


def test_iterations_that_nothing_describes_change_nothing(tmp_path: Path) -> None:
    launch = a_launch(tmp_path)
    launch.folder.mkdir(parents=True)
    refitter = Refitter(launch, "collective/sdpa")
    for row in recorded(10, TRUTH, slow=(4, 7, 8)):
        refitter.record(row)
    poor = refitter.refit(10)
    assert not poor.adopted
    assert poor.coefficients is not None
    assert "missed by" in str(poor.why_not)
    empty = Refitter(launch, "collective/sdpa").refit(10)
    assert not empty.adopted
    assert empty.why_not == "it could not be made: a refit needs at least eight measured iterations"


def test_records_are_followed_while_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    lines = [records.to_json(row) + "\n" for row in recorded(3, TRUTH)]
    file.write_text(lines[0] + lines[1][:40])
    looks = 0

    def until() -> bool:
        nonlocal looks
        looks += 1
        if looks == 1:
            with file.open("a") as more:
                more.write(lines[1][40:] + lines[2])
        return looks > 3

    assert [row.iteration for row in follow(file, until)] == [1, 2, 3]


PARENT = """
import subprocess, sys, time
helper = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
assert helper.stdout.readline() == b"ready\\n"
helper.stdin.write(b"30\\n")
helper.stdin.flush()
print(helper.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the helper ends with its input")
def test_a_helper_in_the_middle_of_a_wait_ends_with_a_killed_parent(tmp_path: Path) -> None:
    launch = a_launch(tmp_path)
    launch.folder.mkdir(parents=True)
    launch.file.write_text(launch.model_dump_json())
    argv = [sys.executable, "-m", "dcpbench.worker.refit_helper", str(launch.file), "collective/sdpa"]
    with subprocess.Popen([sys.executable, "-c", PARENT, *argv], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        helper = psutil.Process(int(parent.stdout.readline()))
        assert helper.nice() == 19
        assert not [path for path in helper.memory_maps() if "libtorch" in path.path]
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while helper.is_running() and helper.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not helper.is_running() or helper.status() == psutil.STATUS_ZOMBIE


def test_the_worker_does_not_load_what_only_a_refit_needs() -> None:
    code = "import sys, dcpbench.worker.refitting; print('scipy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
