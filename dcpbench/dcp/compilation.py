"""Loops that numba compiles where it is installed, and that run as the plain Python they are where it is not.

A function marked `compiled` sees only integers, floats, and vectors that `vector`, `integers` and `floats` make:
NumPy arrays when it is compiled, lists (whose elements Python reads much faster) when it is not. It may use nothing
that differs between them, so both give the same results to the last bit: numba contracts and reorders no floating-point
operation unless asked to. Setting numba's own NUMBA_DISABLE_JIT=1 takes the plain functions.

What was compiled is kept on disk beside the function's module. numba itself compiles again when the function's own file
changes; here, when any module of its package does, since compiled functions contain those of other modules that
they call.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

try:
    import numba
except ImportError:
    COMPILED = False
    """Whether functions marked `compiled` are machine code."""
else:
    COMPILED = not vars(numba.config)["DISABLE_JIT"]

Function = TypeVar("Function", bound=Callable[..., Any])
Vector = Any
"""A NumPy array of one dimension, or a list."""


def compiled(function: Function) -> Function:
    """Compile on the first call, or take it from the disk; without numba the function itself."""
    if not COMPILED:
        return function
    # The name is part of what numba finds a stored result by.
    function.__qualname__ += f"_{_sources(Path(inspect.getfile(function)).parent)}"
    made: Any
    try:
        made = numba.njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # neither the module's folder nor the user's cache can be written
        made = numba.njit(error_model="numpy")(function)
    return cast(Function, made)


@cache
def _sources(folder: Path) -> str:
    """Eight hexadecimal digits of all modules in a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:8]


def vector(array: NDArray[Any]) -> Vector:
    """The elements of a one-dimensional array for a compiled function."""
    return array if COMPILED else array.tolist()


def integers(count: int) -> Vector:
    """`count` zeros."""
    return np.zeros(count, np.int64) if COMPILED else [0] * count


def floats(count: int) -> Vector:
    """`count` zeros."""
    return np.zeros(count) if COMPILED else [0.0] * count
