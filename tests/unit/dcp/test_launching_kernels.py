"""When a Triton kernel is launched directly, and when Triton is asked; with a stand-in for Triton."""

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch


class Compiled:
    """A compiled variant; `wants` is how many arguments it takes, or any number."""

    packed_metadata = ()

    def __init__(self, wants: int | None) -> None:
        self.launched: list[tuple[tuple[int, ...], tuple[object, ...]]] = []
        self._wants = wants

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: object) -> None:
            if self._wants is not None and len(arguments) != self._wants:
                raise TypeError("function takes other arguments")
            self.launched.append((grid, arguments))

        return launch


class Jitted:
    """What a stand-in `triton.jit` makes: every call through it is noted."""

    def __init__(self, compiles: bool, wants: int | None) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.compiled: list[Compiled] = []
        self._compiles, self._wants = compiles, wants

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: object, num_warps: int, **constants: object) -> Compiled | None:
            self.asked.append(arguments)
            if not self._compiles:
                return None
            self.compiled.append(Compiled(self._wants))
            return self.compiled[-1]

        return launch


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    def build(*, compiles: bool = True, wants: int | None = None) -> tuple[Any, Jitted]:
        jitted = Jitted(compiles, wants)
        triton = ModuleType("triton")
        triton.jit = lambda function, **_: jitted  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "triton", triton)
        monkeypatch.delitem(sys.modules, "dcpbench.dcp.launching", raising=False)
        launching = importlib.import_module("dcpbench.dcp.launching")
        monkeypatch.delitem(sys.modules, "dcpbench.dcp.launching")

        @launching.kernel(numbers=("rows",))
        def add(x: Any, out: Any, rows: Any, width: Any, BLOCK: Any) -> None: ...

        return add, jitted

    return build


X, OUT = torch.zeros(64), torch.zeros(64)


def test_triton_is_asked_once_for_what_differs_in_numbers_only(make: Any) -> None:
    add, jitted = make()
    for rows in (1, 16, 17, 4096):
        add[(rows,)](X, OUT, rows, 8, BLOCK=64)
    assert len(jitted.asked) == 1
    assert [grid for grid, _ in jitted.compiled[0].launched] == [(16, 1, 1), (17, 1, 1), (4096, 1, 1)]
    assert all(arguments[-1] == 64 for _, arguments in jitted.compiled[0].launched)


@pytest.mark.parametrize(
    ("arguments", "constant"),
    [
        ((X.double(), OUT, 5, 8), 64),  # another type
        ((torch.zeros(65)[1:], OUT, 5, 8), 64),  # another alignment
        ((X, OUT, 5, 9), 64),  # a number that is compiled in
        ((X, OUT, 2**31, 8), 64),  # a number of 64 bits
        ((X, OUT, 5, 8), 128),  # another constant
    ],
)
def test_triton_is_asked_for_what_needs_another_variant(make: Any, arguments: tuple, constant: int) -> None:
    add, jitted = make()
    add[(5,)](X, OUT, 5, 8, BLOCK=64)
    add[(5,)](*arguments, BLOCK=constant)
    assert len(jitted.asked) == 2
    add[(5,)](*arguments, BLOCK=constant)
    assert len(jitted.asked) == 2
    assert len(jitted.compiled[1].launched) == 1


def test_an_interpreter_is_always_asked(make: Any) -> None:
    add, jitted = make(compiles=False)
    for _ in range(3):
        add[(5,)](X, OUT, 5, 8, BLOCK=64)
    assert len(jitted.asked) == 3


def test_nothing_is_lost_with_a_triton_whose_variants_want_other_arguments(make: Any) -> None:
    add, jitted = make(wants=4)
    for _ in range(3):
        add[(5,)](X, OUT, 5, 8, BLOCK=64)
    assert len(jitted.asked) == 3
    assert not any(compiled.launched for compiled in jitted.compiled)
