"""The burst kernel stores every byte where it belongs and keeps its bursts in order."""

from __future__ import annotations

import itertools
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from xstage_lab.kernels import burst_gap
from xstage_lab.kernels.burst_gap import N_ANCHORS, SHARED_BYTES, WAITS
from xstage_lab.kernels.failures import KernelFailed, describe_report
from xstage_lab.kernels.host import check_races, compile_kernel
from xstage_lab.kernels.nvrtc import CompileFailed
from xstage_lab.kernels.source import Source, read

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

POISON = 0xFFFFFFFF
MASK = 0xFFFFFFFF


def first_word(seed: int, cta: int, burst: int) -> int:
    """The hash in the kernel's header comment, in plain integers."""
    x = seed
    for word in (cta, burst):
        x = (x ^ word) * 0x9E3779B1 & MASK
        x ^= x >> 15
        x = x * 0x85EBCA77 & MASK
        x ^= x >> 13
    return x


@dataclass
class Train:
    """A run of the kernel; as many GPUs, each storing to its successors in turn."""

    n_gpus: int = 2
    n_ctas: int = 3
    burst_bytes: int = 528
    n_bursts: int = 4
    n_slots: int = 4
    gap_cycles: int = 500
    lockstep: bool = True
    bulk: bool = False
    n_threads: int = 64
    seed: int = 0
    budget_cycles: int = 1_000_000
    abort: int = 0

    def __post_init__(self) -> None:
        gpus, ctas = range(self.n_gpus), self.n_ctas
        shape = (ctas, self.n_slots, self.burst_bytes // 4)
        self.inbox = [[np.full(shape, POISON, np.uint32) for _ in gpus] for _ in gpus]
        self.spans = [np.zeros((ctas, self.n_bursts, 2), np.int64) for _ in gpus]
        self.anchors = [np.zeros((ctas, N_ANCHORS), np.int64) for _ in gpus]
        self.sms = [np.full(ctas, POISON, np.uint32) for _ in gpus]
        self.reports = [np.zeros(8, np.uint32) for _ in gpus]

    @property
    def source(self) -> Source:
        return read("burst_gap", N_THREADS=self.n_threads, BULK=int(self.bulk))

    def owners(self, gpu: int) -> list[int]:
        """The GPUs that `gpu` stores to, the first for CTA 0."""
        return [(gpu + 1 + i) % self.n_gpus for i in range(max(self.n_gpus - 1, 1))]

    def run(self, source: Source | None = None) -> Train:
        abort, started = np.array([self.abort], np.uint32), np.zeros(1, np.uint32)
        arguments: list[tuple[Any, ...]] = []
        for gpu in range(self.n_gpus):
            to = [self.inbox[owner][gpu].ctypes.data for owner in self.owners(gpu)]
            arguments.append((
                np.array(to, np.uint64), len(to), self.burst_bytes, self.n_bursts, self.n_slots,
                100 + gpu, self.gap_cycles, int(self.lockstep), self.spans[gpu],
                self.anchors[gpu], self.sms[gpu], np.zeros(1, np.uint32), started,
                self.n_gpus * self.n_ctas, abort, self.budget_cycles, self.reports[gpu]))
        compile_kernel(source or self.source).launch(
            self.n_ctas, self.n_threads, arguments, seed=self.seed,
            shared_bytes=SHARED_BYTES + self.bulk * self.burst_bytes)
        return self

    def expected(self, owner: int, gpu: int) -> NDArray[np.uint32]:
        """What must lie at `owner` of `gpu`'s bursts."""
        words = np.full_like(self.inbox[owner][gpu], POISON)
        to = self.owners(gpu)
        for cta, burst in itertools.product(range(self.n_ctas), range(self.n_bursts)):
            if to[cta % len(to)] == owner:
                count = np.arange(self.burst_bytes // 4, dtype=np.uint64)
                words[cta, burst % self.n_slots] = first_word(100 + gpu, cta, burst) + count & MASK
        return words

    def n_wrong(self) -> int:
        pairs = itertools.product(range(self.n_gpus), repeat=2)
        return sum(int((self.inbox[o][g] != self.expected(o, g)).sum()) for o, g in pairs)

    def told(self) -> list[str]:
        return [describe_report(report, WAITS) for report in self.reports]


@pytest.mark.parametrize("bulk", [False, True], ids=["registers", "bulk"])
@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
@pytest.mark.parametrize("n_gpus", [1, 2, 3, 4])
@pytest.mark.parametrize(("burst_bytes", "seed"), [(16, 0), (1040, 1), (4096, 2), (7984, 3)])
def test_every_byte_is_where_it_belongs(
    n_gpus: int, lockstep: bool, bulk: bool, burst_bytes: int, seed: int
) -> None:
    """Each word of each burst lies at its CTA's destination, in its slot, and nothing elsewhere."""
    train = Train(n_gpus=n_gpus, n_ctas=n_gpus + 1, burst_bytes=burst_bytes, lockstep=lockstep,
                  bulk=bulk, seed=seed).run()
    assert train.n_wrong() == 0
    assert train.told() == [""] * n_gpus


@pytest.mark.parametrize("bulk", [False, True], ids=["registers", "bulk"])
def test_slots_are_used_again(bulk: bool) -> None:
    """With fewer slots than bursts a slot holds the last burst that went there."""
    assert Train(n_bursts=7, n_slots=3, bulk=bulk).run().n_wrong() == 0


@pytest.mark.parametrize("bulk", [False, True], ids=["registers", "bulk"])
@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
def test_gaps_are_kept(lockstep: bool, bulk: bool) -> None:
    """A burst starts no sooner than a gap after its CTA's last, in lockstep after everybody's."""
    train = Train(n_ctas=5, gap_cycles=3000, lockstep=lockstep, bulk=bulk, seed=9).run()
    for spans, anchors, sms in zip(train.spans, train.anchors, train.sms, strict=True):
        start, end = spans[..., 0], spans[..., 1]
        assert (start < end).all()
        before = end[:, :-1].max(0) if lockstep else end[:, :-1]
        assert (start[:, 1:] - before >= 3000).all()
        assert (anchors[:, 1] <= start[:, 0]).all()
        assert (anchors[:, 3] >= end[:, -1]).all()
        assert (anchors[:, 2] > anchors[:, 0]).all()
        assert ((anchors[:, 4] >= end[:, -1]) & (anchors[:, 4] < anchors[:, 3])).all()
        assert sorted(sms) == list(range(5))


def test_all_start_together() -> None:
    """No CTA of any GPU stores before all CTAs of all GPUs are there."""
    train = Train(n_gpus=3, lockstep=False, seed=4)
    late = "    if (cta == 1 && started != nullptr) for (int i = 0; i < 50; ++i) __nanosleep(20);\n"
    line = "        red_release_sys(started, 1);\n"
    train.run(train.source.replace(line, late + line))
    first = min(spans[:, 0, 0].min() for spans in train.spans)
    assert first >= 50 * ROUND_CYCLES


def test_a_cta_that_never_comes_is_named() -> None:
    """Where a CTA is missing at the start, the others end by the budget and say so."""
    train = Train(budget_cycles=20_000)
    line = "        red_release_sys(started, 1);\n"
    train.run(train.source.replace(line, "        if (cta != 1)\n    " + line))
    for told in train.told():
        assert "waited for all CTAs of all GPUs to start: it saw 4 and needs 6" in told
    assert not any(spans.any() for spans in train.spans)


def test_arguments_are_those_of_the_kernel() -> None:
    """Names and types of the arguments, from which launches are packed, are the kernel's own."""
    kernel = compile_kernel(Train().source)
    declared = re.search(r"burst_gap\(([^)]*)\)", Train().source.text)
    assert declared is not None
    names = [re.split(r"[ *]", each.strip())[-1] for each in declared.group(1).split(",")]
    assert names == list(burst_gap.ARGUMENTS)
    for kind, wanted in zip(kernel.parameters, burst_gap.ARGUMENTS.values(), strict=True):
        assert np.dtype(wanted) == (np.dtype(np.uint64) if "*" in kind else np.dtype(kind))


SPAN_START = "        long long start = clock_cycles(), end = start;"
SPAN_END = "        __syncwarp();\n        end = clock_cycles();"
ROUND_CYCLES = 32  # the host's clock goes on at least so far while every thread gets its turn
HOLD = "        if (warp == {warp}) for (int i = 0; i < 5; ++i) __nanosleep(20);\n"


@pytest.mark.parametrize(("held", "line"), [(0, SPAN_START), (3, SPAN_START), (3, SPAN_END)])
def test_span_holds_all_warps(held: int, line: str) -> None:
    """A burst's span is from the earliest warp's start to the latest warp's end."""
    train = Train(n_threads=256, n_ctas=2, burst_bytes=4096, seed=2)
    train.run(train.source.replace(line, HOLD.format(warp=held) + line))
    for spans in train.spans:
        assert (spans[..., 1] - spans[..., 0] >= 5 * ROUND_CYCLES).all()


def test_free_ctas_wait_for_nobody() -> None:
    """Without lockstep a CTA that never comes leaves the others at work."""
    train = Train(lockstep=False)
    absent = train.source.replace("    long long last_end = clock_cycles();",
                                  "    if (cta == 1) return;\n"
                                  "    long long last_end = clock_cycles();")
    train.run(absent)
    assert train.told() == ["", ""]
    assert all((spans[[0, 2]] > 0).all() and not spans[1].any() for spans in train.spans)


def test_lost_barrier_names_who_waited() -> None:
    """In lockstep a CTA that does not count itself in ends the run by the budget, with words."""
    train = Train(budget_cycles=20_000)
    lost = train.source.replace(
        "    red_relaxed_gpu(counter, 1);",
        "    if (blockIdx.x != 2 || burst != 1) red_relaxed_gpu(counter, 1);")
    train.run(lost)
    for told in train.told():
        assert "step 1 waited for all CTAs to end their burst: it saw 5 and needs 6" in told
        assert "budget" in told
    assert all(spans[:, 0].all() and not spans[:, 1:].any() for spans in train.spans)


@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
def test_abort_flag_ends_it(lockstep: bool) -> None:
    """The abort flag ends a train that would go on for long, and a wait for others."""
    train = Train(n_gpus=1, n_bursts=1000, n_slots=1, burst_bytes=16, gap_cycles=0,
                  lockstep=lockstep, abort=1, budget_cycles=2**62)
    source = train.source
    if lockstep:
        source = source.replace("    red_relaxed_gpu(counter, 1);\n", "")
    train.run(source)
    assert not train.spans[0][:, -1].any()
    assert ("abort" in train.told()[0]) == lockstep


WRONG = {
    "one slot too far": (False, "burst % n_slots) *\n", "(burst + 1) % n_slots) *\n"),
    "the next CTA's destination": (False, "cta % n_destinations", "(cta + 1) % n_destinations"),
    "the last vector left out": (False, "i < n_vectors; i += N_THREADS)\n            st_global",
                                 "i + 1 < n_vectors; i += N_THREADS)\n            st_global"),
    "source reused early": (True, "            bulk_wait_read<0>();\n", ""),
    "no proxy fence": (True, "        fence_proxy_async();\n", ""),
    "source not filled by all": (True, "i = thread; i < n_vectors; i += N_THREADS)\n            "
                                 "st_shared", "i = thread; i < n_vectors; i += N_THREADS + 1)\n"
                                 "            st_shared"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_caught(name: str) -> None:
    """A burst kernel with a mistake in it does not pass the check of the pattern."""
    bulk, old, new = WRONG[name]
    train = Train(n_gpus=3, bulk=bulk, burst_bytes=2064)
    try:
        train.run(train.source.replace(old, new))
    except KernelFailed:
        return
    assert train.n_wrong() > 0


def test_parameters_are_asked_for() -> None:
    """A missing parameter of the compilation is named, with the line that needs it."""
    with pytest.raises(CompileFailed, match=r"burst_gap.cu:\d+.*N_THREADS: threads of a CTA"):
        compile_kernel(read("burst_gap", BULK=0))


RUN = """
import sys
sys.path.insert(0, {folder!r})
from test_burst_gap import Train
for bulk, lockstep in {ways!r}:
    train = Train(n_ctas=2, n_bursts=3, bulk=bulk, lockstep=lockstep, budget_cycles=2**40)
    train.run(train.source.replace({old!r}, {new!r}))
    assert train.n_wrong() == 0
"""
BARRIER = "        __syncthreads();\n        if (!shared.goes_on) return;"


def races(ways: list[tuple[bool, bool]], new: str = BARRIER) -> list[str]:
    folder = str(Path(__file__).parent)
    return check_races(RUN.format(folder=folder, ways=ways, old=BARRIER, new=new))


def test_there_are_no_races(race_checker: None) -> None:
    """ThreadSanitizer finds nothing in either store path, free and in lockstep."""
    assert races([(False, True), (True, False)]) == []


def test_planted_race_is_found(race_checker: None) -> None:
    """Without the barrier before a burst, threads read its start while it is written."""
    found = races([(False, True)], new=BARRIER.replace("__syncthreads();", ""))
    assert any("burst_gap.cu" in race for race in found)
