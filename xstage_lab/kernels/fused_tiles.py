"""What `fused_tiles.cu` takes: its variants and their limits, and its arguments as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xstage_lab.errors import Infeasible, InvalidValue, require_choice, require_number
from xstage_lab.kernels.source import Source, read
from xstage_lab.schedule import GEMM_TILE, LINEAR_1, LINEAR_2, Program
from xstage_lab.spec import DTYPE_BYTES, FusedGemm, MoELayer, Tuning

STORE_PATHS = ("registers", "bulk")
SIGNALS = ("none", "release", "fence")
TILE_SIZES, TILE_DEPTHS = (64, 128, 256), (32, 64)
N_MMA_WARPS, N_STORE_WARPS = 8, 4
N_THREADS = 32 * (N_MMA_WARPS + N_STORE_WARPS)
MAX_GPUS, MAX_LAYERS = 8, 16
MAX_SUMS = 128       # of one thread; it has registers for no more
ALIGNMENT_BYTES = 16
WAITS = ("all CTAs of all GPUs to start", "the tasks it depends on", "an empty slot",
         "a tile in its slot")

TASK = np.dtype([
    ("m0", np.int32), ("n0", np.int32), ("m", np.int32), ("n", np.int32), ("k", np.int32),
    ("layer", np.int32), ("owner", np.int32), ("waits_for", np.int32), ("wait_count", np.int32),
    ("signals", np.int32), ("unused", np.int32, 2),
])
TILE_TIMES = np.dtype([
    ("mma_start_cycles", np.int64), ("mma_end_cycles", np.int64), ("slot_wait_cycles", np.int64),
    ("handed_over_cycles", np.int64), ("issue_start_cycles", np.int64, N_STORE_WARPS),
    ("issue_end_cycles", np.int64, N_STORE_WARPS), ("signal_end_cycles", np.int64, N_STORE_WARPS),
])
CTA_TIMES = np.dtype([
    ("sm", np.int64), ("start_cycles", np.int64), ("start_ns", np.int64), ("end_cycles", np.int64),
    ("end_ns", np.int64),
])
LAYER = np.dtype([
    ("a", np.uint64), ("b", np.uint64), ("out", np.uint64, MAX_GPUS),
    ("a_ld", np.int64), ("b_ld", np.int64), ("out_ld", np.int64),
])
PARAMS = np.dtype([
    ("layers", LAYER, MAX_LAYERS), ("flags", np.uint64, MAX_GPUS), ("tasks", np.uint64),
    ("counters", np.uint64), ("tile_times", np.uint64), ("cta_times", np.uint64),
    ("started", np.uint64), ("abort", np.uint64), ("budget_cycles", np.int64),
    ("report", np.uint64), ("n_tasks", np.int32), ("n_starters", np.int32),
])


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One compilation of the kernel.

    Attributes
    ----------
    tile_m, tile_n, tile_k, issue_depth, n_stages : int
        As in `Tuning`.
    out_dtype : str
        `bf16` or `fp32`.
    store_path : str
        `registers` (16-byte stores) or `bulk` (copies from shared memory, sm_90 and up).
    signal : str
        How a stored tile is announced: `none`, `release` or `fence`.

    Raises
    ------
    UnknownName, InvalidValue, Infeasible
        If the kernel has no such variant, naming the limit.
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    issue_depth: int = 2
    n_stages: int = 3
    out_dtype: str = "bf16"
    store_path: str = "registers"
    signal: str = "none"

    def __post_init__(self) -> None:
        for name, value, allowed in (("tile_m", self.tile_m, TILE_SIZES),
                                     ("tile_n", self.tile_n, TILE_SIZES),
                                     ("tile_k", self.tile_k, TILE_DEPTHS)):
            if value not in allowed:
                raise InvalidValue(name, value, " or ".join(map(str, allowed)), "elements",
                                   "The kernel has no other tiles.")
        require_number("n_stages", self.n_stages, low=2, high=64, integer=True,
                       remedy="One stage is computed while another is loaded.")
        require_number("issue_depth", self.issue_depth, low=1, high=64, integer=True)
        require_choice("out_dtype", self.out_dtype, ("bf16", "fp32"))
        require_choice("store_path", self.store_path, STORE_PATHS)
        require_choice("signal", self.signal, SIGNALS)
        n_sums = self.tile_m * self.tile_n // (32 * N_MMA_WARPS)
        if n_sums > MAX_SUMS:
            raise Infeasible(f"tile {self.tile_m}x{self.tile_n} needs {n_sums} fp32 sums in each "
                             f"thread of {N_MMA_WARPS} MMA warps; registers allow {MAX_SUMS}. "
                             "Take 256x128 or a smaller tile.")

    @classmethod
    def of(cls, gemm: FusedGemm | MoELayer, tuning: Tuning, *, store_path: str,
           signal: str) -> Variant:
        """Return the variant that runs a fused GEMM, or an MoE layer, with a tuning.

        Raises
        ------
        UnknownName, InvalidValue, Infeasible
            If the kernel does not take the shape, the dtype or the number of GPUs.
        """
        if isinstance(gemm, MoELayer):
            _require_layers(gemm)
        if gemm.dtype != "bf16":
            raise InvalidValue("dtype", gemm.dtype, "bf16",
                               remedy="The kernel multiplies by mma.sync, which has no fp8 before "
                               "sm_89; the simulated device runs fp8.")
        require_number("n_gpus", gemm.n_gpus, low=1, high=MAX_GPUS, integer=True)
        return cls(tile_m=tuning.tile_m, tile_n=tuning.tile_n, tile_k=tuning.tile_k,
                   issue_depth=tuning.issue_depth, n_stages=tuning.n_stages,
                   out_dtype=gemm.out_dtype, store_path=store_path, signal=signal)

    @property
    def out_bytes(self) -> int:
        """Size of an output element."""
        return DTYPE_BYTES[self.out_dtype]

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: one KiB of tasks and counters, stages, slots."""
        stages = self.n_stages * (self.tile_m + self.tile_n) * self.tile_k * DTYPE_BYTES["bf16"]
        slot = self.tile_m * (self.tile_n + 8) * self.out_bytes
        if self.issue_depth == 1:
            return 1024 + -(-max(stages, slot) // 1024) * 1024
        return 1024 + -(-(stages + (self.issue_depth - 1) * slot) // 1024) * 1024

    def require_shared(self, limit_bytes: float) -> None:
        """Raise `Infeasible` where a CTA may have only `limit_bytes` of shared memory."""
        if self.shared_bytes > limit_bytes:
            raise Infeasible(
                f"tile {self.tile_m}x{self.tile_n}x{self.tile_k} with issue_depth = "
                f"{self.issue_depth} and n_stages = {self.n_stages} needs "
                f"{self.shared_bytes / 1024:.0f} KiB of shared memory per CTA, rows padded; the "
                f"device allows {limit_bytes / 1024:.0f} KiB. Take a smaller tile, fewer stages "
                "or a smaller depth.")

    @property
    def source(self) -> Source:
        """The kernel with this variant's parameters."""
        return read("fused_tiles", TILE_M=self.tile_m, TILE_N=self.tile_n, TILE_K=self.tile_k,
                    N_STAGES=self.n_stages, ISSUE_DEPTH=self.issue_depth,
                    OUT_BYTES=self.out_bytes, BULK=STORE_PATHS.index(self.store_path),
                    SIGNAL=SIGNALS.index(self.signal), SHARED_BYTES=self.shared_bytes)


def _require_layers(moe: MoELayer) -> None:
    """Raise `Infeasible` where an MoE layer has more experts or another output than a run may."""
    held = moe.experts // moe.n_gpus
    if 2 * held > MAX_LAYERS:
        raise Infeasible(f"{held} experts on a GPU need {2 * held} sets of operands; the kernel "
                         f"takes {MAX_LAYERS}. Take more GPUs or fewer experts.")
    if moe.out_dtype != "bf16":
        raise Infeasible("the kernel keeps one output type, and Linear-2 multiplies bf16: take "
                         "out_dtype = bf16.")


def leading_dimension(n_columns: int, element_bytes: int) -> int:
    """Return the elements from a row to the next: `n_columns` rounded up to 16 bytes."""
    return -(-n_columns * element_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // element_bytes


def require_aligned(field: str, address: int, ld: int, element_bytes: int) -> None:
    """Raise `InvalidValue` unless a matrix's address and leading dimension suit the kernel.

    Parameters
    ----------
    field : str
        The matrix's name.
    address, ld, element_bytes : int
        Where it begins, elements from a row to the next, and their size.
    """
    multiples = f"multiples of {ALIGNMENT_BYTES}"
    if address % ALIGNMENT_BYTES:
        raise InvalidValue(f"address of {field}", hex(address), multiples,
                           remedy="Copy the matrix to an allocation of its own.")
    if ld * element_bytes % ALIGNMENT_BYTES:
        raise InvalidValue(f"leading dimension of {field}", ld * element_bytes, multiples, "bytes",
                           "Pad each row; `leading_dimension` gives the smallest.")


def pack_tasks(program: Program, gpu: int) -> NDArray[np.void]:
    """Return a GPU's rows of a fused GEMM as the kernel reads them, dtype `TASK`.

    Of an MoE layer each expert has two layers' operands: 2 e for Linear-1, 2 e + 1 for Linear-2.
    """
    rows = program.tasks[gpu]
    if not np.isin(rows["kind"], (GEMM_TILE, LINEAR_1, LINEAR_2)).all():
        raise InvalidValue("kind", int(rows["kind"].max()), "tiles of GEMMs only",
                           remedy="Burst trains run on burst_gap.cu.")
    packed = np.zeros(rows.size, TASK)
    packed["layer"] = np.where(rows["kind"] == GEMM_TILE, 0,
                               2 * rows["group"] + (rows["kind"] == LINEAR_2))
    for name in ("m0", "n0", "m", "n", "k", "waits_for", "wait_count", "signals"):
        packed[name] = rows[name]
    packed["owner"] = np.where(rows["store_bytes"] > 0, rows["owner"], -1)
    return packed


def n_counters(tasks: NDArray[np.void]) -> int:
    """Return how many counters the tasks of a GPU use, at least 1 to allocate."""
    return 1 + max(0, int(tasks["waits_for"].max(initial=0)), int(tasks["signals"].max(initial=0)))


class LayerAt(NamedTuple):
    """Where the operands of one layer of one GPU lie, and where its results go.

    Attributes
    ----------
    a, b : int
        Addresses of bf16 matrices (m, k) and (n, k), row by row.
    out : sequence of int
        By owner: address of this GPU's output in its memory.
    a_ld, b_ld, out_ld : int
        Elements from a row to the next.
    """

    a: int
    b: int
    out: Sequence[int]
    a_ld: int
    b_ld: int
    out_ld: int


def pack_params(
    layers: Sequence[LayerAt], flags: Sequence[int], **fields: int
) -> NDArray[np.void]:
    """Return the kernel's argument for one GPU, dtype `PARAMS`.

    Parameters
    ----------
    layers : sequence of LayerAt
    flags : sequence of int
        By owner: address of the flags that this GPU raises there.
    **fields : int
        All other addresses and numbers, by name.
    """
    params = np.zeros((), PARAMS)
    for i, layer in enumerate(layers):
        for name, value in layer._asdict().items():
            params["layers"][i][name] = _by_gpu(value) if name == "out" else value
    params["flags"] = _by_gpu(flags)
    for name, value in fields.items():
        params[name] = value
    return params


def _by_gpu(addresses: Sequence[int]) -> NDArray[np.uint64]:
    table = np.zeros(MAX_GPUS, np.uint64)
    table[:len(addresses)] = addresses
    return table
