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


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """What one block of a product x [M, K] @ weight [N, K].T computes at a time."""

    rows: int  # of M
    cols: int  # of N
    depth: int  # of K; a group of a scale, where that is shorter
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class MatmulTiles:
    """One kind of product on one GPU generation: tiles for few to many rows. The first that holds
    all rows is taken, or else the last.

    Tiles of an exact product agree in depth and in the tensor core instruction, which on Hopper
    follows from rows (64 per group of 4 warps) and cols: a row's sum then runs in one order,
    whichever is taken. Ampere has one instruction; which elements of K it takes together follows
    from the type that a weight is stored in.
    """

    exact: tuple[MatmulTile, ...]
    few: tuple[MatmulTile, ...] = ()  # before these, for a backend that is not exact
    single: MatmulTile = MatmulTile(16, 32, 32, 4, 1)  # float32 operands

    def choices(self, *, is_single: bool, is_exact: bool) -> tuple[MatmulTile, ...]:
        """By rising number of rows."""
        if is_single:
            return (self.single,)
        return self.exact if is_exact else (*self.few, *self.exact)


_FEW = MatmulTile(16, 64, 128, 4, 4)

DENSE_TILES: dict[Gpu, MatmulTiles] = {
    "sm_80": MatmulTiles(
        (
            MatmulTile(16, 64, 64, 4, 4),
            MatmulTile(64, 64, 64, 4, 3),
            MatmulTile(128, 128, 64, 8, 3),
        )
    ),
    "sm_90": MatmulTiles((MatmulTile(64, 128, 64, 4, 4), MatmulTile(128, 128, 64, 8, 4))),
}
INT8_TILES: dict[Gpu, MatmulTiles] = {  # depth: of scales per channel; otherwise a group's
    "sm_80": MatmulTiles((_FEW, MatmulTile(64, 64, 128, 4, 3), MatmulTile(128, 64, 128, 8, 3))),
    "sm_90": MatmulTiles(
        (MatmulTile(64, 64, 128, 4, 4), MatmulTile(128, 64, 128, 8, 3)), few=(_FEW,)
    ),
}
INT4_TILES: dict[Gpu, MatmulTiles] = {
    "sm_80": MatmulTiles((_FEW, MatmulTile(32, 64, 128, 4, 3), MatmulTile(128, 64, 128, 8, 3))),
    "sm_90": INT8_TILES["sm_90"],
}
W8A8_TILES: dict[Gpu, MatmulTiles] = {  # sums of integers are exact in any order
    "sm_80": MatmulTiles((_FEW, MatmulTile(64, 64, 128, 4, 3), MatmulTile(128, 128, 128, 8, 3))),
    "sm_90": MatmulTiles((_FEW, MatmulTile(64, 64, 128, 4, 4), MatmulTile(128, 128, 128, 8, 3))),
}
MATMUL_BLOCKS: dict[Gpu, int] = {"sm_80": 216, "sm_90": 264}  # that keep the GPU busy: 2 per SM
