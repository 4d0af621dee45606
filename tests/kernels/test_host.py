"""Kernels on the CPU: built, launched, and told in words what is wrong with them."""

from __future__ import annotations

import dataclasses
import doctest
import re
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xstage_lab.errors import DeviceUnavailable, Infeasible, InvalidValue, XStageError
from xstage_lab.kernels import host
from xstage_lab.kernels.failures import KernelFailed
from xstage_lab.kernels.host import HostKernel, build, check_races, compile_kernel
from xstage_lab.kernels.nvrtc import CompileFailed
from xstage_lab.kernels.source import read

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


# One kernel that does what `what` says, right or wrong.
ODD_JOBS = """
#include "ptx.cuh"
extern "C" __global__ void odd_jobs(int what, unsigned* flags, float* values) {
    DYNAMIC_SHARED(memory);
    const unsigned i = threadIdx.x, lane = i % 32;
    unsigned a[4] = {}, b[2] = {};
    float d[4] = {};
    switch (what) {
    case 0:  // in which order threads come
        values[i] = atomicAdd(flags, 1u);
        break;
    case 1:  // one thread misses a barrier
        if (i == 40) { while (ld_acquire_gpu(flags + 3) == 0) __nanosleep(20); }
        __syncthreads();
        break;
    case 2:  // two barriers that wait for each other
        if (i < 32) barrier_sync(1, 64); else barrier_sync(2, 64);
        break;
    case 3:  // a spin that forgets to sleep
        if (i == 0) while (ld_acquire_sys(flags + 2) == 0) {}
        else red_release_sys(flags + 2, 1);
        break;
    case 4:  // a divided warp
        if (lane < 16) __syncwarp(); else mma_bf16_16816(d, a, b);
        break;
    case 5:  // a lane that has ended
        if (lane == 7) return;
        mma_bf16_16816(d, a, b);
        break;
    case 6:  // a part of a warp
        if (lane < 16) __syncwarp(0xffff);
        break;
    case 7:  // past the end of shared memory
        memory[1000 + i] = 1;
        break;
    case 8:  // who has ended is not waited for
        if (i < 32) return;
        __syncthreads();
        values[i] = 1;
        break;
    case 9:  // fresh shared memory
        values[i] = reinterpret_cast<float*>(memory)[i];
        break;
    case 10:  // never ends
        while (true) __nanosleep(20);
    }
}
"""
SIGNATURE = """
struct Pair { unsigned a; double b; };
extern "C" __global__ void signature(const float* x, unsigned short* y, long long n, double z,
                                     Pair pair, void* const* table, const uint4* v) {
    if (threadIdx.x != 0) return;
    y[0] = static_cast<unsigned short>(n + pair.a);
    *static_cast<double*>(table[1]) = x[2] + z + pair.b + v->w + gridDim.x + blockDim.x;
}
"""


@pytest.fixture(scope="module")
def odd_jobs() -> HostKernel:
    return compile_kernel(ODD_JOBS)


def do(kernel: HostKernel, what: int, *, n_ctas: int = 1, **more: Any) -> Any:
    flags, values = np.zeros(4, np.uint32), np.zeros(64, np.float32)
    kernel.launch(n_ctas, 64, [(what, flags, values)], **{"shared_bytes": 1024, **more})
    return values


# ---- Building


def test_compile_error_shows_the_line() -> None:
    """A mistake in a kernel is told by file, line and the line's text."""
    text = 'extern "C" __global__ void k(int* p) {\n    p[0] = threadIx.x;\n}\n'
    with pytest.raises(CompileFailed, match=r"k\.cu:2:(?s:.*)p\[0\] = threadIx\.x;"):
        compile_kernel(text)


def test_compile_error_in_a_kernel_of_the_package_shows_the_line() -> None:
    """Also where headers were put in place, lines are those of the file on disk."""
    source = read("burst_gap", N_THREADS=64, BULK=0)
    broken = source.replace("sms[cta] = smid();", "sms[cta] = smid(1);")
    file = Path(build.__file__).parent.parent / "burst_gap.cu"
    lines = file.read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if "sms[cta] = smid();" in line)
    with pytest.raises(CompileFailed, match=rf"burst_gap\.cu:{number}:(?s:.*)smid\(1\)"):
        compile_kernel(broken)


def test_static_shared_memory_is_refused_in_words() -> None:
    """A `__shared__` array, which would be shared by all CTAs here, says what to write instead."""
    text = 'extern "C" __global__ void k() {\n    __shared__ int x[4]; x[0] = 1;\n}\n'
    with pytest.raises(CompileFailed, match="DYNAMIC_SHARED"):
        compile_kernel(text)


@pytest.mark.parametrize("text", ["", 'extern "C" __global__ void a() {}\n' * 2])
def test_text_must_hold_one_kernel(text: str) -> None:
    """A text without a kernel, or with several, is refused before anything is built."""
    with pytest.raises(XStageError, match="exactly one"):
        compile_kernel(text)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without g++ the error names the package to install."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DeviceUnavailable, match=r"apt-get install g\+\+"):
        compile_kernel(ODD_JOBS)


def test_what_was_built_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is built once, and again once its text or a parameter is another."""
    source = read("burst_gap", N_THREADS=32, BULK=0)
    compile_kernel(source)
    monkeypatch.setattr(build, "_build_kernel", lambda *_: pytest.fail("built again"))
    compile_kernel(source)
    for other in (source.replace("smid();", "smid() + 1;"),
                  dataclasses.replace(source, defines={"N_THREADS": 992, "BULK": 0})):
        with pytest.raises(pytest.fail.Exception, match="built again"):
            compile_kernel(other)


# ---- Arguments


def test_arguments_reach_the_kernel() -> None:
    """Pointers, numbers, structures and tables of addresses arrive as the kernel takes them."""
    kernel = compile_kernel(SIGNATURE)
    assert kernel.parameters == ("const*f4", "*u2", "i8", "f8", "V16", "const**V1", "const*V16")
    x, y, out = np.arange(3, dtype=np.float32), np.zeros(1, np.uint16), np.zeros(1)
    pair = np.zeros((), np.dtype([("a", np.uint32), ("b", np.float64)], align=True))
    pair["a"], pair["b"] = 7, 0.5
    table = np.array([0, out.ctypes.data], np.uintp)
    vector = np.array([0, 0, 0, 9], np.uint32)
    kernel.launch(3, 32, [(x, y, 2**40 + 1, 0.25, pair, table, vector)])
    assert y[0] == 8
    assert out[0] == 2 + 0.25 + 0.5 + 9 + 3 + 32


@pytest.mark.parametrize(("place", "value", "told"), [
    (0, np.zeros(3), "float64.*arrays of float32"),
    (0, np.zeros((3, 3), np.float32)[:, 0], "C-contiguous"),
    (0, [1.0, 2.0], "C-contiguous"),
    (1, np.broadcast_to(np.uint16(0), (1,)), "read-only"),
    (2, 1.5, "whole numbers"),
    (2, 2**70, "whole numbers"),
    (3, "1", "any finite number"),
    (4, np.zeros((), np.dtype([("a", np.uint32)])), "structures of 16 bytes"),
    (5, np.zeros(2, np.float64), "arrays of uint64"),
])
def test_arguments_that_do_not_fit_are_refused(place: int, value: object, told: str) -> None:
    """An argument of another type, layout or range is named, with what is allowed."""
    good: list[Any] = [np.zeros(3, np.float32), np.zeros(1, np.uint16), 1, 1.0,
                       np.zeros((), "V16"), np.zeros(2, np.uintp), np.zeros(4, np.uint32)]
    good[place] = value
    with pytest.raises(InvalidValue, match=f"argument {place} of signature.*{told}"):
        compile_kernel(SIGNATURE).launch(1, 32, [good])


def test_number_of_arguments(odd_jobs: HostKernel) -> None:
    """Too few arguments are refused with the kernel's parameters."""
    with pytest.raises(InvalidValue, match=r"3: i4, \*u4, \*f4"):
        odd_jobs.launch(1, 32, [(0, None)])


@pytest.mark.parametrize(("n_ctas", "n_threads", "error"), [
    (0, 32, InvalidValue), (1, 48, InvalidValue), (1, 2048, InvalidValue), (1000, 128, Infeasible),
])
def test_grids_that_do_not_fit_are_refused(
    odd_jobs: HostKernel, n_ctas: int, n_threads: int, error: type[XStageError]
) -> None:
    """A grid that is empty, too large, or of parts of warps is refused."""
    with pytest.raises(error):
        odd_jobs.launch(n_ctas, n_threads, [(0, None, None)])


# ---- Running


def test_documented_example_works() -> None:
    """What the package's docstring shows runs as it stands."""
    outcome = doctest.testmod(host)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_seed_chooses_the_interleaving(odd_jobs: HostKernel) -> None:
    """The same seed repeats the order in which threads run; another seed changes it."""
    orders = [do(odd_jobs, 0, seed=seed) for seed in (0, 0, 1, 1, 2)]
    assert (orders[0] == np.arange(64)).all()
    assert (orders[2] == orders[3]).all()
    assert not (orders[2] == orders[4]).all()
    assert all(sorted(order) == list(range(64)) for order in orders)


def test_shared_memory_starts_poisoned(odd_jobs: HostKernel) -> None:
    """What a CTA reads before it has written is no plausible number."""
    assert np.isnan(do(odd_jobs, 9)).all()


def test_ended_threads_are_not_waited_for(odd_jobs: HostKernel) -> None:
    """A barrier opens for those that are left."""
    assert do(odd_jobs, 8).tolist() == [0] * 32 + [1] * 32


def test_spin_without_sleep_lets_others_run(odd_jobs: HostKernel) -> None:
    """A loop that polls a flag without sleeping sees the flag that another thread raises."""
    do(odd_jobs, 3, timeout_s=20)


@pytest.mark.parametrize(("what", "told"), [
    (4, r"comes to \w+ while others wait in (__syncwarp|mma_bf16_16816)"),
    (5, r"lanes of its warp have ended|ends while its warp waits in mma"),
    (6, r"only full warps"),
    (7, r"CTA 0: writes behind its 1024 bytes of shared memory"),
])
@pytest.mark.parametrize("seed", [0, 3])
def test_mistakes_are_told(odd_jobs: HostKernel, what: int, told: str, seed: int) -> None:
    """A divided or incomplete warp and a write past shared memory fail, with the place."""
    with pytest.raises(KernelFailed, match=told):
        do(odd_jobs, what, seed=seed)


def test_deadlock_names_who_waits_where(odd_jobs: HostKernel) -> None:
    """When nobody can go on the launch ends at once and lists barriers and threads."""
    with pytest.raises(KernelFailed, match=r"no thread can go on") as raised:
        do(odd_jobs, 2, n_ctas=2)
    text = str(raised.value)
    for cta in (0, 1):
        assert re.search(rf"CTA {cta}: waits in barrier 1 .*32 threads, 0 to 31", text)
        assert re.search(rf"CTA {cta}: waits in barrier 2 .*32 threads, 32 to 63", text)


def test_hang_names_what_was_polled(odd_jobs: HostKernel) -> None:
    """A launch that takes too long tells lines, threads, and the array element somebody polls."""
    with pytest.raises(KernelFailed, match="not over in time") as raised:
        do(odd_jobs, 1, timeout_s=0.3)
    text = str(raised.value)
    assert "waits in __nanosleep (odd_jobs.cu:13), having read 0 at element 3 of argument 1" in text
    assert "1 threads, 40 to 40" in text
    assert "waits in __syncthreads (odd_jobs.cu:14): 63 threads, 0 to 63" in text


def test_interrupt_ends_a_launch(odd_jobs: HostKernel) -> None:
    """Ctrl-C, or a notebook's stop button, ends a kernel that never does."""
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            do(odd_jobs, 10, timeout_s=10_000)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert do(odd_jobs, 8)[63] == 1


# ---- Races

# Lanes hand a value to their neighbour through shared memory; `how` says what lies in between.
# Each way reads on a line of its own, by which ThreadSanitizer's reports are told apart.
EXCHANGE = """
#include "ptx.cuh"
extern "C" __global__ void exchange(unsigned* out, int how) {
    DYNAMIC_SHARED(memory);
    unsigned* box = reinterpret_cast<unsigned*>(memory);
    unsigned* mine = out + threadIdx.x;
    const unsigned* other = box + (threadIdx.x ^ 1);
    unsigned a[4] = {}, b[2] = {};
    float d[4] = {};
    box[threadIdx.x] = threadIdx.x;
    if (how == 0) { __syncwarp(); *mine = *other; }
    if (how == 1) { __syncthreads(); *mine = *other; }
    if (how == 2) { barrier_sync(1, 64); *mine = *other; }
    if (how == 3) { *mine = *other; }
    if (how == 4) { mma_bf16_16816(d, a, b); *mine = *other; }
    if (how == 5) { __shfl_sync(~0u, 0, 0); *mine = *other; }
}
"""
RUN = """
import numpy as np
from xstage_lab.kernels.host import compile_kernel
kernel = compile_kernel({text!r})
for how in {ways!r}:
    kernel.launch(1, 64, [(np.zeros(64, np.uint32), how)], shared_bytes=256)
"""


def line_of(how: int) -> str:
    lines = EXCHANGE.splitlines()
    return f"exchange.cu:{next(i for i, x in enumerate(lines, 1) if f'how == {how}' in x)}"


def test_barriers_order_memory(race_checker: None) -> None:
    """Lanes that exchange values through shared memory across a barrier do not race."""
    assert check_races(RUN.format(ways=[0, 1, 2], text=EXCHANGE)) == []


def test_exchanging_registers_orders_nothing(race_checker: None) -> None:
    """A missing __syncwarp is found, also where the warp meets in another instruction."""
    races = "\n".join(check_races(RUN.format(ways=[3, 4, 5], text=EXCHANGE)))
    assert [how for how in range(6) if line_of(how) in races] == [3, 4, 5]


def test_failing_code_is_no_clean_result(race_checker: None) -> None:
    """Code that fails under the race check is told, not taken for clean."""
    with pytest.raises(KernelFailed, match="ZeroDivisionError"):
        check_races("1 / 0")
