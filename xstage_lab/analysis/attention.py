"""The law for Ulysses attention, from the tile program of its mode."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xstage_lab import law
from xstage_lab.analysis.calibration import Calibration
from xstage_lab.analysis.tilings import lanes_used
from xstage_lab.law import queues
from xstage_lab.record import TILE, summarize
from xstage_lab.schedule import Program, build
from xstage_lab.spec import DTYPE_BYTES, MachineSpec, Tuning, UlyssesAttention

Floats = NDArray[np.float64]


class _Run(NamedTuple):
    """A tile program of the GPUs looked at, and when the law says each of its tasks is done."""

    program: Program
    tiles: queues.TileList
    times: queues.TileTimes

    @property
    def total_s(self) -> float:
        """First start to the last byte at its destination."""
        return float(max(self.times.accepted_s.max(), self.times.arrived_s.max()))

    def summary(self) -> dict[str, float]:
        """Condense the times as those of a record are."""
        t, (n_gpus, _, n_sms) = self.times, self.times.mma_end_s.shape
        free = np.zeros_like(t.mma_end_s)
        free[:, 1:] = t.mma_end_s[:, :-1]
        slot_wait = t.mma_start_s - np.maximum(free, t.ready_s)
        parts = []
        for gpu in range(n_gpus):
            tasks = self.program.tasks[gpu]
            found = np.zeros(tasks.size, TILE)
            found["gpu"], found["row"] = gpu, np.arange(tasks.size)
            found["sm"], found["store_bytes"] = found["row"] % n_sms, tasks["store_bytes"]
            for name, times in (("mma_start_s", t.mma_start_s), ("mma_end_s", t.mma_end_s),
                                ("issue_start_s", t.issue_start_s), ("issue_end_s", t.accepted_s),
                                ("arrived_s", t.arrived_s), ("slot_wait_s", slot_wait)):
                found[name] = times[gpu].ravel()[:tasks.size]
            parts.append(found)
        return summarize(np.concatenate(parts), self.program)


def full_tile_flop(attention: UlyssesAttention, tuning: Tuning) -> int:
    """Floating-point operations of `tile_m` queries that see all keys."""
    return 4 * attention.head_dim * tuning.tile_m * attention.sequence


def busiest_sm_tiles(program: Program, attention: UlyssesAttention, tuning: Tuning) -> float:
    """Full tiles that the SM with most to compute computes one after the other."""
    most = max(np.bincount(np.arange(rows.size) % program.n_ctas, rows["flop"]).max()
               for rows in program.tasks)
    return float(most) / full_tile_flop(attention, tuning)


def predicted_attention(attention: UlyssesAttention, machine: MachineSpec, cal: Calibration,
                        tuning: Tuning, t_mma_s: float | None) -> dict[str, Any]:
    """What the law says of `attention`: the fields of a `Prediction` that depend on it.

    `t_mma_s` is the compute time of `tile_m` queries that see all keys.
    """
    flop = full_tile_flop(attention, tuning)
    t_mma = (t_mma_s if t_mma_s is not None
             else flop / (machine.flop_per_s(attention.dtype) / machine.n_sms))

    def run(mode: str = attention.mode, used: Calibration = cal, stores: str = "remote") -> _Run:
        return _run(dataclasses.replace(attention, mode=mode), machine, used, tuning, t_mma, stores)

    here = run()
    summary = here.summary()
    fast, slow = (run(used=end).summary() for end in cal.ends())
    alone_s, serial_s = run("fused", stores="local").total_s, run("serial").total_s
    terms = _terms(attention, machine, cal, tuning, here) | {
        "t_mma_s": t_mma, "compute_only_s": alone_s, "serial_s": serial_s,
        "hidden_ratio": hidden_ratio(serial_s, summary["total_s"], alone_s)}
    bounds = _bounds(here, _path(attention, machine, cal, tuning), attention.mode,
                     summary["accepted_s"])
    which, margin = law.regime(_mean_run(terms, cal, tuning), bounds)
    copy = terms["remote_bytes"] / terms["drain_bytes_per_s"]
    unfused = {"compute_s": alone_s, "copy_s": copy,
               "total_s": float(law.unfused_time(alone_s, copy, 1.0))}
    names = ("compute_bound_s", "issue_bound_s", "drain_bound_s", "capacity_bound_s")
    return {"summary": summary, "low": fast, "high": slow, "regime": law.REGIMES[int(which)],
            "margin_ratio": float(margin),
            "terms": terms | dict(zip(names, bounds.tolist(), strict=True)),
            "unfused": unfused, "fuse_gain_ratio": unfused["total_s"] / summary["total_s"] - 1.0,
            "t_mma_source": "roofline" if t_mma_s is None else "measured"}


def hidden_ratio(serial_s: float, fused_s: float, compute_only_s: float) -> float:
    """Share of the all-to-all that costs no time, (serial - fused)/(serial - compute only).

    Above 1 where fused is faster than the attention alone, below 0 where it is slower than
    serial; NaN on one GPU, where there is nothing to hide.
    """
    exposed = serial_s - compute_only_s
    return (serial_s - fused_s) / exposed if exposed > 1e-9 * serial_s else math.nan


def _path(attention: UlyssesAttention, machine: MachineSpec, cal: Calibration,
          tuning: Tuning) -> queues.StorePath:
    k = attention.n_comm_sms if attention.mode == "dedicated" else tuning.n_ctas or machine.n_sms
    mesh = machine.link.topology == "full mesh"
    pairs = max(machine.max_gpus - 1, 1) if mesh else 1
    return queues.StorePath(
        tuning.issue_depth, cal.per_sm_bytes_per_s, cal.issue_latency_s, cal.drain_bytes_per_s,
        cal.capacity_at(k), cal.drain_bytes_per_s / pairs)


def _run(attention: UlyssesAttention, machine: MachineSpec, cal: Calibration, tuning: Tuning,
         t_mma: float, stores: str) -> _Run:
    program = build(attention, machine, tuning, stores, 1 if attention.is_symmetric else None)
    tiles = _tile_list(program, t_mma / full_tile_flop(attention, tuning))
    return _Run(program, tiles, queues.tile_times(tiles, _path(attention, machine, cal, tuning)))


def _tile_list(program: Program, s_per_flop: float) -> queues.TileList:
    """Lay the tasks of each GPU out by turn and SM."""
    n_gpus, n_sms = program.n_gpus, program.n_ctas
    n_turns = -(-max(rows.size for rows in program.tasks) // n_sms)

    def grid(name: str, nothing: int) -> NDArray[np.int64]:
        found = np.full((n_gpus, n_turns * n_sms), nothing, np.int64)
        for row, tasks in zip(found, program.tasks, strict=True):
            row[:tasks.size] = tasks[name]
        return found.reshape(n_gpus, n_turns, n_sms)

    gpu = np.arange(n_gpus)[:, None, None]
    owner, signals, waits = grid("owner", -1), grid("signals", -1), grid("waits_for", -1)
    n_counters = int(signals.max(initial=0)) + 1  # each GPU has its own
    signals, waits = (np.where(a < 0, -1, a + n_counters * gpu) for a in (signals, waits))
    flop, stored = (grid(name, 0).astype(np.float64) for name in ("flop", "store_bytes"))
    return queues.TileList(flop * s_per_flop, stored, np.where(owner == gpu, -1, owner), waits,
                           signals)


def _terms(attention: UlyssesAttention, machine: MachineSpec, cal: Calibration, tuning: Tuning,
           run: _Run) -> dict[str, float]:
    n_sms = run.program.n_ctas - (attention.n_comm_sms if attention.mode == "dedicated"
                                  and attention.n_gpus > 1 else 0)
    n_tiles = int((run.tiles.work_s[0] > 0).sum())
    busy = run.tiles.work_s.sum(axis=1)
    remote = max(map(run.program.remote_bytes, range(run.program.n_gpus)))
    drain = cal.drain_bytes_per_s * lanes_used(machine, attention.n_gpus)
    size = tuning.tile_m * attention.head_dim * DTYPE_BYTES[attention.out_dtype]
    sender = n_sms if attention.mode != "dedicated" else attention.n_comm_sms
    return {
        "issue_free_s": cal.issue_free_s(size), "tile_bytes": float(size),
        "drain_s": remote * min(n_sms / n_tiles, 1.0) / drain, "n_tiles": float(n_tiles),
        "n_waves": float(math.ceil(n_tiles / n_sms)), "n_compute_sms": float(n_sms),
        "idle_ratio": 1.0 - float(busy.sum(axis=1).mean()) / (n_sms * float(busy.max())),
        "remote_bytes": float(remote), "drain_bytes_per_s": drain,
        "send_bytes_per_s": float(law.issue_rate(sender, cal.per_sm_bytes_per_s, drain)),
        "capacity_bytes": _path(attention, machine, cal, tuning).capacity_bytes}


def _mean_run(terms: dict[str, float], cal: Calibration, tuning: Tuning) -> law.TileRun:
    return law.TileRun(
        terms["n_tiles"], terms["n_tiles"], terms["n_compute_sms"], terms["t_mma_s"],
        terms["tile_bytes"], terms["remote_bytes"], tuning.issue_depth, cal.per_sm_bytes_per_s,
        cal.issue_latency_s, terms["drain_bytes_per_s"], terms["capacity_bytes"])


def _bounds(run: _Run, path: queues.StorePath, mode: str, accepted: float) -> Floats:
    """Lower bounds of the last acceptance in the order of `law.REGIMES`, shape (4,).

    What each would take were the others free; one after the other none waits for a first tile.
    What bursts that do not fit add is known from the whole run, and where tiles store themselves.
    """
    work, size = run.tiles.work_s, run.tiles.store_bytes
    issue = np.where(size > 0, law.issue_free_time(
        size, path.per_sm_bytes_per_s, path.issue_latency_s), 0.0)
    computes = work > 0
    last = work.shape[1] - 1 - np.argmax(computes[:, ::-1], axis=1)[:, None]
    after = np.where(computes, issue, 0.0)
    after = (after.sum(axis=1) if path.issue_depth == 1
             else np.take_along_axis(after, last, axis=1)[:, 0])
    compute = float((work.sum(axis=1) + after).max())
    first = 0.0 if mode == "serial" else float(work[:, 0][computes[:, 0]].min())
    issuing = first + float(issue.sum(axis=1).max())
    sent = np.where(run.tiles.owner >= 0, size, 0.0).sum(axis=(1, 2)).max()
    drain = (first + path.issue_latency_s + (sent - path.capacity_bytes) / path.drain_bytes_per_s
             if sent > 0 else 0.0)
    others = max(compute, issuing, drain)
    blocked = mode == "fused" and sent > 0 and (work.shape[1] == 1 or accepted > 1.001 * others)
    return np.array([compute, issuing, drain, accepted if blocked else 0.0])
