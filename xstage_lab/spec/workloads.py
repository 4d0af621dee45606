"""Burst trains and fused GEMMs."""

from __future__ import annotations

import dataclasses
import math
import numbers
from dataclasses import dataclass

from xstage_lab.errors import InvalidValue, require_choice, require_number
from xstage_lab.spec.machine import MAX_GPUS

DTYPE_BYTES = {"bf16": 2, "fp8": 1, "fp32": 4}
SYNCS = ("free", "lockstep")
DESTINATIONS = ("round-robin", "row-owner", "row-owner-unrotated", "hot:SHARE")


def make_plain(spec: object) -> None:
    """Turn NumPy and whole float numbers of a checked spec into plain Python numbers."""
    for field in dataclasses.fields(spec):  # type: ignore[arg-type]
        value = getattr(spec, field.name)
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
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
        make_plain(self)

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
        make_plain(self)

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
