"""What a reader must know beside the numbers: sentences that qualify a result without failing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dcpbench.align import KEYS, Aligned
from dcpbench.analysis.disturbances import Telemetry
from dcpbench.analysis.results import LaunchResult
from dcpbench.faults import LaunchInput
from dcpbench.records import RunHeader
from dcpbench.stats.parity import Parity

_CONTROLLED = (
    "world_size",
    "domain_size",
    "cp",
    "global_batch_size",
    "warmup_iterations",
    "capacity",
    "padding",
    "device",
    "dtype",
    "attention",
    "parameters",
    "flops_per_token",
    "flops_per_squared_length",
    "versions",
)
"""Header fields in which the launches of both cases should be equal."""

_SAME_BATCHES = 0.5
"""Below this correlation of loss steps the cases look as if they had seen different batches. With
equal batches method.md's simulation gives 0.999 and real bf16 runs 0.9997; with different ones 0.002."""


def cautions(
    launches: Sequence[LaunchInput],
    *,
    aligned: Aligned | None,
    baseline_first: NDArray[np.bool_] | None,
    settling: Mapping[str, int],
    warmup: int,
    parity: Parity | None,
    check_loss_parity: bool,
    remarks: Sequence[str],
    order_effect: float | None = None,
    order_interval: tuple[float, float] | None = None,
    margin: float = 0.01,
    mode: str = "launches",
    with_control: bool = False,
) -> tuple[str, ...]:
    """All cautions, the gravest first. See `pipeline.Analysis` for the arguments.

    `with_control`: an A/A control has measured what the two places in one process do to each other.
    """
    found = [*_swapped(launches), *_different_settings(launches)]
    if aligned is not None:
        if mode == "lockstep":
            found += _same_process(launches, baseline_first, with_control)
        else:
            found += _few_pairs(launches, baseline_first)
        found += [*_unsettled(settling, warmup), *_unchecked(aligned)]
        found += _order(order_effect, order_interval, margin, "an iteration" if mode == "lockstep" else "a pair")
    if parity is not None:
        found += _losses(parity, check_loss_parity)
    found += [*_formats(launches), *remarks]
    return tuple(found)


def unsteady(results: Sequence[LaunchResult], warmup: int, disturbed: Mapping[str, Telemetry]) -> list[str]:
    """Launches that drift or change level, iterations that stand out, and the cause where telemetry knows one."""
    found = [*_labels(results, warmup)]
    for launch in results:
        causes = disturbed[launch.id].causes if launch.id in disturbed else ()
        if launch.standing_out:
            found.append(_standing_out(launch, causes))
        elif causes:
            found.append(f"{launch.id}: {'; '.join(causes)}.")
    return found


def _standing_out(launch: LaunchResult, causes: tuple[str, ...]) -> str:
    """The iterations that stand out, each with its own cause; what disturbed the launch elsewhere follows."""
    shown = [
        f"{found.iteration} ({found.times:.2f} times{': ' + ', '.join(found.causes) if found.causes else ''})"
        for found in launch.standing_out[:10]
    ]
    more = len(launch.standing_out) - len(shown)
    plural = len(launch.standing_out) > 1
    because = f" Telemetry of this launch: {'; '.join(causes)}." if causes else ""
    return (
        f"{launch.id}: iteration{'s' if plural else ''} {', '.join(shown)}{f' and {more} more' if more else ''} "
        f"stand{'' if plural else 's'} out from what the batch takes; counted all the same.{because}"
    )


_LABELS = {
    "warming": "became faster within the measured window",
    "slowing": "became slower within the measured window",
    "unstable": "changed level within the measured window",
}


def _labels(results: Sequence[LaunchResult], warmup: int) -> list[str]:
    """One sentence for each way in which launches were not steady."""
    found = []
    for label, words in _LABELS.items():
        concerned = [(launch.id, launch.steadiness) for launch in results
                     if launch.steadiness is not None and launch.steadiness.label == label]  # fmt: skip
        if not concerned:
            continue
        names = ", ".join(name if label == "unstable" else f"{name} ({known.drift:+.1%})" for name, known in concerned)
        cut = max(known.truncation for _, known in concerned)
        hint = f"; try a warm-up of {warmup + cut} iterations" if cut and label != "slowing" else ""
        found.append(f"Not steady: {names} {words}{hint}.")
    return found


def _swapped(launches: Sequence[LaunchInput]) -> list[str]:
    return [
        f"{launch.table.source}, taken as {launch.case}, says that it is a launch of {launch.table.header.case}."
        for launch in launches
        if launch.table.header and launch.table.header.case != launch.case
    ]


def _different_settings(launches: Sequence[LaunchInput]) -> list[str]:
    headers = [(launch.id, launch.table.header) for launch in launches if launch.table.header]
    found: list[str] = []
    for name in _CONTROLLED:
        values: dict[str, str] = {}
        for launch, header in headers:
            values.setdefault(_text(header, name), launch)
        if len(values) > 1:
            listed = ", ".join(f"{value} in {launch}" for value, launch in values.items())
            found.append(f"The launches differ in {name.replace('_', ' ')} ({listed}): they are hardly comparable.")
    return found


def _text(header: RunHeader, name: str) -> str:
    value = getattr(header, name)
    return ", ".join(f"{key} {word}" for key, word in sorted(value.items())) if isinstance(value, dict) else str(value)


def _few_pairs(launches: Sequence[LaunchInput], baseline_first: NDArray[np.bool_] | None) -> list[str]:
    found: list[str] = []
    pairs = len({launch.pair for launch in launches})
    if pairs == 1:
        found.append(
            "One pair of launches is indicative only: launches of the same case differ from each other by more than "
            "their iterations do."
        )
    if baseline_first is None:
        found.append(
            "The order in which the launches ran is not known, so an effect of coming second cannot be ruled out."
        )
    elif baseline_first.all() or not baseline_first.any():
        first = "baseline" if baseline_first.all() else "dcp"
        found.append(
            f"{first} came first in every pair, so an effect of coming second cannot be told from a speed-up; "
            "balanced order over an even number of pairs can."
        )
    return found


def _same_process(
    launches: Sequence[LaunchInput], baseline_first: NDArray[np.bool_] | None, with_control: bool
) -> list[str]:
    """What lockstep cannot tell apart by itself. `baseline_first` has an entry for each iteration."""
    found: list[str] = []
    if len({launch.table.header and launch.table.header.scheduler for launch in launches}) > 1:
        if not with_control:
            found.append(
                "Both cases ran in one process, so one uses memory that the other has left behind; what that does to "
                "their times shows with an A/A control (--set lockstep.control=always)."
            )
    else:
        found.append(
            "Both sides are the same case (A/A): whatever speed-up, memory or gradient difference is found is the "
            "measurement's own."
        )
    if baseline_first is not None and (baseline_first.all() or not baseline_first.any()):
        first = "baseline" if baseline_first.all() else "dcp"
        found.append(
            f"{first} came first in every iteration, so an effect of coming second cannot be told from a speed-up; "
            "balanced order (launches.order) can."
        )
    return found


def _order(effect: float | None, ends: tuple[float, float] | None, margin: float, within: str) -> list[str]:
    """An effect of coming second that shows in its interval, or is larger than what counts as a difference."""
    if effect is None or (abs(np.log(effect)) <= np.log1p(margin) and (ends is None or ends[0] <= 1 <= ends[1])):
        return []
    return [
        f"Coming second in {within} changed the time by {effect - 1:+.1%}; balanced order takes this out of the "
        "speed-up, but the machine is not the same in both places."
    ]


def _unsettled(settling: Mapping[str, int], warmup: int) -> list[str]:
    return [
        f"{launch} was still settling: its first {count} measured iteration{'s' if count > 1 else ''} ran clearly "
        f"slower than the rest; a warm-up of {warmup + count} would leave {'them' if count > 1 else 'it'} out."
        for launch, count in settling.items()
        if count
    ]


def _unchecked(aligned: Aligned) -> list[str]:
    if "batch_digest" in aligned.keys:
        return []
    checked = [KEYS[key] for key in aligned.keys]
    return [
        "The records carry no batch digest; that both cases saw the same samples rests on "
        f"{', '.join(['iteration', *checked])}."
    ]


def _losses(parity: Parity, check_loss_parity: bool) -> list[str]:
    found: list[str] = []
    if not parity.passed and not check_loss_parity:
        found.append("The losses are out of tolerance; this does not fail the comparison, as it was told not to.")
    if parity.step_correlation is not None and parity.step_correlation < _SAME_BATCHES:
        found.append(
            f"The losses of the cases do not move together (correlation of their steps {parity.step_correlation:.3f}): "
            "they may have seen different batches."
        )
    return found


def _formats(launches: Sequence[LaunchInput]) -> list[str]:
    if not any(launch.table.format == "megatron" for launch in launches):
        return []
    return [
        "Megatron-LM logs the mean of iterations 1 and 2 as iteration 2; this is undone here. Its logged TFLOP/s "
        "count padding tokens."
    ]
