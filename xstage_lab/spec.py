"""What is studied: links, machines, workloads and tunings, as frozen, validated dataclasses.

Everything is SI. NaN in a machine or link means *not known*; `assumed` names the fields whose
value nobody measured and somebody had to suppose.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass
from typing import Self

from xstage_lab.errors import (
    Infeasible,
    InvalidValue,
    UnknownFact,
    require_choice,
    require_number,
)

TOPOLOGIES = ("switch", "full mesh", "host bridge")
DTYPE_BYTES = {"bf16": 2, "fp8": 1, "fp32": 4}
MAX_GPUS = 1024
SYNCS = ("free", "lockstep")
DESTINATIONS = ("round-robin", "row-owner", "row-owner-unrotated", "hot:SHARE")


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """The store path of one GPU, from the issuing SM to the destination's memory.

    Attributes
    ----------
    egress_bytes_per_s, ingress_bytes_per_s : float
        What one GPU's link carries out and in, payload bytes. NaN is not known.
    egress_low_bytes_per_s, egress_high_bytes_per_s : float
        The range that different sources measured, NaN where nobody did.
    vendor_bytes_per_s : float
        The marketed rate of one direction.
    per_sm_bytes_per_s : float
        One SM's issue rate, `r_SM`.
    issue_latency_s : float
        Start-up of a burst's issue, `t0`.
    path_capacity_bytes : float
        Bytes the GPU's shared path holds after acceptance, `q_path`; inf is unbounded.
    per_sm_capacity_bytes : float
        Bytes of one SM that may be accepted and not yet on the link, `q_SM`.
    credit_bytes, credit_latency_s : float
        Buffer at each destination, and the time after which its room is known at the source.
    assumed : frozenset of str
        Fields that are supposed, not measured.
    source : str
        Who measured, and what.
    """

    name: str
    topology: str = "switch"
    egress_bytes_per_s: float = math.nan
    ingress_bytes_per_s: float = math.nan
    egress_low_bytes_per_s: float = math.nan
    egress_high_bytes_per_s: float = math.nan
    vendor_bytes_per_s: float = math.nan
    per_sm_bytes_per_s: float = math.nan
    issue_latency_s: float = math.nan
    path_capacity_bytes: float = math.nan
    per_sm_capacity_bytes: float = math.nan
    credit_bytes: float = math.nan
    credit_latency_s: float = math.nan
    assumed: frozenset[str] = frozenset()
    source: str = ""

    def __post_init__(self) -> None:
        require_choice("topology", self.topology, TOPOLOGIES)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not field.name.endswith(("_bytes_per_s", "_bytes", "_s")) or value != value:
                continue
            if value == math.inf:
                continue
            unit = "B/s" if field.name.endswith("_bytes_per_s") else (
                "B" if field.name.endswith("_bytes") else "s")
            require_number(f"{self.name}: {field.name}", value, low=0.0, unit=unit,
                           open_low=not field.name.endswith("latency_s"))

    def replace(self, **changes: float | str | frozenset[str]) -> Self:
        """Return a copy with `changes`; a changed quantity becomes *assumed*."""
        quantities = {k for k in changes if k.endswith(("_s", "_bytes"))}
        changes.setdefault("assumed", self.assumed | quantities)
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """A node of equal GPUs.

    Attributes
    ----------
    n_sms, max_gpus : int
        SMs of one GPU; GPUs of one node.
    clock_hz, smem_per_cta_bytes, hbm_bytes_per_s, l2_bytes : float
        NaN is not known.
    bf16_flop_per_s, fp8_flop_per_s : float
        Dense rate of one GPU: as measured where somebody did, else the vendor's.
    link : LinkSpec
        The store path of one GPU.
    assumed : frozenset of str
        Fields that are supposed or the vendor's claim, not measured.
    source : str
        Where the figures come from.
    """

    name: str
    n_sms: int
    max_gpus: int
    link: LinkSpec
    clock_hz: float = math.nan
    smem_per_cta_bytes: float = math.nan
    bf16_flop_per_s: float = math.nan
    fp8_flop_per_s: float = math.nan
    hbm_bytes_per_s: float = math.nan
    l2_bytes: float = math.nan
    assumed: frozenset[str] = frozenset()
    source: str = ""

    def __post_init__(self) -> None:
        require_number(f"{self.name}: n_sms", self.n_sms, low=1, high=100_000, integer=True)
        require_number(f"{self.name}: max_gpus", self.max_gpus, low=1, high=MAX_GPUS, integer=True)
        for name in ("clock_hz", "smem_per_cta_bytes", "bf16_flop_per_s", "fp8_flop_per_s",
                     "hbm_bytes_per_s", "l2_bytes"):
            value = getattr(self, name)
            if value == value:
                require_number(f"{self.name}: {name}", value, low=0.0, open_low=True)

    def flop_per_s(self, dtype: str) -> float:
        """Dense FLOP/s of one GPU for operands of `dtype`, raising `UnknownFact` if not known."""
        rate = {"bf16": self.bf16_flop_per_s, "fp8": self.fp8_flop_per_s}.get(dtype, math.nan)
        if math.isnan(rate):
            raise UnknownFact(f"{dtype}_flop_per_s", self.name,
                              "enter one in a machine file, or measure the tile's compute time.")
        return rate

    @property
    def full_rate_gpus(self) -> int:
        """Fewest GPUs among which one GPU's whole store rate can be used.

        Behind a switch one peer is enough; in a full mesh each peer has a link of its own, so
        only all peers together see the whole rate.
        """
        return self.max_gpus if self.link.topology == "full mesh" else min(2, self.max_gpus)


def _make_plain(spec: object) -> None:
    """Turn NumPy and whole float numbers of a checked spec into plain Python numbers."""
    for field in dataclasses.fields(spec):  # type: ignore[arg-type]
        value = getattr(spec, field.name)
        if isinstance(value, numbers.Real):
            plain = float(value) if field.name.endswith("_s") else int(float(value))
            object.__setattr__(spec, field.name, plain)


@dataclass(frozen=True, kw_only=True)
class BurstTrain:
    """K producers issue a burst each, then do other work for a gap, again and again.

    Attributes
    ----------
    n_producers : int
        Producers (CTAs) on each GPU, K.
    burst_bytes : int
        Bytes of one producer's burst, B; V = K B.
    gap_s : float
        Other work between the acceptance of a burst and the start of the next, G.
    n_bursts : int
        Bursts of each producer, N.
    sync : str
        `free` (each producer runs on its own) or `lockstep` (a barrier before every gap).
    n_gpus : int
        GPUs that store to each other; producer k of GPU g stores to its peers in turn.
    """

    n_producers: int
    burst_bytes: int
    gap_s: float
    n_bursts: int = 50
    sync: str = "free"
    n_gpus: int = 2

    def __post_init__(self) -> None:
        require_number("n_producers", self.n_producers, low=1, high=100_000, integer=True)
        require_number("burst_bytes", self.burst_bytes, low=1, high=2**40, unit="B", integer=True)
        require_number("gap_s", self.gap_s, low=0.0, high=10.0, unit="s")
        require_number("n_bursts", self.n_bursts, low=1, high=1_000_000, integer=True)
        require_number("n_gpus", self.n_gpus, low=1, high=MAX_GPUS, integer=True)
        require_choice("sync", self.sync, SYNCS)
        _make_plain(self)

    @property
    def volume_bytes(self) -> int:
        """Bytes of one burst of all producers of a GPU, V = K B."""
        return self.n_producers * self.burst_bytes


@dataclass(frozen=True, kw_only=True)
class FusedGemm:
    """A persistent GEMM on every GPU whose output tiles are stored to their owners.

    Attributes
    ----------
    m, n, k : int
        Each GPU's own GEMM: (m, k) x (k, n), elements.
    n_gpus : int
        GPUs taking part, P. With 1 nothing is remote.
    destinations : str
        `round-robin` (tile index mod P), `row-owner` (contiguous rows per owner, each GPU
        starting at its successor's rows), `row-owner-unrotated` (all GPUs store to the same
        owner at a time: a moving incast), `hot:SHARE` (that share of the tiles goes to GPU 0).
    dtype, out_dtype : str
        Operands `bf16` or `fp8`; output `bf16` or `fp32`.
    """

    m: int
    n: int
    k: int
    n_gpus: int = 8
    destinations: str = "round-robin"
    dtype: str = "bf16"
    out_dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            require_number(name, getattr(self, name), low=1, high=2**24, unit="elements",
                           integer=True)
        require_number("n_gpus", self.n_gpus, low=1, high=MAX_GPUS, integer=True)
        require_choice("dtype", self.dtype, ("bf16", "fp8"))
        require_choice("out_dtype", self.out_dtype, ("bf16", "fp32"))
        if not str(self.destinations).startswith("hot:"):
            require_choice("destinations", self.destinations, DESTINATIONS)
        else:
            _ = self.hot_share_ratio
        _make_plain(self)

    @property
    def hot_share_ratio(self) -> float:
        """Share of the tiles that go to the hot GPU; NaN if there is none."""
        if not self.destinations.startswith("hot:"):
            return math.nan
        text = self.destinations.removeprefix("hot:")
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if not 0.0 <= share <= 1.0:
            raise InvalidValue("destinations", self.destinations, "hot:SHARE with a share 0 to 1",
                               remedy="For example hot:0.4.")
        return share

    @property
    def flop(self) -> int:
        """Floating-point operations of one GPU, 2 m n k."""
        return 2 * self.m * self.n * self.k

    @property
    def store_bytes(self) -> int:
        """Output bytes of one GPU, those for itself included."""
        return self.m * self.n * DTYPE_BYTES[self.out_dtype]


Workload = BurstTrain | FusedGemm



@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a fused kernel is cut and staged.

    Attributes
    ----------
    tile_m, tile_n, tile_k : int
        Output tile and depth of one operand stage, elements.
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
        _make_plain(self)

    def smem_bytes(self, workload: FusedGemm) -> int:
        """Shared memory of one CTA: staging slots plus operand stages, bytes."""
        slots = (self.issue_depth - 1) * self.tile_m * self.tile_n
        stages = self.n_stages * (self.tile_m + self.tile_n) * self.tile_k
        return slots * DTYPE_BYTES[workload.out_dtype] + stages * DTYPE_BYTES[workload.dtype]


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
    tuning = tuning or Tuning()
    if tuning.n_ctas is not None and tuning.n_ctas > machine.n_sms:
        raise InvalidValue("n_ctas", tuning.n_ctas, f"1 to {machine.n_sms}", "CTAs",
                           f"{machine.name} has {machine.n_sms} SMs and a persistent kernel "
                           "needs all its CTAs co-resident.")
    needed, limit = tuning.smem_bytes(workload), machine.smem_per_cta_bytes
    if needed > limit:  # an unknown (NaN) limit excludes nothing
        raise Infeasible(
            f"tile {tuning.tile_m}x{tuning.tile_n}x{tuning.tile_k} with issue_depth = "
            f"{tuning.issue_depth} needs {needed / 1024:.0f} KiB of shared memory per CTA, "
            f"{tuning.n_stages} operand stages and {tuning.issue_depth - 1} staging slots; "
            f"{machine.name} allows {limit / 1024:.0f} KiB. Take a smaller tile, fewer stages "
            "or a smaller depth.")
