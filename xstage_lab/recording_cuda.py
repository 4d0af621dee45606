"""What a recording of GPUs adds: whether the kernels are right, and what they are held against.

Not yet run on a GPU.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from concurrent.futures import TimeoutError as Overdue
from functools import partial
from typing import Any

from xstage_lab import analysis
from xstage_lab import recording_plan as plan
from xstage_lab.devices import cuda_gpus
from xstage_lab.devices.cuda import CudaDevice
from xstage_lab.devices.cuda_bursts import N_THREADS
from xstage_lab.devices.cuda_yardsticks import GEMM_EDGE, yardsticks
from xstage_lab.errors import XStageError
from xstage_lab.kernels.fused_tiles import SIGNALS, Variant
from xstage_lab.kernels.nvrtc import compile_kernel
from xstage_lab.kernels.source import Source
from xstage_lab.parallel import local_processes
from xstage_lab.recording import Recording, Target
from xstage_lab.recording_checks import cases, check, sources
from xstage_lab.schedule import build
from xstage_lab.spec import FusedGemm, Tuning
from xstage_lab.units import text

CHECK_SHARE, YARDSTICK_S, MAX_COMPILERS = 0.3, 120.0, 16
MMA_TILES, PATHS_SEED = ((128, 128), (128, 256), (256, 128)), 101
#: What local stores, host stores and the MMA path should reach, and the law's median error.
STORE_WANTED, LINK_WANTED, MMA_WANTED, LAW_WANTED = 0.85, 0.90, 0.50, 0.05


def record_gpus(recording: Recording) -> None:
    """Record everything that the GPUs of this computer allow.

    Raises
    ------
    DeviceUnavailable
        If there is no GPU to use.
    """
    cuda = cuda_gpus.load_cuda()
    facts = cuda_gpus.gpus(cuda)
    local, host, peer = (Target(name, partial(CudaDevice, destination=name))
                         for name in ("local", "host", "peer"))
    check_kernels(recording, host, facts[0])
    targets = [local, host]
    if len(facts) > 1:
        targets.append(peer)
    else:
        recording.missing("peer", "there is one GPU only.")
    for n_left, target in zip(range(len(targets), 0, -1), targets, strict=True):
        recording.calibrate(target, 1.0 / n_left)
    recording.index["yardsticks"] = found = _yardsticks(recording)
    mma = _mma_rate(recording, local)
    for n_left, target in zip(range(len(targets) - 1, 0, -1), targets[1:], strict=True):
        recording.sweep(target, 1.0 / n_left)
    for target in targets[1:]:
        compare_paths(recording, target, facts[0])
    recording.index["good"] = judge_gpu(recording.index, found, mma,
                                        recording.median_error("host"))


def check_kernels(recording: Recording, target: Target, facts: cuda_gpus.GpuFacts) -> None:
    """Check every kernel on small programs, in a share of the time."""
    recording.enter(target.name, "checks")
    ends = time.monotonic() + CHECK_SHARE * recording.left_s
    outcomes: list[dict[str, str]] = []
    recording.index["checks"] = outcomes
    worker = recording.worker(target)
    try:
        every = cases(worker.machine, ("registers", "bulk") if facts.has_bulk else ("registers",))
        compile_all([*sources(every, N_THREADS), *sweep_sources()], facts.arch)
        for outcome in check(worker, partial(_device_maker, target.name), every):
            outcomes.append(outcome._asdict())
            if outcome.outcome == "wrong":
                recording.tell(f"WRONG: {outcome.case}: {outcome.words}")
            if time.monotonic() > ends and len(outcomes) < len(every):
                recording.missing("kernels", f"{len(every) - len(outcomes)} checks: the time was "
                                  "over.")
                break
    except XStageError as error:
        recording.missing("kernels", str(error))
    worker.use(target.make)


def _device_maker(destination: str, store_path: str, signal: str) -> partial[CudaDevice]:
    return partial(CudaDevice, destination=destination, store_path=store_path, signal=signal)


def sweep_sources() -> list[Source]:
    """Return what the sweeps run, so that none of their time goes into compiling."""
    return [Variant(tile_m=m, tile_n=n, issue_depth=depth).source
            for (m, n), depth in itertools.product(plan.TILES, plan.DEPTHS)]


def compile_all(every: list[Source], arch: str) -> None:
    """Compile kernels on all CPUs; each is then found on disk."""
    with local_processes(min(os.cpu_count() or 1, MAX_COMPILERS)) as pool:
        list(pool.map(partial(compile_kernel, arch=arch), every))


def compare_paths(recording: Recording, target: Target, facts: cuda_gpus.GpuFacts) -> None:
    """Run one GEMM over every store path and with every signal, and say how they differ."""
    gemm = recording.gemms.get(target.name)
    if gemm is None:
        return
    recording.enter(target.name, "paths")
    worker, device = recording.worker(target), recording.device(target)
    told = recording.index.setdefault("paths", [])
    paths = ("registers", "bulk") if facts.has_bulk else ("registers",)
    for i, (path, signal) in enumerate(itertools.product(paths, SIGNALS)):
        worker.use(_device_maker(target.name, path, signal))
        try:  # seeds of their own, as these runs differ from others in path and signal alone
            found = device.measure(build(gemm, device.machine, Tuning()), PATHS_SEED + i).summary
        except XStageError as error:
            recording.missing(f"{target.name}: {path}, {signal}", str(error))
            continue
        after = f", signal {text('_s', found['signal_s'])} a tile" if "signal_s" in found else ""
        told.append({
            "what": f"{target.name}, {path}, signal {signal}",
            "accepted_s": found["accepted_s"], "signal_s": found.get("signal_s", math.nan),
            "words": f"accepted in {text('_s', found['accepted_s'], 4)}, a tile issued in "
                     f"{text('_s', found['issue_s'])}{after}"})
    worker.use(target.make)


def _yardsticks(recording: Recording) -> dict[str, Any]:
    recording.enter("gpu", "yardsticks")
    try:
        with local_processes(1) as pool:
            return pool.submit(yardsticks).result(timeout=YARDSTICK_S)
    except (XStageError, Overdue, OSError, RuntimeError) as error:
        recording.missing("yardsticks", str(error) or type(error).__name__)
        return {}


def _mma_rate(recording: Recording, target: Target) -> float:
    """Return the best rate of the MMA path with stores off (FLOP/s), NaN if it has none."""
    recording.enter(target.name, "mma")
    gemm, best = FusedGemm(m=GEMM_EDGE, n=GEMM_EDGE, k=GEMM_EDGE, n_gpus=1), math.nan
    for tile_m, tile_n in MMA_TILES:
        tuning = Tuning(tile_m=tile_m, tile_n=tile_n)
        try:
            waves_s = analysis.measure_t_mma(recording.device(target), gemm, tuning, 0)
        except XStageError as error:
            recording.missing(f"{target.name}: {tile_m}x{tile_n} at {GEMM_EDGE} cubed", str(error))
            continue
        n_sms = recording.worker(target).machine.n_sms
        n_waves = math.ceil(math.ceil(gemm.m / tile_m) * math.ceil(gemm.n / tile_n) / n_sms)
        best = max(gemm.flop / (waves_s * n_waves), 0.0 if math.isnan(best) else best)
    return best


def judge_gpu(index: dict[str, Any], found: dict[str, Any], mma_flop_per_s: float,
              law_ratio: float) -> list[dict[str, Any]]:
    """Return what the kernels reach beside what they are held against, a line each.

    Parameters
    ----------
    index : dict
        With the calibrations of the targets `local` and `host`.
    found : dict
        What `yardsticks` returns.
    mma_flop_per_s : float
        Rate of the MMA path.
    law_ratio : float
        Median error of the law on the host link.

    Returns
    -------
    list of dict
        `what`, `ratio`, `wanted_ratio`, `good` and `words`; a ratio is NaN where it was not
        measured.
    """
    def drain(target: str) -> float:
        return float(index["targets"].get(target, {}).get("drain_bytes_per_s", math.nan))

    held = ((
        "stores to the GPU's own memory", drain("local"), "copy_memory_bytes_per_s",
        "that a plain copy reads and writes", STORE_WANTED, "_bytes_per_s",
    ), (
        "stores to host memory", drain("host"), "pinned_copy_bytes_per_s",
        "of a pinned copy", LINK_WANTED, "_bytes_per_s",
    ), (
        "MMA path", mma_flop_per_s, "cublas_flop_per_s", f"of cuBLAS at {GEMM_EDGE} cubed",
        MMA_WANTED, "_flop_per_s",
    ))
    lines = []
    for what, ours, key, of, wanted, unit in held:
        theirs = found.get(key, math.nan)
        ratio = ours / theirs
        words = (f"{text(unit, ours)}, {ratio:.0%} of the {text(unit, theirs)} {of}; at least "
                 f"{wanted:.0%} is wanted" if ratio == ratio else "not measured")
        lines.append({"what": what, "ratio": ratio, "wanted_ratio": wanted,
                      "good": ratio >= wanted, "words": words})
    words = ("not measured" if math.isnan(law_ratio) else
             f"off by {law_ratio:.1%} in the median; at most {LAW_WANTED:.0%} is wanted")
    return [*lines, {"what": "law on the host link", "ratio": law_ratio,
                     "wanted_ratio": LAW_WANTED, "good": law_ratio <= LAW_WANTED, "words": words}]
