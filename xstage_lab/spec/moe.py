"""The expert layers of a mixture-of-experts model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xstage_lab.errors import InvalidValue, require_choice, require_number
from xstage_lab.spec.machine import MAX_GPUS
from xstage_lab.spec.workloads import make_plain

ORDERS = ("wave", "interleaved")
ROUTINGS = ("balanced", "zipf:EXPONENT")
_PLACEMENT_SEED = 0  # where the popular experts of a skewed routing live


@dataclass(frozen=True, kw_only=True)
class MoELayer:
    """Experts spread over the GPUs; one persistent kernel computes both of their layers.

    A GPU computes Linear-1 (gate and up, hidden -> 2 x intermediate) and Linear-2 (intermediate
    -> hidden) for every row that is routed to its experts, and stores the tiles of Linear-2 to
    the GPUs where the tokens live (combine).

    Attributes
    ----------
    tokens : int
        Tokens of each GPU.
    hidden, intermediate : int
        Sizes of the model and of one expert, elements.
    experts, top_k : int
        Experts on all GPUs together; how many of them a token goes to.
    n_gpus : int
        GPUs taking part, P; each holds experts / P of them.
    routing : str or tuple of int
        `balanced`; `zipf:EXPONENT` (the r-th most popular expert gets a share ~ r^-EXPONENT,
        popular ones placed at random, the same each time); or the rows of each expert, a
        histogram that adds up to tokens x n_gpus x top_k.
    order : str
        `wave` (Linear-1 of a group of experts, then their Linear-2) or `interleaved` (Linear-2
        of a row block as soon as Linear-1 is `min_lead_rows` ahead of it).
    min_lead_rows : int or None
        None keeps two tiles of Linear-1 for every SM between the two.
    wave_experts : int or None
        Experts of a GPU in a wave; None takes the fewest whose Linear-1 gives every SM two tiles.
    dtype, out_dtype : str
        Operands `fp8` or `bf16`; combined output `bf16` or `fp32`.
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    n_gpus: int = 8
    routing: str | tuple[int, ...] = "balanced"
    order: str = "wave"
    min_lead_rows: int | None = None
    wave_experts: int | None = None
    dtype: str = "fp8"
    out_dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name, high in (("tokens", 2**24), ("hidden", 2**20), ("intermediate", 2**20),
                           ("experts", 2**16), ("n_gpus", MAX_GPUS)):
            require_number(name, getattr(self, name), low=1, high=high, integer=True)
        require_number("top_k", self.top_k, low=1, high=self.experts, unit="experts", integer=True,
                       remedy=f"A token goes to different experts, and there are {self.experts}.")
        require_choice("order", self.order, ORDERS)
        require_choice("dtype", self.dtype, ("bf16", "fp8"))
        require_choice("out_dtype", self.out_dtype, ("bf16", "fp32"))
        if self.experts % self.n_gpus:
            fits = [p for p in range(1, MAX_GPUS + 1) if self.experts % p == 0]
            raise InvalidValue("n_gpus", self.n_gpus, f"divisors of experts = {self.experts}",
                               "GPUs", f"Every GPU holds as many experts: take "
                               f"{', '.join(map(str, fits[:8]))}.")
        if self.min_lead_rows is not None:
            require_number("min_lead_rows", self.min_lead_rows, low=1,
                           high=int(self.gpu_rows.max()), unit="rows", integer=True,
                           remedy="No GPU has more rows to be ahead by; leave it out for two "
                                  "tiles of Linear-1 for every SM.")
        if self.wave_experts is not None:
            require_number("wave_experts", self.wave_experts, low=1,
                           high=self.experts // self.n_gpus, unit="experts", integer=True,
                           remedy="Those of one GPU.")
        make_plain(self)
        if isinstance(self.routing, list):
            object.__setattr__(self, "routing", tuple(self.routing))
        _ = self.expert_rows

    @functools.cached_property
    def expert_rows(self) -> NDArray[np.int64]:
        """Rows routed to each expert, shape (experts,); they add up to tokens x P x top_k."""
        rows, most = self.tokens * self.n_gpus * self.top_k, self.tokens * self.n_gpus
        if isinstance(self.routing, tuple):
            return _histogram(self.routing, self.experts, rows, most)
        if self.routing == "balanced":  # the same on every GPU, however few rows there are
            return np.diff(np.arange(self.experts + 1) * rows // self.experts)
        exponent = _exponent(self.routing)
        rank = np.random.default_rng(_PLACEMENT_SEED).permutation(
            np.arange(1, self.experts + 1, dtype=np.float64))
        return _apportion(np.power(rank, -exponent), rows, most)

    @property
    def gpu_rows(self) -> NDArray[np.int64]:
        """Rows that each GPU computes, shape (n_gpus,)."""
        found: NDArray[np.int64] = self.expert_rows.reshape(self.n_gpus, -1).sum(axis=1)
        return found

    @property
    def flop(self) -> int:
        """Floating-point operations of all GPUs, 6 x rows x hidden x intermediate."""
        return 6 * int(self.expert_rows.sum()) * self.hidden * self.intermediate


def _exponent(routing: str) -> float:
    try:
        kind, text = str(routing).split(":")
        exponent = float(text)
    except ValueError:
        kind, exponent = "", -1.0
    if kind != "zipf" or not 0.0 <= exponent <= 10.0:
        raise InvalidValue("routing", routing, "balanced, zipf:EXPONENT with an exponent of 0 to "
                           "10, or the rows of each expert", remedy="For example zipf:0.8.")
    return exponent


def _histogram(rows: Sequence[int], experts: int, total: int, most: int) -> NDArray[np.int64]:
    """Check that rows are given for every expert, and that they add up."""
    if len(rows) != experts:
        raise InvalidValue("routing", f"{len(rows)} counts", f"one for each of {experts} experts",
                           remedy="Give the rows of every expert, 0 where none are routed to it.")
    for expert, n in enumerate(rows):
        require_number(f"routing[{expert}]", n, low=0, high=most, unit="rows", integer=True,
                       remedy="An expert sees a token once at most.")
    if sum(rows) != total:
        raise InvalidValue("routing", f"{sum(rows):,} rows in all", f"{total:,}", "rows",
                           "The counts must add up to tokens x n_gpus x top_k.")
    return np.asarray(rows, dtype=np.int64)


def _apportion(weight: NDArray[np.float64], total: int, most: int) -> NDArray[np.int64]:
    """Whole shares of `total` in proportion to `weight`, none above `most`."""
    share = np.zeros(weight.size)
    while (left := total - share.sum()) > 0.5:
        open_ = share < most
        share = np.minimum(share + left * weight * open_ / (weight * open_).sum(), most)
    rows = np.floor(share + 1e-9).astype(np.int64)
    remainder = np.where(rows < most, share - rows, -1.0)
    rows[np.argsort(-remainder, kind="stable")[:total - int(rows.sum())]] += 1
    return rows
