"""What the SMs of a GPU do over time in an MoE layer: measured of a record, predicted by the law.

Both are cut into the same steps of time, so that two orders can be read one above the other.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xstage_lab.analysis.calibration import Calibration
from xstage_lab.analysis.moe import rounds_of_gpu
from xstage_lab.errors import XStageError
from xstage_lab.record import Record, slot_wait_start
from xstage_lab.schedule import LINEAR_2
from xstage_lab.schedule import moe as schedule
from xstage_lab.spec import MachineSpec, MoELayer, Tuning

Floats = NDArray[np.float64]

N_STEPS = 240


class Shares(NamedTuple):
    """Shares of the SMs of one GPU, means over steps of time; arrays of shape (n_steps,).

    Attributes
    ----------
    time_s : middle of each step
    first_ratio, second_ratio : SMs whose MMA role computes a tile of Linear-1, of Linear-2
    wait_ratio : SMs whose MMA role waits for a slot
    issue_ratio : SMs whose store role issues, beside whatever the MMA role does
    backlog_s, backlog_bytes : when (shape (n,)), and bytes accepted but not yet on the link
    """

    time_s: Floats
    first_ratio: Floats
    second_ratio: Floats
    wait_ratio: Floats
    issue_ratio: Floats
    backlog_s: Floats
    backlog_bytes: Floats


def measured_shares(record: Record, end_s: float, gpu: int = 0) -> Shares:
    """Return the shares of a record of an MoE layer; its backlog is that of GPU 0.

    Raises
    ------
    XStageError
        If the record has no per-tile times.
    """
    if record.tiles is None:
        raise XStageError("the record has no per-tile times.")
    tiles = record.tiles[record.tiles["gpu"] == gpu]
    second, k = second_layer(record, gpu)[tiles["row"]], int(record.parameters["n_ctas"])
    waited = slot_wait_start(tiles)
    spans = ((tiles["mma_start_s"], tiles["mma_end_s"], ~second),
             (tiles["mma_start_s"], tiles["mma_end_s"], second),
             (waited, waited + tiles["slot_wait_s"], tiles["slot_wait_s"] > 0),
             (tiles["issue_start_s"], tiles["issue_end_s"], tiles["store_bytes"] > 0))
    edges = np.linspace(0.0, end_s, N_STEPS + 1)
    first, later, wait, issue = (_share(start[which], end[which], 1.0 / k, edges)
                                 for start, end, which in spans)
    when, held = (np.empty(0), np.empty(0)) if record.backlog is None else record.backlog
    return Shares(_middle(edges), first, later, wait, issue, when, held)


def second_layer(record: Record, gpu: int) -> NDArray[np.bool_]:
    """Return which rows of a GPU's program are tiles of Linear-2, from a record's parameters."""
    given = record.parameters
    layer, cut = ({field.name: given[field.name] for field in dataclasses.fields(kind)
                   if field.name in given} for kind in (MoELayer, Tuning))
    tasks = schedule.tasks_of(MoELayer(**layer), Tuning(**cut), int(given["n_ctas"]), gpu)
    found: NDArray[np.bool_] = tasks["kind"] == LINEAR_2
    return found


def predicted_shares(moe: MoELayer, machine: MachineSpec, cal: Calibration, tuning: Tuning,
                     end_s: float, gpu: int = 0) -> Shares:
    """Return the shares that the law predicts: those of the mean SM, round by round.

    Where SMs are busy unequally or wait for each other's tiles, the mean SM computes for a part
    of the round only. What happens within a round is not known, since SMs are not in step: shares
    are means over rounds.
    """
    edges = np.linspace(0.0, end_s, N_STEPS + 1)
    if not moe.gpu_rows[gpu]:
        idle = np.zeros(N_STEPS)
        return Shares(_middle(edges), idle, idle, idle, idle, edges, np.zeros(edges.size))
    kind, run, found = rounds_of_gpu(moe, machine, cal, tuning, gpu)
    compute, _, volume = (np.asarray(a)[0, 0] for a in run[:3])
    begin, end = found.start_s[0, 0], found.end_s[0, 0]
    start, done = _mma_spans(compute, end, tuning.issue_depth)
    worked = kind.pieces.n_tiles * kind.t_mma_s
    second = kind.pieces.waits_for >= 0
    first_ratio, second_ratio = (
        np.bincount(kind.pieces.round, worked * layer, compute.size) / (kind.n_sms * compute)
        for layer in (~second, second))
    free = np.concatenate([[0.0], done[:-1]])
    path = (float(np.asarray(run.drain_bytes_per_s).item()), cal.capacity_at(kind.n_sms))
    rounds = np.concatenate([[0.0], start[1:], done[-1:]])
    issues = np.concatenate([[0.0], begin, end[-1:]])
    held = _backlog(issues[1:-1], issues[2:], volume, path, edges)
    return Shares(_middle(edges), _share(start, done, first_ratio, edges, rounds),
                  _share(start, done, second_ratio, edges, rounds),
                  _share(free, start, 1.0, edges, rounds),
                  _share(begin, end, 1.0, edges, issues), edges, held)


def _mma_spans(compute_s: Floats, accepted_s: Floats, depth: int) -> tuple[Floats, Floats]:
    """When the mean SM starts and ends each round's MMA: after the last one, and with a slot."""
    start, done = np.zeros((2, compute_s.size))
    free = 0.0
    for j in range(compute_s.size):
        start[j] = max(free, accepted_s[j - depth] if j >= depth else 0.0)
        free = done[j] = start[j] + compute_s[j]
    return start, done


def _share(start_s: Floats, end_s: Floats, weight: ArrayLike, edges: Floats,
           known_s: Floats | None = None) -> Floats:
    """Mean over each step of the weights of all spans that are open.

    Where `known_s` is given, only the sums up to these times are, and shares are even between.
    """
    at = edges if known_s is None else known_s
    weight = np.broadcast_to(np.asarray(weight, np.float64), start_s.shape)
    spent = _open_until(start_s, weight, at) - _open_until(end_s, weight, at)
    share = np.diff(np.interp(edges, at, spent)) / np.diff(edges)
    return np.maximum(share, 0.0)  # less than nothing is rounding


def _open_until(at_s: Floats, weight: Floats, edges: Floats) -> Floats:
    """Sum of weight x (edge - at)+ for every edge."""
    order = np.argsort(at_s)
    w = np.concatenate([[0.0], np.cumsum(weight[order])])
    wt = np.concatenate([[0.0], np.cumsum((weight * at_s)[order])])
    n = np.searchsorted(at_s[order], edges)
    return np.asarray(w[n] * edges - wt[n])


def _backlog(begin_s: Floats, end_s: Floats, volume_bytes: Floats, path: tuple[float, float],
             edges: Floats) -> Floats:
    """Bytes in a fluid path of (R, Q): issued evenly over each span, accepted where there is room.

    SMs that are not in step store before and after the mean one; what finds no room at once
    stands for those that come later.
    """
    drain, capacity = path
    stores = (volume_bytes > 0) & (end_s > begin_s)
    rate = (volume_bytes / np.where(stores, end_s - begin_s, 1.0))[stores]
    issued = np.diff(_open_until(begin_s[stores], rate, edges)
                     - _open_until(end_s[stores], rate, edges))
    found, waiting = [0.0], 0.0
    for came, gone in zip(issued.tolist(), (drain * np.diff(edges)).tolist(), strict=True):
        held = found[-1] + waiting + came - gone
        found.append(min(max(held, 0.0), capacity))
        waiting = max(held - capacity, 0.0)
    return np.array(found)


def _middle(edges: Floats) -> Floats:
    return np.asarray(0.5 * (edges[1:] + edges[:-1]))
