"""How a fused kernel is cut and staged, and what a machine can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from xstage_lab.errors import Infeasible, InvalidValue, require_number
from xstage_lab.spec.attention import UlyssesAttention
from xstage_lab.spec.machine import MachineSpec
from xstage_lab.spec.moe import MoELayer
from xstage_lab.spec.workloads import DTYPE_BYTES, BurstTrain, FusedGemm, make_plain

N = TypeVar("N", int, NDArray[np.int64])

Workload = BurstTrain | FusedGemm | MoELayer | UlyssesAttention

#: Queries and keys of a tile of attention, the first that fits is taken where none is asked for.
_ATTENTION_TILES = ((128, 128), (128, 64), (64, 64), (64, 32), (32, 32), (16, 16))


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a fused kernel is cut and staged.

    Attributes
    ----------
    tile_m, tile_n, tile_k : int
        Output tile and depth of one operand stage, elements. Of attention: queries of a tile,
        and keys of one operand stage; `tile_k` has no part in it.
    issue_depth : int
        Output tiles an SM may hold between the start of a tile's MMA and the acceptance of
        its last store. Depth 1 serialises compute and issue; depth D needs D - 1 staging slots.
    n_stages : int
        Operand stages in shared memory.
    n_ctas : int or None
        Persistent CTAs on each GPU, one per SM; None takes all SMs.
    """

    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    issue_depth: int = 2
    n_stages: int = 3
    n_ctas: int | None = None

    def __post_init__(self) -> None:
        for name, high in (("tile_m", 4096), ("tile_n", 4096), ("tile_k", 4096),
                           ("issue_depth", 64), ("n_stages", 64)):
            require_number(name, getattr(self, name), low=1, high=high, integer=True)
        if self.n_ctas is not None:
            require_number("n_ctas", self.n_ctas, low=1, high=100_000, integer=True,
                           remedy="Leave it out to use every SM.")
        make_plain(self)

    def smem_bytes(self, workload: FusedGemm | MoELayer | UlyssesAttention) -> int:
        """Shared memory of one CTA: staging slots plus operand stages, bytes."""
        return smem_bytes(workload, self.tile_m, self.tile_n, self.tile_k, self.issue_depth,
                          self.n_stages)


def smem_bytes(workload: FusedGemm | MoELayer | UlyssesAttention, tile_m: N, tile_n: N,
               tile_k: N, issue_depth: N, n_stages: N) -> N:
    """Shared memory of one CTA: staging slots plus operand stages, bytes; also for arrays."""
    element = DTYPE_BYTES[workload.dtype]
    if isinstance(workload, UlyssesAttention):
        slot = tile_m * workload.head_dim
        operands = slot + 2 * n_stages * tile_n * workload.head_dim  # queries, keys and values
    else:
        slot = tile_m * tile_n
        operands = n_stages * (tile_m + tile_n) * tile_k
    slots = (issue_depth - 1) * slot * DTYPE_BYTES[workload.out_dtype]
    needed: N = slots + operands * element
    return needed


def default_tuning(workload: Workload, machine: MachineSpec) -> Tuning:
    """Return what is taken where no tuning is given.

    Of attention the queries stay in shared memory beside the stages of keys *and* values, so that
    the default tile of a GEMM and its three stages do not fit: two stages, and the largest of a
    few tiles that does.
    """
    if not isinstance(workload, UlyssesAttention):
        return Tuning()
    sizes = [Tuning(tile_m=m, tile_n=n, n_stages=2) for m, n in _ATTENTION_TILES]
    limit = machine.smem_per_cta_bytes  # an unknown (NaN) limit excludes nothing
    return next((t for t in sizes if not t.smem_bytes(workload) > limit), sizes[-1])


def check_feasible(workload: Workload, machine: MachineSpec, tuning: Tuning | None = None) -> None:
    """Raise `Infeasible` or `InvalidValue` where `machine` cannot run the configuration.

    The message names the limit, the value asked for, and what fits.
    """
    if workload.n_gpus > machine.max_gpus:
        raise InvalidValue("n_gpus", workload.n_gpus, f"1 to {machine.max_gpus}", "GPUs",
                           f"{machine.name} has {machine.max_gpus} in a node.")
    if isinstance(workload, BurstTrain):
        if workload.n_producers > machine.n_sms:
            raise InvalidValue("n_producers", workload.n_producers, f"1 to {machine.n_sms}",
                               "CTAs", f"{machine.name} has {machine.n_sms} SMs, and producers "
                               "that are not co-resident would wait for each other forever.")
        return
    tuning = tuning or default_tuning(workload, machine)
    if tuning.n_ctas is not None and tuning.n_ctas > machine.n_sms:
        raise InvalidValue("n_ctas", tuning.n_ctas, f"1 to {machine.n_sms}", "CTAs",
                           f"{machine.name} has {machine.n_sms} SMs and a persistent kernel "
                           "needs all its CTAs co-resident.")
    if isinstance(workload, UlyssesAttention) and workload.mode == "dedicated":
        n_ctas = tuning.n_ctas or machine.n_sms
        require_number("n_comm_sms", workload.n_comm_sms, low=1, high=n_ctas - 1, unit="SMs",
                       integer=True, remedy="Some SMs must be left to compute.")
    needed, limit = tuning.smem_bytes(workload), machine.smem_per_cta_bytes
    if needed > limit:  # an unknown (NaN) limit excludes nothing
        raise Infeasible(
            f"tile {tuning.tile_m}x{tuning.tile_n}x{tuning.tile_k} with issue_depth = "
            f"{tuning.issue_depth} needs {needed / 1024:.0f} KiB of shared memory per CTA, "
            f"{tuning.n_stages} operand stages and {tuning.issue_depth - 1} staging slots; "
            f"{machine.name} allows {limit / 1024:.0f} KiB. Take a smaller tile, fewer stages "
            "or a smaller depth.")
