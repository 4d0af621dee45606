"""The law for MoE layers: the program of each GPU becomes rounds, and rounds become times."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xstage_lab import law
from xstage_lab.analysis.calibration import Calibration
from xstage_lab.analysis.tilings import PredictedMap, lanes_used
from xstage_lab.schedule.moe import block_order, row_blocks, tiles_per_block
from xstage_lab.spec import DTYPE_BYTES, MachineSpec, MoELayer, Tuning, smem_bytes
from xstage_lab.spec.moe import ORDERS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FEWEST_TILES = 8         # of an SM, for a period
NEGLIGIBLE_SHARE = 0.05  # waits below this share of the time do not name the regime


class MoETiles(NamedTuple):
    """The tiles of one GPU as pieces; arrays of shape (n_pieces,) beside `pieces`.

    Attributes
    ----------
    t_mma_s, tile_bytes, remote_bytes : of one tile: compute time, output, stored to others
    missed_bytes : weights fetched from memory
    """

    pieces: law.Pieces
    n_sms: int
    n_tiles: int
    t_mma_s: Floats
    tile_bytes: Floats
    remote_bytes: Floats
    missed_bytes: float

    @property
    def n_rounds(self) -> int:
        """Tiles of the busiest SM."""
        return -(-self.n_tiles // self.n_sms)

    def per_sm(self, values: Floats) -> Floats:
        """Sum over the tiles of each round, for one SM."""
        return np.bincount(self.pieces.round, self.pieces.n_tiles * values) / self.n_sms


def moe_tiles(moe: MoELayer, machine: MachineSpec, tuning: Tuning, gpu: int) -> MoETiles:
    """Cut a GPU's program into pieces: tiles of one row block, width and round."""
    k = tuning.n_ctas or machine.n_sms
    expert, _, rows = row_blocks(moe, tuning, gpu)
    layer, block = block_order(moe, tuning, k, gpu)
    n, depth = np.array([2 * moe.intermediate, moe.hidden]), np.array([moe.hidden,
                                                                       moe.intermediate])
    element = DTYPE_BYTES[moe.dtype]
    missing = law.missing_blocks(layer, expert[block], n * depth * element, machine.l2_bytes)
    # A block has full columns, and a narrower last one where the layer's width is ragged.
    count = np.stack([n // tuning.tile_n, (n % tuning.tile_n > 0).astype(np.int64)])[:, layer]
    width = np.stack([np.full(2, tuning.tile_n), n % tuning.tile_n])[:, layer]
    of = np.tile(np.arange(layer.size), (2, 1))
    count, width, of = (a.T[count.T > 0] for a in (count, width, of))
    layer, block, missing = layer[of], block[of], missing[of]

    start = np.concatenate([[0], np.cumsum(count)])
    cuts = np.union1d(start, np.arange(0, start[-1], k))
    strip = np.searchsorted(start, cuts[:-1], "right") - 1
    pieces = law.Pieces(np.diff(cuts), cuts[:-1] % k, cuts[:-1] // k,
                        np.where(layer == 0, block, -1)[strip],
                        np.where(layer == 1, block, -1)[strip])
    area = (rows[block] * width).astype(np.float64)
    compute = 2 * area * depth[layer] / (machine.flop_per_s(moe.dtype) / machine.n_sms)
    compute, missed = _with_misses(machine, pieces, compute[strip], np.where(
        missing, width * depth[layer] * element, 0)[strip])
    size = np.where(layer == 0, 0.5 * element, DTYPE_BYTES[moe.out_dtype]) * area
    n_second = rows.size * tiles_per_block(moe, tuning)[1]
    share = np.where(layer == 1, 1 - n_second // moe.n_gpus / max(n_second, 1), 0.0)
    n_tiles = int(start[-1])
    return MoETiles(pieces, min(k, n_tiles), n_tiles, compute, size[strip], (size * share)[strip],
                    missed)


def _with_misses(machine: MachineSpec, pieces: law.Pieces, compute: Floats,
                 panel_bytes: NDArray[Any]) -> tuple[Floats, float]:
    """Compute times with the waits for weights, and the bytes missed; none where not known."""
    if math.isnan(machine.hbm_bytes_per_s) or math.isnan(machine.l2_bytes):
        return compute, 0.0
    missed = np.bincount(pieces.round, pieces.n_tiles * panel_bytes)
    fetched = law.fetch_time(compute, missed[pieces.round], machine.hbm_bytes_per_s)
    return np.where(panel_bytes > 0, fetched, compute), float(missed.sum())


class _Gpus(NamedTuple):
    """GPUs by what is routed to them: their tiles, how many are alike, their schedules."""

    kinds: list[MoETiles]
    n_like: Ints
    paths: list[law.SchedulePath]


def rounds_of_gpu(moe: MoELayer, machine: MachineSpec, cal: Calibration, tuning: Tuning,
                  gpu: int) -> tuple[MoETiles, law.RoundRun, law.Rounds]:
    """Return the tiles of one GPU, its rounds, and what the law says of them.

    The arrays of rounds have shape (1, 1, n_rounds).
    """
    kind = moe_tiles(moe, machine, tuning, gpu)
    gpus = _with_paths([kind], np.ones(1, np.int64), cal, tuning)
    run = _round_run(moe, machine, gpus, tuning, (cal,))
    return kind, run, law.staged_rounds(run)


def _gpus(moe: MoELayer, machine: MachineSpec, cal: Calibration, tuning: Tuning,
          mma_ratio: float = 1.0) -> _Gpus:
    """Cut every kind of GPU into pieces; compute times are `mma_ratio` of the roofline's."""
    kinds, n_like = _kinds(moe, machine, tuning)
    kinds = [kind._replace(t_mma_s=mma_ratio * kind.t_mma_s) for kind in kinds]
    return _with_paths(kinds, n_like, cal, tuning)


def _with_paths(kinds: list[MoETiles], n_like: Ints, cal: Calibration, tuning: Tuning) -> _Gpus:
    return _Gpus(kinds, n_like, [
        law.critical_path(kind.pieces, kind.n_sms, kind.t_mma_s, _issue_free_s(kind, cal),
                          tuning.issue_depth) for kind in kinds])


def _kinds(moe: MoELayer, machine: MachineSpec,
           tuning: Tuning) -> tuple[list[MoETiles], Ints]:
    """Return the tiles of GPUs that differ in what is routed to them, and how many are alike."""
    held, first, n_like = np.unique(moe.expert_rows.reshape(moe.n_gpus, -1), axis=0,
                                    return_index=True, return_counts=True)
    busy = held.sum(axis=1) > 0
    return [moe_tiles(moe, machine, tuning, int(gpu)) for gpu in first[busy]], n_like[busy]


def _measured_ratio(moe: MoELayer, machine: MachineSpec, tuning: Tuning,
                    t_mma_s: float) -> float:
    """Return measured over modelled time of the program with stores off."""
    kinds, _ = _kinds(moe, machine, tuning)
    alone = max(law.critical_path(kind.pieces, kind.n_sms, kind.t_mma_s, 0 * kind.t_mma_s, 1).end_s
                for kind in kinds)
    return t_mma_s * max(kind.n_rounds for kind in kinds) / alone


def _issue_free_s(kind: MoETiles, cal: Calibration) -> Floats:
    return law.issue_free_time(kind.tile_bytes, cal.per_sm_bytes_per_s, cal.issue_latency_s)


def _round_run(moe: MoELayer, machine: MachineSpec, gpus: _Gpus, tuning: Tuning,
               cals: Sequence[Calibration]) -> law.RoundRun:
    """Rounds of shape (calibration, kind of GPU, round), padded by rounds that do nothing.

    The schedules are those of the first calibration.
    """
    shape = (len(cals), len(gpus.kinds), max(kind.n_rounds for kind in gpus.kinds))
    compute, issue, volume, spread = np.zeros((4, *shape))
    tail, depth = np.zeros(shape[:2]), tuning.issue_depth
    for j, (kind, path) in enumerate(zip(gpus.kinds, gpus.paths, strict=True)):
        n, (free, slot, before) = kind.n_rounds, _ready_s(path, depth)
        compute[:, j, :n] = path.computed_s - np.maximum(free, slot)
        issue[:, j, :n] = path.accepted_s - np.maximum(path.computed_s, before)
        volume[:, j, :n] = kind.n_sms * kind.per_sm(kind.remote_bytes)
        spread[:, j, :n] = path.spread_s
        for i, cal in enumerate(cals[1:], 1):
            issue[i, j, :n] += kind.per_sm(_issue_free_s(kind, cal) - _issue_free_s(kind, cals[0]))
        tail[:, j] = path.end_s - path.accepted_s[-1]
    k = gpus.kinds[0].n_sms
    drain = [[cal.drain_bytes_per_s * lanes_used(machine, moe.n_gpus)] for cal in cals]
    held = [[cal.capacity_at(k)] for cal in cals]
    return law.RoundRun(compute, issue, volume, spread, tail, tuning.issue_depth, drain, held)


def _ready_s(path: law.SchedulePath, depth: int) -> tuple[Floats, Floats, Floats]:
    """When the mean SM's MMA role is free for a round, has a slot, and its store role is free."""
    free = np.concatenate([[0.0], path.computed_s[:-1]])
    accepted = np.concatenate([np.zeros(depth), path.accepted_s])  # D rounds before the first
    return free, accepted[:free.size], accepted[depth - 1:-1]


def _uneven_wait_s(path: law.SchedulePath, depth: int) -> float:
    """Waits for a slot that SMs have and their mean does not: it evens long tiles out."""
    free, slot, _ = _ready_s(path, depth)
    return path.slot_wait_s - float(np.maximum(slot - free, 0.0).sum())


def predicted_moe(moe: MoELayer, machine: MachineSpec, cal: Calibration, tuning: Tuning,
                  t_mma_s: float | None) -> dict[str, Any]:
    """Return the parts of a `Prediction`: the slowest GPU sets the times, means are over all."""
    ratio = 1.0 if t_mma_s is None else _measured_ratio(moe, machine, tuning, t_mma_s)
    gpus = _gpus(moe, machine, cal, tuning, ratio)
    run = _round_run(moe, machine, gpus, tuning, (cal, *cal.ends()))
    rounds = law.staged_rounds(run)
    best, low, high = (_summary(gpus, run, rounds, i) for i in range(3))
    terms = _terms(moe, machine, cal, tuning, gpus, run, rounds)
    other = next(order for order in ORDERS if order != moe.order)
    swapped = dataclasses.replace(moe, order=other)
    terms["other_order_total_s"] = _best(swapped, machine, cal, tuning, ratio)["total_s"]
    regime, margin = _regime(terms, best["accepted_s"], tuning.issue_depth == 1)
    copy = terms["remote_bytes"] / terms["drain_bytes_per_s"]
    compute = terms["path_s"]
    unfused = {"compute_s": compute, "copy_s": copy,
               "total_s": float(law.unfused_time(compute, copy, 1.0))}
    return {"summary": best, "low": low, "high": high, "regime": regime, "margin_ratio": margin,
            "terms": terms, "unfused": unfused,
            "fuse_gain_ratio": unfused["total_s"] / best["total_s"] - 1.0,
            "t_mma_source": "roofline" if t_mma_s is None else "measured"}


def _best(moe: MoELayer, machine: MachineSpec, cal: Calibration, tuning: Tuning,
          mma_ratio: float = 1.0) -> dict[str, float]:
    """Return the summary from one calibration, without a band."""
    gpus = _gpus(moe, machine, cal, tuning, mma_ratio)
    run = _round_run(moe, machine, gpus, tuning, (cal,))
    return _summary(gpus, run, law.staged_rounds(run), 0)


def _summary(gpus: _Gpus, run: law.RoundRun, rounds: law.Rounds, i: int) -> dict[str, float]:
    """Return the keys of a record's summary for calibration number `i`."""
    accepted = float(rounds.accepted_s[i].max())
    weight = gpus.n_like / gpus.n_like.sum()
    spans, periods = [], []
    for j, kind in enumerate(gpus.kinds):
        n = kind.n_rounds
        start, end = rounds.start_s[i, j, :n], rounds.end_s[i, j, :n]
        spans.append(float((end - start).sum()) * kind.n_sms / kind.n_tiles)
        periods.append((start[-1] - start[n // 2]) / max(n - 1 - n // 2, 1))
    enough = min(kind.n_tiles // kind.n_sms for kind in gpus.kinds) >= FEWEST_TILES
    depth = int(np.asarray(run.issue_depth))
    waits = weight @ (rounds.slot_wait_s[i] + [_uneven_wait_s(p, depth) for p in gpus.paths])
    return {"total_s": float(rounds.total_s[i].max()), "accepted_s": accepted,
            "period_s": float(weight @ periods) if enough else math.nan,
            "issue_s": float(weight @ spans), "stall_ratio": float(waits) / accepted}


def _terms(moe: MoELayer, machine: MachineSpec, cal: Calibration, tuning: Tuning, gpus: _Gpus,
           run: law.RoundRun, rounds: law.Rounds) -> dict[str, float]:
    """Return the quantities that enter, of the slowest GPU."""
    slowest = int(np.argmax(rounds.accepted_s[0]))
    kind, k = gpus.kinds[slowest], gpus.kinds[0].n_sms
    volume = np.asarray(run.store_bytes)[0, slowest]
    path = gpus.paths[slowest].end_s
    drain = cal.drain_bytes_per_s * lanes_used(machine, moe.n_gpus)
    held, remote = cal.capacity_at(k), float(volume.sum())
    storing = np.flatnonzero(volume > 0)
    first = rounds.start_s[0, slowest, storing[0]] if storing.size else 0.0
    second = kind.pieces.waits_for >= 0
    n_second = float(kind.pieces.n_tiles[second].sum())
    tile = float((kind.pieces.n_tiles * kind.tile_bytes)[second].sum()) / n_second
    per_round = remote / n_second * k
    t_mma = [float(np.average(kind.t_mma_s[layer], weights=kind.pieces.n_tiles[layer]))
             for layer in (~second, second)]
    serial = tuning.issue_depth == 1
    each = _issue_free_s(kind, cal)
    even = float(kind.per_sm(kind.t_mma_s + each if serial else
                             np.maximum(kind.t_mma_s, each)).sum())
    uneven = path / even
    computing, issuing = (float(kind.per_sm(a).sum()) for a in (kind.t_mma_s, each))
    bounds = (path, issuing) if serial else (uneven * computing, uneven * issuing)
    return {
        "t_mma_s": float(kind.per_sm(kind.t_mma_s).sum()) / kind.n_rounds, "t_mma_1_s": t_mma[0],
        "t_mma_2_s": t_mma[1], "issue_free_s": cal.issue_free_s(
            float((kind.pieces.n_tiles * kind.tile_bytes).sum()) / kind.n_tiles),
        "drain_s": per_round / drain, "tile_bytes": tile, "n_tiles": float(kind.n_tiles),
        "n_rounds": float(kind.n_rounds), "remote_bytes": remote, "capacity_bytes": held,
        "drain_bytes_per_s": drain, "missed_bytes": kind.missed_bytes,
        "path_s": path, "imbalance_ratio": uneven - 1.0,
        "skew_ratio": float(moe.gpu_rows.max() / moe.gpu_rows.mean()) - 1.0,
        "room_wait_s": float(rounds.room_wait_s[0, slowest]),
        "compute_bound_s": bounds[0], "issue_bound_s": bounds[1],
        "drain_bound_s": first + (remote - held) / drain if remote else 0.0,
    }


def _regime(terms: dict[str, float], accepted_s: float, serial: bool) -> tuple[str, float]:
    """Name what sets the time: the chain of SMs, the path's rate, or bursts it cannot hold."""
    compute, issue, drain = (terms[f"{name}_bound_s"] for name in ("compute", "issue", "drain"))
    chain = terms["path_s"]
    if drain > max(chain, (1 - NEGLIGIBLE_SHARE) * accepted_s):
        return "drain-bound", drain / chain - 1.0
    if accepted_s - chain > NEGLIGIBLE_SHARE * accepted_s:
        return "capacity-bound", accepted_s / max(chain, drain) - 1.0
    name = "issue-bound" if issue > (compute - issue if serial else compute) else "compute-bound"
    return name, chain / drain - 1.0 if drain > 0 else math.inf


def predict_moe_map(moe: MoELayer, machine: MachineSpec, calibration: Calibration,
                    tile_m: ArrayLike, tile_n: ArrayLike, issue_depth: ArrayLike,
                    order: ArrayLike, tuning: Tuning | None = None) -> PredictedMap:
    """Predict MoE layers over a grid of tilings, depths and orders.

    Parameters
    ----------
    tile_m, tile_n, issue_depth, order : arrays that broadcast
    tuning : Tuning, optional
        Gives what the grid does not vary: tile_k, n_stages, n_ctas.
    """
    tuning = tuning or Tuning()
    grid = np.broadcast_arrays(tile_m, tile_n, issue_depth, order)
    needed = smem_bytes(moe, grid[0], grid[1], np.asarray(tuning.tile_k), grid[2],
                        np.asarray(tuning.n_stages))
    feasible = ~(needed > machine.smem_per_cta_bytes)
    total, accepted, stall = np.full((3, *feasible.shape), np.nan)
    for at in zip(*np.nonzero(feasible), strict=True):
        rows, cols, depth, kind = (a[at].item() for a in grid)
        used = dataclasses.replace(tuning, tile_m=rows, tile_n=cols, issue_depth=depth)
        found = _best(dataclasses.replace(moe, order=kind), machine, calibration, used)
        total[at], accepted[at] = found["total_s"], found["accepted_s"]
        stall[at] = found["stall_ratio"]
    return PredictedMap(total, accepted, stall, needed.astype(float), feasible)
