"""Attention under Ulysses sequence parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from xstage_lab.errors import InvalidValue, require_choice, require_number
from xstage_lab.spec.machine import MAX_GPUS
from xstage_lab.spec.workloads import DTYPE_BYTES, make_plain

MODES = ("fused", "dedicated", "serial")


@dataclass(frozen=True, kw_only=True)
class UlyssesAttention:
    """Every GPU computes some heads over the whole sequence; outputs go to who owns the rows.

    Attributes
    ----------
    sequence : int
        Tokens of the whole sequence; GPU p owns the p-th of n_gpus nearly equal parts.
    heads, head_dim : int
        Heads on all GPUs together, and elements of each.
    n_gpus : int
        GPUs taking part, P; each computes heads / P.
    causal : bool
        Whether a query sees only the keys up to its own.
    mode : str
        `fused` (the role that owns an output tile stores it to its destination), `dedicated`
        (tiles are left in memory, and SMs that do nothing else send them on) or `serial` (all of
        the attention, then the all-to-all).
    n_comm_sms : int
        Of `dedicated`: SMs that only send.
    dtype : str
        Operands and output `bf16`; `fp8` operands give bf16 output.
    """

    sequence: int
    heads: int
    head_dim: int = 128
    n_gpus: int = 8
    causal: bool = False
    mode: str = "fused"
    n_comm_sms: int = 16
    dtype: str = "bf16"
    out_dtype: str = "bf16"

    def __post_init__(self) -> None:
        require_number("n_gpus", self.n_gpus, low=1, high=MAX_GPUS, integer=True)
        require_number("sequence", self.sequence, low=self.n_gpus, high=2**24, unit="tokens",
                       integer=True, remedy="Every GPU owns a token at least.")
        require_number("heads", self.heads, low=1, high=2**12, integer=True)
        require_number("head_dim", self.head_dim, low=8, high=2**10, unit="elements",
                       integer=True)
        require_number("n_comm_sms", self.n_comm_sms, low=1, high=100_000, unit="SMs",
                       integer=True)
        require_choice("mode", self.mode, MODES)
        require_choice("dtype", self.dtype, ("bf16", "fp8"))
        require_choice("out_dtype", self.out_dtype, ("bf16", "fp32"))
        if not isinstance(self.causal, bool):
            raise InvalidValue("causal", self.causal, "True or False")
        if self.heads % self.n_gpus:
            fits = [p for p in range(1, self.heads + 1) if self.heads % p == 0]
            raise InvalidValue("n_gpus", self.n_gpus, f"divisors of heads = {self.heads}", "GPUs",
                               "Every GPU computes as many heads: take "
                               f"{', '.join(map(str, fits))}.")
        make_plain(self)

    def shard_rows(self, gpu: int) -> tuple[int, int]:
        """First row that `gpu` owns, and the first it does not own any more."""
        return (gpu * self.sequence // self.n_gpus, (gpu + 1) * self.sequence // self.n_gpus)

    @property
    def is_symmetric(self) -> bool:
        """Whether all GPUs do the same: as many rows, and every row as much work."""
        return not self.causal and self.sequence % self.n_gpus == 0

    @property
    def flop(self) -> int:
        """Floating-point operations of one GPU: scores and their product with the values."""
        keys = self.sequence * (self.sequence + 1) // 2 if self.causal else self.sequence**2
        return 4 * (self.heads // self.n_gpus) * self.head_dim * keys

    @property
    def store_bytes(self) -> int:
        """Output bytes of one GPU, those for itself included."""
        return (self.sequence * (self.heads // self.n_gpus) * self.head_dim
                * DTYPE_BYTES[self.out_dtype])
