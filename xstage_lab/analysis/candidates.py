"""The combinations of a space that a machine can run, and what the law says of each."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xstage_lab import law
from xstage_lab.analysis.calibration import Calibration
from xstage_lab.analysis.prediction import predict
from xstage_lab.analysis.space import TILING, Space
from xstage_lab.analysis.tilings import staged_gemm, t_mma_roofline, unfused_gemm
from xstage_lab.errors import Infeasible, InvalidValue, require_number
from xstage_lab.spec import (
    FusedGemm,
    MachineSpec,
    MoELayer,
    Tuning,
    UlyssesAttention,
    Workload,
    check_feasible,
    smem_bytes,
)
from xstage_lab.units import text

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Tunable = FusedGemm | MoELayer | UlyssesAttention
Group = tuple[Tunable, int | None, str]

_SHARED = ("n_ctas", "n_gpus", "order")
_WEIGHTS = 1.0, 1.0, 0.5, 0.5, 0.5  # how much an octave of each of them tells candidates apart
MAX_CANDIDATES = 200_000


class Choice(NamedTuple):
    """One candidate: the workload as it would run, its tuning, and its store path's name."""

    workload: Tunable
    tuning: Tuning
    store_path: str

    def label(self) -> str:
        """Return it in a few words."""
        t, parts = self.tuning, [f"on {self.workload.n_gpus} GPUs"]
        if isinstance(self.workload, MoELayer):
            parts.append(self.workload.order)
        if t.n_ctas is not None:
            parts.append(f"{t.n_ctas} CTAs")
        if self.store_path:
            parts.append(self.store_path)
        return f"tile {t.tile_m}×{t.tile_n}×{t.tile_k}, depth {t.issue_depth}, {', '.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Every configuration of a space that a machine can run; arrays of shape (n,).

    Attributes
    ----------
    groups : tuple of (Workload, n_ctas or None, store path)
        What candidates share.
    group : int array, index into `groups`
    columns : int array of shape (n, 5): tile_m, tile_n, tile_k, issue_depth, n_stages
    smem_bytes : int array
    total_s : float array
        Time the law says, of all the work that was asked for: where candidates have more GPUs
        that do as much each, they do more work in the same time.
    work_ratio : float array
        That work over the work a candidate's own run does.
    unfused_s : float array
        The same of compute-then-copy.
    regime : array of str
    excluded : dict of str to int
        Limits in words, and how many configurations each excludes.
    """

    groups: tuple[Group, ...]
    group: Counts
    columns: Counts
    smem_bytes: Counts
    total_s: Floats
    work_ratio: Floats
    unfused_s: Floats
    regime: NDArray[np.str_]
    excluded: dict[str, int]

    def __len__(self) -> int:
        return int(self.group.size)

    def choice(self, i: int) -> Choice:
        """Return the i-th candidate."""
        workload, n_ctas, path = self.groups[self.group[i]]
        values = dict(zip(TILING, self.columns[i].tolist(), strict=True))
        return Choice(workload, Tuning(n_ctas=n_ctas, **values), path)

    def preference(self) -> Counts:
        """Rank of each candidate among equals: the largest and squarest tile, the least depth.

        A tie in time is no reason for a small tile, whose operand traffic is not modelled.
        """
        m, n, _, depth, _ = self.columns.T
        return np.argsort(np.lexsort((self.smem_bytes, depth, m + n, -m * n)))

    def features(self) -> Floats:
        """Coordinates in which near candidates behave alike: octaves; two where names differ."""
        names = sorted({_named(group) for group in self.groups})
        shared = np.array([(math.log2(n_ctas or 1), math.log2(workload.n_gpus),
                            *(2.0 * (_named((workload, n_ctas, path)) == name) for name in names))
                           for workload, n_ctas, path in self.groups])
        return np.column_stack([np.log2(self.columns) * _WEIGHTS, shared[self.group]])


def _named(group: Group) -> str:
    return f"{getattr(group[0], 'order', '')} {group[2]}"


def candidates(
    workload: Workload,
    machine: MachineSpec,
    calibrations: Mapping[str, Calibration],
    space: Space,
    *,
    smem_limit_bytes: float = math.inf,
    max_sms: int | None = None,
) -> Candidates:
    """Return every candidate that fits, each with what the law says of it.

    Parameters
    ----------
    calibrations : mapping of str to Calibration
        By name of the store path.
    smem_limit_bytes : float
        Shared memory of a CTA that is allowed, besides what the machine allows (bytes).
    max_sms : int, optional
        SMs (CTAs) that are allowed.

    Raises
    ------
    Infeasible
        If nothing fits, saying which limit excludes how many and the way out.
    """
    if not isinstance(workload, Tunable):
        raise Infeasible("a burst train has no tiles to tune; tune a fused kernel.")
    if smem_limit_bytes != math.inf:
        require_number("smem_limit_bytes", smem_limit_bytes, low=0, open_low=True, unit="B")
    if max_sms is not None:
        require_number("max_sms", max_sms, low=1, high=100_000, integer=True, unit="SMs")
    grid = _grid(space)
    limit = float(np.fmin(machine.smem_per_cta_bytes, smem_limit_bytes))  # unknown excludes none
    excluded: Counter[str] = Counter()
    parts: list[_Part] = []
    least = math.inf
    for changes, n_ctas in _groups(space, workload, machine, max_sms):
        n_each = len(grid) * len(calibrations)
        try:
            own = _changed(workload, changes)
            _check_group(own, machine, n_ctas, max_sms)
        except (Infeasible, InvalidValue) as error:
            excluded[str(error)] += n_each
            continue
        needed = smem_bytes(own, *grid.T)
        fits = ~(needed > limit)
        least = min(least, float(needed.min()))
        if not fits.all():
            excluded[f"more than {text('_bytes', limit)} of shared memory per CTA"] += (
                int(np.sum(~fits)) * len(calibrations))
        if fits.any():
            parts += [_Part((own, n_ctas, path), grid[fits], needed[fits],
                            *_outlook(own, machine, calibration, n_ctas, grid[fits]))
                      for path, calibration in sorted(calibrations.items())]
    if not parts:
        raise Infeasible(_nothing_fits(machine, excluded, least))
    return _together(workload, parts, dict(excluded))


class _Part(NamedTuple):
    """Candidates of one group."""

    group: Group
    columns: Counts
    smem_bytes: Counts
    total_s: Floats
    unfused_s: Floats
    regime: NDArray[np.str_]


def _grid(space: Space) -> Counts:
    values = [getattr(space, name) for name in TILING]
    n = math.prod(map(len, (*values, *(getattr(space, name) or (0,) for name in _SHARED))))
    if n > MAX_CANDIDATES:
        raise InvalidValue("space", f"{n:,} combinations", f"up to {MAX_CANDIDATES:,}",
                           remedy="Give fewer values of a knob.")
    return np.array(list(itertools.product(*values)), np.int64)


def _groups(space: Space, workload: Tunable, machine: MachineSpec,
            max_sms: int | None) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Yield what the candidates of one array share: changes of the workload, and CTAs."""
    every = max_sms if max_sms is not None and max_sms < machine.n_sms else None
    for n_gpus, order, n_ctas in itertools.product(
            space.n_gpus or (workload.n_gpus,), space.order or (None,), space.n_ctas or (every,)):
        yield {"n_gpus": n_gpus} | ({} if order is None else {"order": order}), n_ctas


def _changed(workload: Tunable, changes: dict[str, Any]) -> Tunable:
    if "order" in changes and not isinstance(workload, MoELayer):
        raise Infeasible(f"{type(workload).__name__} has no order to choose")
    return dataclasses.replace(workload, **changes)


def _check_group(workload: Tunable, machine: MachineSpec, n_ctas: int | None,
                 max_sms: int | None) -> None:
    """Raise where no tiling of a group can run, whatever its shared memory."""
    if max_sms is not None and n_ctas is not None and n_ctas > max_sms:
        raise Infeasible(f"more CTAs than the {max_sms} SMs that are allowed")
    check_feasible(workload, machine, Tuning(tile_m=1, tile_n=1, tile_k=1, issue_depth=1,
                                             n_stages=1, n_ctas=n_ctas))


def _outlook(workload: Tunable, machine: MachineSpec, calibration: Calibration,
             n_ctas: int | None, columns: Counts) -> tuple[Floats, Floats, NDArray[np.str_]]:
    """Predicted total, total of compute-then-copy, and regime, each of shape (n,)."""
    if isinstance(workload, FusedGemm):
        tile_m, tile_n, _, depth, _ = columns.T
        k = n_ctas or machine.n_sms
        t_mma = t_mma_roofline(workload, machine, tile_m, tile_n, k)
        staged, run = staged_gemm(workload, machine, calibration, k, tile_m, tile_n, depth,
                                  t_mma, calibration.capacity_at(k))
        which, _ = law.regime(run, staged.bounds_s)
        compute, copy = unfused_gemm(workload, machine, calibration, run)
        return staged.total_s, compute + copy, np.array(law.REGIMES)[which]
    # The law knows nothing of tile_k and n_stages, and for attention of the keys of a stage.
    seen = columns * np.array([1, not isinstance(workload, UlyssesAttention), 0, 1, 0])
    _, first, inverse = np.unique(seen, axis=0, return_index=True, return_inverse=True)
    found = [predict(workload, machine, calibration, Tuning(
        n_ctas=n_ctas, **dict(zip(TILING, columns[i].tolist(), strict=True)))) for i in first]
    total, unfused = (np.array([part["total_s"] for part in each])
                      for each in ([p.summary for p in found], [p.unfused for p in found]))
    regime = np.array([p.regime for p in found])
    return total[inverse], unfused[inverse], regime[inverse]


def _together(workload: Tunable, parts: list[_Part], excluded: dict[str, int]) -> Candidates:
    groups, *arrays = zip(*parts, strict=True)
    columns, needed, total, unfused, regime = (np.concatenate(each) for each in arrays)
    sizes = [len(part.columns) for part in parts]
    work = np.repeat([_work(workload) / _work(own) for own, *_ in groups], sizes)
    return Candidates(groups=groups, group=np.repeat(np.arange(len(groups)), sizes),
                      columns=columns, smem_bytes=needed, total_s=total * work,
                      work_ratio=work, unfused_s=unfused * work, regime=regime,
                      excluded=excluded)


def _work(workload: Tunable) -> int:
    """Floating-point operations of all GPUs."""
    return workload.flop * (1 if isinstance(workload, MoELayer) else workload.n_gpus)


def _nothing_fits(machine: MachineSpec, excluded: Mapping[str, int], least_bytes: float) -> str:
    reasons = "; ".join(f"{n:,} by {reason.rstrip('.')}" for reason, n in excluded.items())
    way_out = ("" if math.isinf(least_bytes) else
               f" The smallest needs {text('_bytes', least_bytes)}: take smaller tiles, fewer "
               "operand stages or a smaller depth, or allow more shared memory.")
    return (f"none of the {sum(excluded.values()):,} configurations of the space can run on "
            f"{machine.name}. Excluded: {reasons}.{way_out}")
