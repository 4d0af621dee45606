"""The law over tilings of a fused GEMM: destinations become drain rates, and grids arrays."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xstage_lab import law
from xstage_lab.analysis.calibration import Calibration
from xstage_lab.spec import DTYPE_BYTES, FusedGemm, MachineSpec, Tuning, smem_bytes

Floats = NDArray[np.float64]


def t_mma_roofline(workload: FusedGemm, machine: MachineSpec, tile_m: ArrayLike,
                   tile_n: ArrayLike, n_ctas: ArrayLike | None = None) -> Floats:
    """Compute time of a tile (s), as `measure_t_mma` defines it: the busiest SM's mean.

    A tile takes its share of the machine's FLOP rate, or what its wave waits for weights where
    all of them together do not fit into L2 and stream from memory again for every row of tiles.
    """
    k = machine.n_sms if n_ctas is None else n_ctas
    rows, cols, k = np.broadcast_arrays(*law.floats(tile_m, tile_n, k))
    n_cols = np.ceil(workload.n / cols)
    full = (2.0 * np.minimum(rows, workload.m) * np.minimum(cols, workload.n) * workload.k
            / (machine.flop_per_s(workload.dtype) / machine.n_sms))
    seconds: Floats = full * _busiest_share(workload, rows, cols, k)
    weights = float(workload.n * workload.k * DTYPE_BYTES[workload.dtype])
    if weights > machine.l2_bytes:  # not where either is unknown
        streamed = weights * np.minimum(k, n_cols) / n_cols / machine.hbm_bytes_per_s
        seconds = np.fmax(seconds, streamed)
    return seconds


def _busiest_share(gemm: FusedGemm, rows: Floats, cols: Floats, k: Floats) -> Floats:
    """Tiles of the SM with most to compute, edge tiles as what they are, over its waves.

    Tile i runs on SM i mod K. Tiles of the last column come round to every SM only where K and
    the number of columns are coprime; those of the last row are the last to run.
    """
    n_rows, n_cols = np.ceil(gemm.m / rows), np.ceil(gemm.n / cols)
    waves = np.ceil(n_rows * n_cols / k)
    in_last = n_rows * n_cols - (waves - 1) * k  # tiles of the last wave
    common = np.gcd(k.astype(np.int64), n_cols.astype(np.int64)) == 1
    saved_col = np.where(n_cols > 1, (n_cols * cols - gemm.n) / cols, 0.0)
    saved_row = np.where(n_rows > 1, (n_rows * rows - gemm.m) / rows, 0.0)
    if gemm.destinations == "row-owner":  # each GPU starts elsewhere, for most it is not the end
        saved_row = 0.0 * saved_row
    late = np.where(in_last <= n_cols, np.floor((n_cols - in_last) / k) + 1, 0.0)
    edges, edges_before = (np.where(common, np.floor(w / n_cols), 0.0)
                           for w in (waves, waves - 1))
    corner = np.where((edges > 0) & (late > 0), saved_col * saved_row, 0.0)  # counted in both
    busiest = waves - edges * saved_col - late * saved_row + corner
    shorter = waves - 1 - edges_before * saved_col
    share: Floats = np.maximum(busiest, np.where(in_last < k, shorter, 0.0)) / waves
    return share


def lanes_used(machine: MachineSpec, n_gpus: int) -> float:
    """Share of a GPU's store rate that balanced stores to n_gpus - 1 peers can use."""
    if machine.link.topology != "full mesh" or machine.max_gpus <= 1:
        return 1.0
    return max(n_gpus - 1, 1) / (machine.max_gpus - 1)


class _Load(NamedTuple):
    """One kind of GPU: what it stores, and how fast that can drain."""

    storing_ratio: ArrayLike  # share of its tiles, from the first on, that form the storing run
    remote_ratio: ArrayLike   # share of its output bytes that is remote
    drain_bytes_per_s: float | Floats


def _loads(gemm: FusedGemm, machine: MachineSpec, drain: float, n_rows: Floats) -> list[_Load]:
    """Return the kinds of GPU whose slowest sets the time; one unless there is a hot GPU.

    `n_rows` is the number of tile rows: owners of rows get whole ones, the least of them
    floor(n_rows / P), and who owns least stores most.
    """
    peers = gemm.n_gpus - 1
    if peers == 0:
        return [_Load(1.0, 0.0, drain)]
    spread = drain * lanes_used(machine, gemm.n_gpus)
    mesh = machine.link.topology == "full mesh"
    lane: float | Floats = drain / max(machine.max_gpus - 1, 1) if mesh else drain
    remote = peers / gemm.n_gpus
    if gemm.destinations == "round-robin":
        return [_Load(1.0, remote, spread)]
    if gemm.destinations.startswith("row-owner"):
        stored = 1 - np.floor(n_rows / gemm.n_gpus) / n_rows
        received = peers * np.ceil(n_rows / gemm.n_gpus) / n_rows  # by who owns most
        if gemm.destinations == "row-owner":
            lane = lane * np.minimum(1.0, stored / received)
        return [_Load(stored, stored, lane)]
    hot = gemm.hot_share_ratio
    others = hot + (1 - hot) * (peers - 1) / peers
    into_hot = others * lane / hot / (1 if mesh else peers) if hot > 0 else math.inf
    return [_Load(1.0, others, min(spread, into_hot)), _Load(1.0, 1 - hot, spread)]


def staged_gemm(gemm: FusedGemm, machine: MachineSpec, cal: Calibration, n_ctas: ArrayLike,
                 tile_m: ArrayLike, tile_n: ArrayLike, depth: ArrayLike, t_mma: ArrayLike,
                 capacity: float) -> tuple[law.Staged, law.TileRun]:
    """Apply the law to arrays of tilings."""
    rows, cols = law.floats(tile_m, tile_n)
    n_tiles = np.ceil(gemm.m / rows) * np.ceil(gemm.n / cols)
    size = gemm.store_bytes / n_tiles  # the mean, edge tiles are smaller
    kinds = []
    for load in _loads(gemm, machine, cal.drain_bytes_per_s, np.ceil(gemm.m / rows)):
        run = law.TileRun(
            n_tiles, np.round(n_tiles * law.floats(load.storing_ratio)[0]), n_ctas, t_mma, size,
            gemm.store_bytes * law.floats(load.remote_ratio)[0], depth, cal.per_sm_bytes_per_s,
            cal.issue_latency_s, load.drain_bytes_per_s, capacity)
        kinds.append((law.staged_tiles(run), run))
    staged, run = kinds[0]
    for other, _ in kinds[1:]:  # the slowest kind of GPU sets every time
        slower = other.accepted_s > staged.accepted_s
        total = np.maximum(other.total_s, staged.total_s)
        staged = law.Staged(*(np.where(slower, a, b)
                              for a, b in zip(other, staged, strict=True)))
        staged = staged._replace(total_s=total)
    if gemm.destinations == "round-robin":
        staged = _with_local_sms(gemm, run, staged)
    mesh = machine.link.topology == "full mesh"  # every pair has its own lane: no incast
    if gemm.destinations == "row-owner-unrotated" and gemm.n_gpus > 1 and not mesh:
        staged = _with_incast(gemm, run, staged)
    return staged, run


def _with_local_sms(gemm: FusedGemm, run: law.TileRun, staged: law.Staged) -> law.Staged:
    """Take into means over SMs that some of them have all the local tiles.

    Tile i runs on SM i mod K and belongs to GPU i mod P. Unless K and P are coprime, only some
    SMs meet their own GPU's tiles; they run ahead, while the others set the time.
    """
    some = np.gcd(np.asarray(run.n_sms, dtype=np.int64), gemm.n_gpus) > 1
    share = np.where(some, 1.0 / gemm.n_gpus, 0.0)
    issue = law.issue_free_time(run.tile_bytes, run.per_sm_bytes_per_s, run.issue_latency_s)
    mma, depth = law.floats(run.t_mma_s, run.issue_depth)
    chain = np.where(depth == 1, mma + issue, np.maximum(mma, issue))
    return staged._replace(
        period_s=staged.period_s - share * np.maximum(staged.period_s - chain, 0.0),
        issue_s=staged.issue_s - share * np.maximum(staged.issue_s - issue, 0.0),
        stall_ratio=staged.stall_ratio * (1 - share))


def _with_incast(gemm: FusedGemm, run: law.TileRun, staged: law.Staged) -> law.Staged:
    """Slow a run down by the moving incast of owners that all GPUs address at a time.

    At a phase's end a wave addresses two owners and a quarter of the incast falls away. Runs of
    a wave and less address all owners at once and see none; from half a wave per owner on they
    see it all, and between the two it grows with the length.
    """
    gpus, share = gemm.n_gpus, gemm.store_bytes / gemm.n_gpus
    k, n_tiles, mma, depth, drain, held = law.floats(
        run.n_sms, run.n_tiles, run.t_mma_s, run.issue_depth, run.drain_bytes_per_s,
        run.capacity_bytes)
    waves = np.maximum(n_tiles / k, 1.0)
    issue = law.issue_free_time(run.tile_bytes, run.per_sm_bytes_per_s, run.issue_latency_s)
    step = np.where(depth == 1, mma + issue, np.maximum(mma, issue))
    mixing = 1 - 0.25 / np.maximum(waves / gpus, 1.0)
    shape = np.broadcast_shapes(waves.shape, step.shape, staged.accepted_s.shape)
    waves, step, mixing, issue = (np.broadcast_to(a, shape) for a in (waves, step, mixing, issue))
    accepted, drained = law.incast(
        gpus, np.ravel((waves - 1) * step + issue) / gpus,
        np.ravel(share / drain * mixing), held / share)
    accepted, drained = accepted.reshape(gpus, *shape), drained.reshape(shape)
    weight = np.minimum(1.0, 2 * waves / gpus)
    def slowed(fluid: Floats, balanced: Floats) -> Floats:
        return np.maximum(balanced, weight * (fluid + mma) + (1 - weight) * balanced)

    each = slowed(accepted, staged.accepted_s)
    slow = each.max(axis=0)
    total = np.maximum(slowed(drained, staged.total_s), slow)
    blocked = each.mean(axis=0) - staged.accepted_s
    bounds = staged.bounds_s.copy()
    bounds[2] = np.maximum(bounds[2], slow)
    return staged._replace(
        accepted_s=slow, total_s=total, bounds_s=bounds,
        period_s=np.full(shape, np.nan),  # a moving incast has no steady period
        issue_s=staged.issue_s + blocked / np.ceil(waves),
        stall_ratio=(staged.stall_ratio * staged.accepted_s + blocked) / slow)


def unfused_gemm(gemm: FusedGemm, machine: MachineSpec, cal: Calibration,
                 run: law.TileRun) -> tuple[Floats, Floats]:
    """Compute-then-copy: time of the kernel that stores to its own memory, and of the copy (s).

    The copy goes to all owners at a time. Where one of them is hot, its ingress sets the rate.
    """
    n_tiles, k, t_mma, size, remote, depth = law.floats(
        run.n_tiles, run.n_sms, run.t_mma_s, run.tile_bytes, run.remote_bytes, run.issue_depth)
    issue = law.issue_free_time(size, cal.per_sm_bytes_per_s, cal.issue_latency_s)
    waves = np.ceil(n_tiles / k)
    compute = np.where(depth == 1, waves * (t_mma + issue),
                       np.maximum(waves * t_mma + issue, t_mma + waves * issue))
    copy = remote / (cal.drain_bytes_per_s * lanes_used(machine, gemm.n_gpus))
    if gemm.hot_share_ratio > 0:  # NaN where none is hot
        for load in _loads(gemm, machine, cal.drain_bytes_per_s, np.ones(1)):
            copy = np.maximum(copy, gemm.store_bytes * law.floats(load.remote_ratio)[0]
                              / load.drain_bytes_per_s)
    return compute, copy


class PredictedMap(NamedTuple):
    """Predictions over a grid of tilings, shape of the broadcast arguments.

    Attributes
    ----------
    total_s, accepted_s, stall_ratio : float arrays, NaN where infeasible
    needed_bytes : shared memory each configuration needs
    feasible : bool array
    """

    total_s: Floats
    accepted_s: Floats
    stall_ratio: Floats
    needed_bytes: Floats
    feasible: NDArray[np.bool_]


def predict_map(
    workload: FusedGemm,
    machine: MachineSpec,
    calibration: Calibration,
    tile_m: ArrayLike,
    tile_n: ArrayLike,
    issue_depth: ArrayLike,
    tuning: Tuning | None = None,
    t_mma_s: ArrayLike | None = None,
) -> PredictedMap:
    """Predict a whole grid of tilings at once.

    Parameters
    ----------
    tile_m, tile_n, issue_depth : arrays that broadcast
    tuning : Tuning, optional
        Gives what the grid does not vary: tile_k, n_stages, n_ctas.
    t_mma_s : array, optional
        Measured compute times; the roofline if left out.
    """
    tuning = tuning or Tuning()
    tile_m, tile_n, depth = np.broadcast_arrays(tile_m, tile_n, issue_depth)
    t_mma = (t_mma_roofline(workload, machine, tile_m, tile_n, tuning.n_ctas)
             if t_mma_s is None else t_mma_s)
    staged, _ = staged_gemm(workload, machine, calibration, tuning.n_ctas or machine.n_sms,
                             tile_m, tile_n, depth, t_mma,
                            calibration.capacity_at(tuning.n_ctas or machine.n_sms))
    needed = smem_bytes(workload, tile_m, tile_n, np.asarray(tuning.tile_k), depth,
                        np.asarray(tuning.n_stages))
    feasible = ~(needed > machine.smem_per_cta_bytes)
    total, accepted, stall = (np.where(feasible, a.reshape(tile_m.shape), np.nan)
                              for a in (staged.total_s, staged.accepted_s, staged.stall_ratio))
    return PredictedMap(total, accepted, stall, needed.astype(float), feasible)
