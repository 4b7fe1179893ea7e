"""Which form of a kernel runs, and the tile sizes of the Pallas forms for each GPU generation.

Imports nothing of ours, and asks no device: the caller says which one it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Form = Literal["pallas", "interpret", "reference"]
Gpu = Literal["sm_80", "sm_90"]
"""Whose tiles are taken. sm_80 stands for Ampere and Ada; its tiles keep to their 99 KiB of shared
memory per block. sm_90 is Hopper."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A static argument of every operation.

    reference: jnp, on any device. pallas: the GPU kernel (Triton lowering). interpret: that kernel's
    source run by XLA on a CPU, for tests.
    """

    form: Form = "reference"
    gpu: Gpu = "sm_90"
    is_exact: bool = True
    """A row's bits depend on that row alone. False: instructions and splits of a sum may follow the
    number of rows, which can be faster. The reference form is always exact."""


REFERENCE = Backend()


def resolve_backend(
    requested: str, *, platform: str, compute_capability: str | None = None, is_exact: bool = True
) -> Backend:
    """`auto` or a form's name -> what runs on this device. `auto` is pallas on a GPU.

    Args:
        platform: of JAX's device: cpu or gpu.
        compute_capability: of a GPU, such as "9.0".
    Raises: ValueError for a name that does not exist, or pallas where there is no GPU for it.
    """
    if requested not in ("auto", *get_args(Form)):
        raise ValueError(
            f"kernel backend must be auto or one of {', '.join(get_args(Form))}; got {requested!r}"
        )
    gpu = _gpu(compute_capability) if platform == "gpu" else None
    if requested == "auto":
        requested = "reference" if gpu is None else "pallas"
    if requested == "pallas" and gpu is None:
        raise ValueError(
            f"kernel backend pallas needs an NVIDIA GPU of compute capability 8.0 or later; got "
            f"platform {platform}, compute capability {compute_capability}: take auto or reference"
        )
    form = next(name for name in get_args(Form) if name == requested)
    return Backend(form, gpu or "sm_90", is_exact)


def _gpu(compute_capability: str | None) -> Gpu | None:
    """Only Hopper has its warpgroup products; later ones are given the other tiles."""
    if compute_capability is None or float(compute_capability) < 8:
        return None
    return "sm_90" if compute_capability.startswith("9.") else "sm_80"


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Of kernels that take a whole row, or all heads of a token, in one program. No figure follows
    the number of rows: a row's sums have one layout.
    """

    per_thread: int  # elements, until a program has max_warps
    max_warps: int
    most: int  # elements of one program

    def warps(self, elements: int) -> int:
        """For a power of two of elements."""
        return min(self.max_warps, max(1, elements // (32 * self.per_thread)))


ROW_TILES: dict[Gpu, RowTiles] = {
    "sm_80": RowTiles(per_thread=16, max_warps=16, most=16384),
    "sm_90": RowTiles(per_thread=16, max_warps=16, most=16384),
}
TOKEN_TILES: dict[Gpu, RowTiles] = {
    "sm_80": RowTiles(per_thread=8, max_warps=16, most=16384),
    "sm_90": RowTiles(per_thread=8, max_warps=16, most=16384),
}
