"""What is timed and checked: a kernel's work, and the forms in which it can be done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from bench.kernels.costs import Cost
from pallas_kernels.backend import REFERENCE, Backend

Arrays = tuple[jax.Array, ...]


class Operands(NamedTuple):
    """Of one launch."""

    written: Arrays  # in place: given up by each launch, which returns them
    read: Arrays


@dataclass(frozen=True, slots=True)
class Form:
    """One way to do a case's work."""

    run: Callable[..., Any]  # (*written, *read) -> arrays; those that are written, if there are any
    prepare: Callable[[Operands], Operands] | None = None  # into this form's layout; not timed


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    cost: Cost
    operands: Callable[[int], Operands]  # of the copy with this number
    forms: Callable[[Backend], Mapping[str, Form]]  # by their columns in the table
    torch: Callable[[Any], Callable[[], object]] | None = None  # (torch) -> a launch


@dataclass(frozen=True, slots=True)
class Check:
    """A kernel's numbers against float64, and its rows' bits against the number of rows."""

    name: str
    rows: Callable[[int], np.ndarray]  # what the kernel makes of the first so many rows
    expected: Callable[[], np.ndarray]  # float64, of all rows
    bound: float  # of the largest error, relative to the largest number


def kernel_forms(
    run: Callable[..., Any], *, has_fast: bool = False
) -> Callable[[Backend], dict[str, Form]]:
    """The kernel, and its reference twin as XLA compiles it.

    Args:
        run: (*written, *read, backend=) -> arrays.
        has_fast: whether the kernel is another where it need not be exact.
    """

    def form(backend: Backend) -> Form:
        return Form(lambda *operands: run(*operands, backend=backend))

    def forms(backend: Backend) -> dict[str, Form]:
        fast = Backend(backend.form, backend.gpu, is_exact=False)
        chosen = {"exact": form(backend)}
        if has_fast:
            chosen["fast"] = form(fast)
        return {**chosen, "XLA": form(REFERENCE)}

    return forms
