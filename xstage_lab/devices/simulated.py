"""The simulated device: tile programs on a discrete-event model, exact and seeded.

Its times are simulated and say so. The event loop is in `store_path`; here programs become its
rows: compute time from a roofline with a weight cache, jitter, chunks, destinations.
"""

from __future__ import annotations

import math

import numba
import numpy as np
from numpy.typing import NDArray

from xstage_lab.devices import store_path
from xstage_lab.devices.base import Capabilities, check_counters, figures_digest, is_balanced
from xstage_lab.devices.weight_cache import missed_bytes
from xstage_lab.errors import UnknownFact, XStageError, require_number
from xstage_lab.record import TILE, Record, Tiles, provenance, summarize
from xstage_lab.schedule import NOTHING, Program, Tasks
from xstage_lab.spec import BurstTrain, MachineSpec

_NEEDED = ("egress_bytes_per_s", "ingress_bytes_per_s", "per_sm_bytes_per_s", "issue_latency_s",
           "path_capacity_bytes", "per_sm_capacity_bytes", "credit_bytes", "credit_latency_s")
N_BACKLOG_SAMPLES = 2000
CHUNKS_OF_SHORT_RUNS = 2**16  # a few milliseconds of simulation


class SimulatedDevice:
    """A node of GPUs that exists only as a model.

    Parameters
    ----------
    machine : MachineSpec
        Without unknown link fields; fill them with `catalog.with_assumptions`.
    mma_jitter_ratio, issue_jitter_ratio : float
        Relative standard deviation of a tile's compute time and of its issue time (log-normal,
        mean kept). 0 is exact.
    chunks_per_tile : int
        Fewest chunks a task's stores are cut into.
    mirror : bool
        Simulate one GPU where all do the same.

    Raises
    ------
    UnknownFact
        If a link field is NaN.
    """

    name = "simulated"
    badge = "SIMULATED"
    capabilities = Capabilities(times=True, per_tile=True, any_program=True)

    def __init__(
        self,
        machine: MachineSpec,
        *,
        mma_jitter_ratio: float = 0.0,
        issue_jitter_ratio: float = 0.0,
        chunks_per_tile: int = 16,
        mirror: bool = True,
    ) -> None:
        for field in _NEEDED:
            if math.isnan(getattr(machine.link, field)):
                raise UnknownFact(field, machine.name,
                                  "enter a value, or take catalog.with_assumptions(machine).")
        require_number("mma_jitter_ratio", mma_jitter_ratio, low=0.0, high=1.0)
        require_number("issue_jitter_ratio", issue_jitter_ratio, low=0.0, high=1.0)
        require_number("chunks_per_tile", chunks_per_tile, low=1, high=4096, integer=True)
        self.machine = machine
        self.mma_jitter_ratio = mma_jitter_ratio
        self.issue_jitter_ratio = issue_jitter_ratio
        self.chunks_per_tile = chunks_per_tile
        self.mirror = mirror
        #: What a record's provenance says of the device, besides its name and its machine's.
        self.settings = {"mma_jitter_ratio": mma_jitter_ratio,
                         "issue_jitter_ratio": issue_jitter_ratio,
                         "figures": figures_digest(machine)}

    def measure(self, program: Program, seed: int | None = None) -> Record:
        """Simulate `program`; the same seed gives the same record."""
        require_number("n_ctas", program.n_ctas, low=1, high=self.machine.n_sms, integer=True,
                       unit="CTAs", remedy="Build the program for this device's machine.")
        require_number("n_gpus", program.n_gpus, low=1, high=self.machine.max_gpus, integer=True,
                       unit="GPUs", remedy="Build the program for this device's machine.")
        simulated = 1 if self.mirror and is_balanced(program) else program.n_gpus
        rng = np.random.default_rng(0 if seed is None else seed)
        rows = self._rows(program, simulated, rng)
        state = self._state(program, rows, simulated)
        unfinished = store_path.run(self._path(program, state), state)
        if unfinished:
            raise XStageError(f"{unfinished} SMs wait for a counter that no task raises: the "
                              "program's dependencies form a cycle or are incomplete.")
        tiles = _tiles(program, state)
        return Record(
            summary=summarize(tiles, program),
            tiles=tiles,
            backlog=state.backlog[:, :state.gpus["n_samples"][0]].copy(),
            parameters=program.parameters(),
            provenance=provenance(
                self.badge, self.name, f"discrete-event model of {self.machine.name}",
                machine=self.machine.name, seed=seed, numba=numba.__version__,
                assumed=sorted(self.machine.link.assumed | self.machine.assumed),
                n_gpus_simulated=simulated, **self.settings),
        )

    def _rows(
        self, program: Program, simulated: int, rng: np.random.Generator
    ) -> NDArray[np.void]:
        """Cost every task of the simulated GPUs."""
        link = self.machine.link
        tasks = np.concatenate(program.tasks[:simulated])
        gpu = np.repeat(np.arange(simulated), [t.size for t in program.tasks[:simulated]])
        position = np.concatenate([np.arange(t.size) for t in program.tasks[:simulated]])
        slow = _jitter(rng, self.issue_jitter_ratio, tasks.size)
        rows = np.zeros(tasks.size, store_path.ROW)
        rows["work_s"] = np.concatenate(
            [self._work_s(t, program) for t in program.tasks[:simulated]])
        rows["work_s"] *= _jitter(rng, self.mma_jitter_ratio, tasks.size)
        rows["n_chunks"] = self._n_chunks(tasks, program)
        rows["chunk_bytes"] = tasks["store_bytes"] / np.maximum(rows["n_chunks"], 1)
        rows["sm"] = position % program.n_ctas
        rows["start_s"] = link.issue_latency_s * slow
        rows["half_s"] = 0.5 * rows["chunk_bytes"] / link.per_sm_bytes_per_s * slow
        rows["server"] = self._servers(tasks["owner"].astype(np.int64), gpu, program.n_gpus,
                                       simulated)
        own = gpu * (int(tasks["signals"].max(initial=-1)) + 1)  # each GPU has its counters
        for name in ("waits_for", "signals"):
            rows[name] = np.where(tasks[name] < 0, -1, tasks[name] + own)
        return rows

    def _work_s(self, tasks: Tasks, program: Program) -> NDArray[np.float64]:
        """Time of each task before its stores: a gap, or a roofline on one SM's share."""
        if isinstance(program.workload, BurstTrain):
            return tasks["gap_s"].copy()
        rate = self.machine.flop_per_s(program.workload.dtype) / self.machine.n_sms
        compute = tasks["flop"] / rate
        if math.isnan(self.machine.hbm_bytes_per_s) or math.isnan(self.machine.l2_bytes):
            return compute
        missed = missed_bytes(tasks["panel"], tasks["panel_bytes"], program.n_ctas,
                              self.machine.l2_bytes)
        return np.maximum(compute, missed / self.machine.hbm_bytes_per_s)

    def _n_chunks(self, rows: Tasks, program: Program) -> NDArray[np.int64]:
        """Chunks of each task: more where tasks are few, so that short runs are smooth too."""
        fewest = max(self.chunks_per_tile, min(CHUNKS_OF_SHORT_RUNS // rows.size, 256))
        limit = min(self.machine.link.per_sm_capacity_bytes,
                    self.machine.link.path_capacity_bytes / program.n_ctas,
                    self.machine.link.credit_bytes / 32) / 8
        n = np.maximum(fewest, np.ceil(rows["store_bytes"] / limit))
        n = np.minimum(np.minimum(n, rows["store_bytes"]), 4096)
        return np.where(rows["store_bytes"] > 0, n, 0).astype(np.int64)

    def _servers(self, owner: NDArray[np.int64], gpu: NDArray[np.int64], n_gpus: int,
                 simulated: int) -> NDArray[np.int64]:
        """Ingress server of each task: one per destination, or one per pair in a full mesh."""
        if self.machine.link.topology == "full mesh":
            server = gpu * n_gpus + owner
        else:
            server = np.zeros_like(owner) if simulated < n_gpus else owner
        return np.where(owner == gpu, -1, server)

    def _path(self, program: Program, state: store_path.State) -> store_path.Path:
        link = self.machine.link
        lanes = self._lanes()
        n_events = 2 * int(state.rows["n_chunks"][:state.gpus["end_row"][0]].sum())
        return store_path.Path(
            n_sms=program.n_ctas,
            depth=program.issue_depth,
            egress_bytes_per_s=link.egress_bytes_per_s,
            ingress_bytes_per_s=link.ingress_bytes_per_s / lanes,
            path_bytes=link.path_capacity_bytes,
            per_sm_bytes=link.per_sm_capacity_bytes,
            credit_bytes=link.credit_bytes / lanes,
            credit_latency_s=link.credit_latency_s,
            sample_stride=max(1, -(-n_events // N_BACKLOG_SAMPLES)),
        )

    def _lanes(self) -> int:
        """Links a GPU's rate is divided over: each peer has its own in a full mesh."""
        mesh = self.machine.link.topology == "full mesh"
        return max(self.machine.max_gpus - 1, 1) if mesh else 1

    def _state(
        self, program: Program, rows: NDArray[np.void], simulated: int
    ) -> store_path.State:
        """Lay out what the event loop changes."""
        link = self.machine.link
        n_rows = [program.tasks[g].size for g in range(simulated)]
        gpus = np.zeros(simulated, store_path.GPU)
        gpus["end_row"] = np.cumsum(n_rows)
        gpus["first_row"] = gpus["end_row"] - n_rows
        gpus["first_sm"] = np.arange(simulated) * program.n_ctas
        gpus["link_s"] = np.inf
        sms = np.zeros(simulated * program.n_ctas, store_path.SM)
        sms["row"] = (gpus["first_row"][:, None] + np.arange(program.n_ctas)).ravel()
        check_counters(program.tasks[:simulated])
        leaves = 1 << (program.n_ctas - 1).bit_length()
        offer_sm = np.zeros((simulated, 2 * leaves), np.int32)
        offer_sm[:, leaves:] = np.arange(leaves)
        signals = rows["signals"][rows["signals"] >= 0]
        counters = np.zeros(int(max(rows["waits_for"].max(), rows["signals"].max(), 0)) + 1,
                            store_path.COUNTER)
        counters["missing"] = np.bincount(signals, minlength=counters.size)
        counters["parked"] = -1
        mesh = link.topology == "full mesh"
        servers = np.zeros(program.n_gpus * (simulated if mesh else 1), store_path.SERVER)
        stored = rows[(rows["server"] >= 0) & (rows["n_chunks"] > 0)]
        total = int(stored["n_chunks"].sum())
        smallest = float(stored["chunk_bytes"].min(initial=np.inf))

        def slots(capacity_bytes: float) -> int:  # no more chunks than fit, or than there are
            return 2 + (int(min(capacity_bytes / smallest, total)) if total else 0)

        return store_path.State(
            rows=rows, sms=sms, gpus=gpus, counters=counters, servers=servers,
            offer_s=np.full((simulated, 2 * leaves), np.inf), offer_sm=offer_sm,
            ring=np.zeros((simulated, slots(link.path_capacity_bytes)), np.int32),
            credits=np.zeros((servers.size, slots(link.credit_bytes / self._lanes())),
                             store_path.CREDIT),
            backlog=np.zeros((2, N_BACKLOG_SAMPLES + 1)),
        )


def _jitter(rng: np.random.Generator, ratio: float, n: int) -> NDArray[np.float64]:
    """Log-normal factors of mean 1 and relative standard deviation `ratio`."""
    if ratio == 0.0:
        return np.ones(n)
    sigma = math.sqrt(math.log1p(ratio**2))
    return rng.lognormal(-0.5 * sigma**2, sigma, n)


def _tiles(program: Program, state: store_path.State) -> Tiles:
    """Per-tile times of every GPU; a mirrored GPU repeats the simulated one."""
    parts = []
    for gpu in range(program.n_gpus):
        like = gpu if gpu < state.gpus.size else 0
        rows = state.rows[state.gpus["first_row"][like]:state.gpus["end_row"][like]]
        tiles = np.zeros(rows.size, TILE)
        tiles["gpu"], tiles["row"] = gpu, np.arange(rows.size)
        tiles["sm"] = tiles["row"] % program.n_ctas
        tiles["store_bytes"] = program.tasks[like]["store_bytes"]
        for name in ("mma_start_s", "mma_end_s", "issue_start_s", "issue_end_s", "arrived_s",
                     "slot_wait_s"):
            tiles[name] = rows[name]
        tiles["slot_wait_s"][program.tasks[like]["kind"] == NOTHING] = 0.0  # it needs none
        parts.append(tiles)
    return np.concatenate(parts)
