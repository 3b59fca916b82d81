"""One module per scheduler behind one protocol (`dcp.workload.Scheduler`); run without torch.

A new scheduler is one module with a class, and one line in `SCHEDULERS`.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Protocol

from dcpbench.dcp.costs import H200_1B, CostModel
from dcpbench.dcp.schedulers.default_dynamic_cp import DefaultDynamicCp
from dcpbench.dcp.schedulers.dp_balanced import DpBalanced
from dcpbench.dcp.schedulers.laminar import Laminar
from dcpbench.dcp.schedulers.laminar_sizes import Menu
from dcpbench.dcp.schedulers.reordered import SUFFIX, Reversed
from dcpbench.dcp.workload import Domain, PaddingPolicy, Scheduler
from dcpbench.errors import SpecError

if TYPE_CHECKING:
    from dcpbench.spec import Spec


class Constructor(Protocol):
    """Makes a scheduler from what every spec says of one."""

    def __call__(self, *, domain: Domain, capacity: int, min_size: int, padding_policy: PaddingPolicy) -> Scheduler:
        """`capacity` in tokens per rank; `min_size` is the smallest group a dynamic scheduler may use."""


SCHEDULERS: dict[str, Constructor] = {
    DpBalanced.name: DpBalanced.create,
    DefaultDynamicCp.name: DefaultDynamicCp.create,
    Laminar.name: Laminar.create,
}


def create(
    name: str,
    *,
    domain: Domain,
    capacity: int,
    min_size: int = 1,
    padding_policy: PaddingPolicy = "minimal",
    cost: CostModel | None = None,
    menu: Menu = "pow2",
) -> Scheduler:
    """The scheduler of that name; with `:reversed` behind it, on batches in reversed order (see `reordered.py`).

    A scheduler that plans with a cost model plans with `cost`, where that is given, and one attention kernel of it (see
    `CostModel.planning`); one that has a choice of group sizes takes them from `menu`.

    Raises:
        SpecError: there is no such scheduler; names the nearest one.
        ScheduleError: it cannot serve this domain, capacity or smallest size.
    """
    if name.endswith(SUFFIX):
        inner = create(
            name.removesuffix(SUFFIX),
            domain=domain,
            capacity=capacity,
            min_size=min_size,
            padding_policy=padding_policy,
            cost=cost,
            menu=menu,
        )
        return Reversed(inner)
    if name not in SCHEDULERS:
        nearest = difflib.get_close_matches(name, SCHEDULERS, n=1, cutoff=0)[0]
        raise SpecError(
            f"there is no scheduler {name!r}; did you mean {nearest!r}? (schedulers: {', '.join(sorted(SCHEDULERS))})"
        )
    if name == Laminar.name:
        return Laminar.create(
            domain=domain,
            capacity=capacity,
            min_size=min_size,
            padding_policy=padding_policy,
            menu=menu,
            cost=(cost or H200_1B).planning(capacity),
        )
    return SCHEDULERS[name](domain=domain, capacity=capacity, min_size=min_size, padding_policy=padding_policy)


def of_case(spec: Spec, case: str, cost: CostModel | None = None) -> Scheduler:
    """The scheduler of a case (baseline, dcp) as in its launches, planning with `cost` where it plans with costs.

    Raises:
        SpecError, ScheduleError: as `create`.
    """
    chosen = spec.cases.baseline if case == "baseline" else spec.cases.dcp
    return create(
        chosen.scheduler,
        domain=Domain(spec.topology.domain_size, spec.topology.cp),
        capacity=spec.cases.max_seqlen_per_dp_cp_rank,
        min_size=spec.cases.min_dynamic_context_parallel_size,
        padding_policy=spec.cases.padding,
        cost=cost,
        menu=spec.schedule.menu,
    )


def plans_with_costs(name: str) -> bool:
    """Whether plans of the scheduler of that name depend on the cost model."""
    return name.removesuffix(SUFFIX) == Laminar.name
