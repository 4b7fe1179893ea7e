"""Which form of a kernel runs, and the tile sizes of the Pallas forms for each GPU generation.

Imports nothing of ours, and asks no device: the caller says which one it has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax.numpy as jnp

Form = Literal["pallas", "interpret", "reference"]
Gpu = Literal["sm_80", "sm_90"]
"""Whose tiles are taken. sm_80 stands for Ampere and Ada; its tiles keep to their 99 KiB of shared
memory per block. sm_90 is Hopper."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A static argument of every operation.

    reference: jnp, on any device. pallas: the GPU kernel (Triton lowering). interpret: that
    kernel's source run by XLA on a CPU, for tests.
    """

    form: Form = "reference"
    gpu: Gpu = "sm_90"
    is_exact: bool = True
    """A row's bits depend on that row alone. False: instructions and splits of a sum may follow the
    number of rows, which can be faster. The reference form knows no difference: on a CPU it is
    exact, on a GPU XLA chooses by shape."""

    @property
    def compiler_options(self) -> dict[str, bool]:
        """What XLA must be told about programs that are made of these operations.

        Exact programs round to bfloat16 where their source says so: by default XLA keeps a value in
        float32 where it can fuse its users, which one program may do and another not. And how the
        operations between the kernels are computed is not chosen by timing, program by program.
        """
        if self.form == "pallas" and self.is_exact:
            return {
                "xla_allow_excess_precision": False,
                "xla_gpu_experimental_enable_fusion_autotuner": False,
            }
        return {}


REFERENCE = Backend()
MIXED = (10, 11)
"""Compute capabilities (Blackwell in data centres) where Triton takes tcgen05 for 64 rows and more,
mma.sync below, whatever the tiles of sm_80 and sm_90 are made for."""


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
    gpu = _gpu(compute_capability or "") if platform == "gpu" else None
    if requested == "auto":
        requested = "reference" if gpu is None else "pallas"
    if requested == "pallas" and gpu is None:
        raise ValueError(
            f"kernel backend pallas needs an NVIDIA GPU of compute capability 8.0 or later; got "
            f"platform {platform}, compute capability {compute_capability}: take auto or reference"
        )
    if requested == "pallas" and is_exact and _major(compute_capability or "") in MIXED:
        raise ValueError(
            f"kernel backend pallas does not keep a row's bits free of its batch on compute "
            f"capability {compute_capability}, whose products take other instructions for few rows "
            f"than for many: switch batch invariance off (--no-batch-invariant), or take reference"
        )
    form = next(name for name in get_args(Form) if name == requested)
    return Backend(form, gpu or "sm_90", is_exact)


def _gpu(compute_capability: str) -> Gpu | None:
    """Only Hopper has its warpgroup products; later ones are given the other tiles."""
    major = _major(compute_capability)
    if major < 8:
        return None
    return "sm_90" if major == 9 else "sm_80"


def _major(compute_capability: str) -> int:
    """9 of "9.0"; 0 of what is not NVIDIA's, such as "gfx942"."""
    found = re.fullmatch(r"(\d+)\.\d+", compute_capability)
    return int(found[1]) if found else 0


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
class AttentionTiles:
    """Of the decode and the ragged kernel; see attention_tile.py."""

    kv: int  # tokens of a KV tile: the same in both kernels
    stages: int  # of a software pipeline over KV tiles
    decode_rows: int  # at least, of a decode program's product; the heads of a query are real
    decode_warps: int
    decode_programs: int  # wanted: where queries are fewer, their KV is shared out
    ragged_rows: int  # queries times heads of a ragged program
    ragged_warps: int
    is_paired: bool = False
    """int8 values are converted in pairs: fewer instructions, and more registers."""


DECODE_PROGRAMS = 4 * 3 * 132  # three at once on each multiprocessor; four turns, as lengths differ


def attention_tiles(
    backend: Backend, head_dim: int, q_dtype: jnp.dtype, kv_dtype: jnp.dtype
) -> AttentionTiles:
    """No spills on either generation."""
    width = max(64, 1 << (head_dim - 1).bit_length())
    is_int8, is_hopper = jnp.dtype(kv_dtype).itemsize == 1, backend.gpu == "sm_90"
    if jnp.dtype(q_dtype).itemsize > 2:  # no tensor cores: registers hold the operands
        stages, warps = (2, 8 if is_int8 else 4) if is_hopper else (1, 8)
        return AttentionTiles(16, stages, 16, warps, DECODE_PROGRAMS, 16, 8)
    # 32 rows: on Hopper too few for a warpgroup's product, so that decode and ragged kernels take
    # the same instructions. (decode_rows 64, ragged_rows 128 and ragged_warps 8 would make both
    # take the warpgroup's.)
    kv = min(8192 // width, 64 if is_int8 and is_hopper else 128)
    warps = 8 if is_int8 or width > 128 else 4
    tiles = AttentionTiles(kv, 3, 16, 4, DECODE_PROGRAMS, 32, warps, is_paired=is_hopper)
    if is_hopper and not backend.is_exact:
        return replace(tiles, ragged_rows=128, ragged_warps=8)
    return tiles
