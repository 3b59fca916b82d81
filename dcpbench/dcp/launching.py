"""Triton kernels that are launched again without a second look at their arguments.

Triton decides at every launch which compiled variant serves: 50 to 80 microseconds on the host, as long as many
of these kernels run. Here the variant is found by a key of what it depends on, and launched directly; Triton itself
is asked for each key once. Only imported where kernels run: Triton exists only beside CUDA.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import triton
from torch import Tensor

_INT32 = 2**31


class Kernel:
    """What `triton.jit` makes, called alike: `kernel[grid](*arguments, num_warps=4, **constants)`."""

    def __init__(self, function: Callable[..., None], numbers: Sequence[str], unaligned: Sequence[str]) -> None:
        self._triton = triton.jit(
            function, do_not_specialize=list(numbers), do_not_specialize_on_alignment=list(unaligned)
        )
        self._names = list(inspect.signature(function).parameters)
        self._numbers = frozenset(self._names.index(name) for name in numbers)
        self._variants: dict[tuple[object, ...], Any] = {}
        self._direct = True

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: object, num_warps: int = 4, **constants: object) -> None:
        # What a variant depends on: types, alignment of pointers, and numbers that are compiled into it.
        key: list[object] = [num_warps, *constants.values()]
        for place, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                key.append(argument.dtype)
                key.append(argument.data_ptr() % 16)
            elif place in self._numbers:
                assert isinstance(argument, int)
                key.append(-_INT32 <= argument < _INT32)
            else:
                key.append(argument)
        variant = self._variants.get(tuple(key))
        if variant is not None:
            try:
                variant[(*grid, 1, 1)[:3]](*arguments, *constants.values())
            except TypeError:
                # A Triton whose compiled kernels want other arguments: nothing has been launched.
                self._direct = False
                self._variants.clear()
            else:
                return
        compiled = self._triton[grid](*arguments, num_warps=num_warps, **constants)
        # An interpreter compiles nothing; and constants are handed on in the order of the signature.
        if self._direct and hasattr(compiled, "packed_metadata") and self._names[len(arguments) :] == [*constants]:
            self._variants[tuple(key)] = compiled


def kernel(*, numbers: Sequence[str] = (), unaligned: Sequence[str] = ()) -> Callable[[Callable[..., None]], Kernel]:
    """Decorates a Triton kernel.

    Args:
        numbers: integers that differ from call to call, so that nothing is compiled for their values.
        unaligned: pointers that begin anywhere, so that nothing is compiled for their alignment.
    """
    return lambda function: Kernel(function, numbers, unaligned)
