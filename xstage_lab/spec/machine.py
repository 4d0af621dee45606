"""Links and machines. NaN means *not known*."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Self

from xstage_lab.errors import UnknownFact, require_choice, require_number

TOPOLOGIES = ("switch", "full mesh", "host bridge")
MAX_GPUS = 1024


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
