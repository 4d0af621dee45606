"""Each wrapper's CPU body does what the PTX manual says of its instruction, and no more."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from xstage_lab.kernels.failures import KernelFailed, describe_report
from xstage_lab.kernels.host import HostKernel, check_races, compile_kernel

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

WARP = 32
POISON = 0xFFFFFFFF

SOURCES = {
    # Every thread counts itself once with each instruction.
    "count": """
extern "C" __global__ void count(unsigned* c, unsigned* seen) {
    DYNAMIC_SHARED(memory);
    unsigned* shared = reinterpret_cast<unsigned*>(memory);
    if (threadIdx.x < 2) shared[threadIdx.x] = 0;
    __syncthreads();
    red_release_cta(shared, 1); red_relaxed_cta(shared + 1, 1);
    red_release_gpu(c, 1); red_release_sys(c + 1, 1);
    red_relaxed_gpu(c + 2, 1); red_relaxed_sys(c + 3, 1);
    if (cas_relaxed_gpu(c + 4, 0, 7) == 0) red_relaxed_gpu(c + 5, 1);
    atomicAdd(c + 6, 2u); atomicMax(c + 7, threadIdx.x);
    atomicMin(c + 8, threadIdx.x); atomicExch(c + 9, 5u);
    __syncthreads();
    if (threadIdx.x != 0) return;
    st_release_sys(c + 10 + blockIdx.x, ld_acquire_cta(shared) + ld_acquire_cta(shared + 1));
    seen[3 * blockIdx.x] = ld_acquire_gpu(c + 4);
    seen[3 * blockIdx.x + 1] = ld_acquire_sys(c + 9);
    seen[3 * blockIdx.x + 2] = ld_relaxed_gpu(c + 4) + ld_relaxed_sys(c + 9);
}""",
    # out = 2 * in by way of shared memory; a shift breaks an alignment or a range.
    "vectors": """
extern "C" __global__ void vectors(const unsigned* in, unsigned* out, int global_shift,
                                   int shared_shift) {
    DYNAMIC_SHARED(memory);
    unsigned char* mine = memory + 16 * threadIdx.x + shared_shift;
    uint4 v = ld_global_v4(in + 4 * threadIdx.x + global_shift);
    st_shared_v4(mine, make_uint4(2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w));
    st_global_v4(out + 4 * threadIdx.x, ld_shared_v4(mine));
}""",
    # What one thread sees in shared memory after each step, 12 words a step.
    "cp_async": """
extern "C" __global__ void cp_async(const unsigned* in, unsigned* out, unsigned n_bytes) {
    DYNAMIC_SHARED(memory);
    if (threadIdx.x != 0) return;
    const auto look = [&](unsigned step) {
        for (unsigned i = 0; i < 12; ++i)
            out[12 * step + i] = reinterpret_cast<unsigned*>(memory)[i];
    };
    for (unsigned i = 0; i < 3; ++i) st_shared_v4(memory + 16 * i, make_uint4(1, 1, 1, 1));
    cp_async_16(memory, in); cp_async_commit();
    cp_async_16_zfill(memory + 16, in + 4, n_bytes); cp_async_commit();
    cp_async_16(memory + 32, in + 8);
    look(0);
    cp_async_wait<1>(); look(1);
    cp_async_wait<0>(); look(2);
    cp_async_commit(); cp_async_wait<0>(); look(3);
}""",
    # `wrong` is what the kernel does wrong: 0 nothing, 1 reuses the source before it is read,
    # 2 copies without a fence, 3 ends before the source is read, 4 forgets to commit, 5 copies
    # no multiple of 16 bytes, 6 copies from outside shared memory.
    "bulk": """
extern "C" __global__ void bulk(unsigned* to, unsigned* out, int wrong) {
    DYNAMIC_SHARED(memory);
    if (threadIdx.x != 0) return;
    const auto fill = [&](unsigned v) { st_shared_v4(memory, make_uint4(v, v, v, v)); };
    fill(1);
    if (wrong != 2) fence_proxy_async();
    bulk_store(to, wrong == 6 ? memory + 1024 : memory, wrong == 5 ? 8 : 16);
    if (wrong != 4) bulk_commit();
    if (wrong == 3) return;
    if (wrong == 1) fill(2);
    out[0] = to[0];
    bulk_wait_read<0>();
    fill(3);
    out[1] = to[0];
    bulk_wait<0>();
    out[2] = to[0];
}""",
    "groups": """
extern "C" __global__ void groups(unsigned* to, unsigned* out) {
    DYNAMIC_SHARED(memory);
    if (threadIdx.x != 0) return;
    for (unsigned i = 0; i < 3; ++i) st_shared_v4(memory + 16 * i, make_uint4(i, i, i, i));
    fence_proxy_async();
    for (unsigned i = 0; i < 3; ++i) { bulk_store(to + 4 * i, memory + 16 * i, 16); bulk_commit(); }
    bulk_wait_read<1>();
    for (unsigned i = 0; i < 3; ++i) st_shared_v4(memory + 16 * i, make_uint4(9, 9, 9, 9));
    bulk_wait<2>();
    for (unsigned i = 0; i < 3; ++i) out[i] = to[4 * i];
    for (unsigned i = 0; i < 3; ++i) st_shared_v4(memory + 16 * i, make_uint4(8, 8, 8, 8));
    bulk_wait_read<0>();
}""",
    "ldmatrix": """
extern "C" __global__ void ldmatrix(const unsigned* in, unsigned* out, int transposed) {
    DYNAMIC_SHARED(memory);
    st_shared_v4(memory + 16 * threadIdx.x, ld_global_v4(in + 4 * threadIdx.x));
    __syncwarp();
    unsigned r[4];
    if (transposed) ldmatrix_x4_trans(r, memory + 16 * threadIdx.x);
    else ldmatrix_x4(r, memory + 16 * threadIdx.x);
    for (unsigned i = 0; i < 4; ++i) out[4 * threadIdx.x + i] = r[i];
}""",
    "mma": """
extern "C" __global__ void mma(const unsigned* a, const unsigned* b, float* d) {
    unsigned ra[4], rb[2];
    float rd[4];
    for (int i = 0; i < 4; ++i) ra[i] = a[4 * threadIdx.x + i];
    for (int i = 0; i < 2; ++i) rb[i] = b[2 * threadIdx.x + i];
    for (int i = 0; i < 4; ++i) rd[i] = d[4 * threadIdx.x + i];
    mma_bf16_16816(rd, ra, rb);
    for (int i = 0; i < 4; ++i) d[4 * threadIdx.x + i] = rd[i];
}""",
    "convert": """
extern "C" __global__ void convert(const float* x, unsigned* out) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = cvt_rn_bf16x2(x[2 * i + 1], x[2 * i]);
}""",
    "lanes": """
extern "C" __global__ void lanes(const long long* x, long long* out, unsigned* votes) {
    const unsigned i = threadIdx.x;
    out[i] = __shfl_sync(~0u, x[i], 5);
    out[blockDim.x + i] = __shfl_xor_sync(~0u, x[i], 3);
    out[2 * blockDim.x + i] = __shfl_down_sync(~0u, x[i], 7);
    out[3 * blockDim.x + i] = __shfl_up_sync(~0u, x[i], 7);
    votes[i] = __ballot_sync(~0u, x[i] % 2 == 0);
    votes[blockDim.x + i] = __any_sync(~0u, x[i] == 3) + 2 * __all_sync(~0u, x[i] < 40);
}""",
    # Warps 1 and 2 meet at barrier `id`, warp 0 does not; then what goes on is written down.
    "named": """
extern "C" __global__ void named(unsigned* order, unsigned id, unsigned n_threads,
                                 unsigned n_other) {
    if (threadIdx.x / 32 == 0) return;
    if (threadIdx.x / 32 == 2)
        for (int i = 0; i < 10; ++i) __nanosleep(20);
    atomicAdd(order, 1u);
    barrier_sync(id, threadIdx.x / 32 == 2 ? n_other : n_threads);
    order[threadIdx.x] = ld_relaxed_gpu(order);
}""",
    "clocks": """
extern "C" __global__ void clocks(long long* t, unsigned* sm) {
    const unsigned i = 3 * (blockIdx.x * blockDim.x + threadIdx.x);
    t[i] = clock_cycles(); t[i + 1] = global_ns(); t[i + 2] = clock_cycles();
    sm[blockIdx.x] = smid();
}""",
    "waits": """
extern "C" __global__ void waits(const unsigned* counter, unsigned wanted, const unsigned* abort,
                                 unsigned* report, unsigned* came) {
    if (threadIdx.x == 1)
        came[0] = wait_at_least<ld_acquire_sys>(counter, wanted, {abort, 10000, report}, 1, 42);
}""",
}


def build(name: str) -> HostKernel:
    return compile_kernel(f'#include "ptx.cuh"\n{SOURCES[name]}')


@pytest.fixture(scope="module")
def kernels() -> dict[str, HostKernel]:
    with ThreadPoolExecutor(2) as pool:  # two compilers at a time
        return dict(zip(SOURCES, pool.map(build, SOURCES), strict=True))


def words(*shape: int) -> NDArray[np.uint32]:
    return np.zeros(shape, np.uint32)


def unpack(registers: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """The 16-bit values of registers, the lower half first, in a last axis of their own."""
    return np.stack([registers & 0xFFFF, registers >> 16], -1).astype(np.uint16)


def to_float(bf16: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bf16.astype(np.uint32) << 16).view(np.float32)


def random_bf16(rng: np.random.Generator, *shape: int) -> NDArray[np.uint16]:
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


# ---- Flags and counters


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_counts_are_exact(kernels: dict[str, HostKernel], seed: int) -> None:
    """Every reduction and atomic function counts every thread of every CTA and GPU once."""
    n_gpus, n_ctas, n_threads = 2, 3, 64
    c, seen = words(10 + n_ctas), words(n_ctas, 3)
    c[8] = POISON
    kernels["count"].launch(n_ctas, n_threads, [(c, seen)] * n_gpus, shared_bytes=8, seed=seed)
    everybody = n_gpus * n_ctas * n_threads
    assert c[:4].tolist() == [everybody] * 4
    assert c[4:10].tolist() == [7, 1, 2 * everybody, n_threads - 1, 0, 5]
    assert c[10:].tolist() == [2 * n_threads] * n_ctas
    assert seen.tolist() == [[7, 5, 12]] * n_ctas


# CTA 0 hands data to CTA 1, whose warp 0 hands it on to warp 1; `how` says by which flags. Each
# way reads on a line of its own, by which ThreadSanitizer's reports are told apart.
HANDSHAKE = """
#include "ptx.cuh"
template <class Ready> __device__ void wait_for(Ready ready) { while (!ready()) __nanosleep(20); }
extern "C" __global__ void handshake(unsigned* data, unsigned* flag, int how) {
    DYNAMIC_SHARED(memory);
    unsigned* passed = reinterpret_cast<unsigned*>(memory);
    const unsigned i = threadIdx.x, lane = i % 32;
    if (i == 0) *passed = 0;
    __syncthreads();
    if (blockIdx.x == 0) {
        data[i] = i;
        __syncwarp();
        if (lane == 0 && how == 0) red_release_gpu(flag, 1);
        if (lane == 0 && how == 1) red_release_sys(flag, 1);
        if (lane == 0 && how == 2) { fence_acq_rel_sys(); red_relaxed_sys(flag, 1); }
        if (lane == 0 && how == 3) red_relaxed_gpu(flag, 1);
        if (lane == 0 && how == 4) red_release_gpu(flag, 1);
        return;
    }
    if (lane == 0 && how == 0) wait_for([&] { return ld_acquire_gpu(flag) == 2; });
    if (lane == 0 && (how == 1 || how == 2)) wait_for([&] { return ld_acquire_sys(flag) == 2; });
    if (lane == 0 && how == 3) wait_for([&] { return ld_acquire_gpu(flag) == 2; });
    if (lane == 0 && how == 4) wait_for([&] { return ld_relaxed_gpu(flag) == 2; });
    __syncwarp();
    if (how == 0) data[64 + i] = data[i];
    if (how == 1) data[64 + i] = data[i];
    if (how == 2) data[64 + i] = data[i];
    if (how == 3) data[64 + i] = data[i];
    if (how == 4) data[64 + i] = data[i];
    __syncwarp();
    if (i == 0) red_release_cta(passed, 1);
    if (i == 32) wait_for([&] { return ld_acquire_cta(passed) != 0; });
    __syncwarp();
    if (i >= 32) data[96 + i] = data[32 + i];
}
"""
RUN = """
import numpy as np
from xstage_lab.kernels.host import compile_kernel
kernel = compile_kernel({text!r})
for how in {ways!r}:
    data, flag = np.zeros(160, np.uint32), np.zeros(1, np.uint32)
    kernel.launch(2, 64, [(data, flag, how)], shared_bytes=16)
    assert (data[64:128] == np.arange(64)).all()
"""


def line_of(how: int) -> str:
    lines = HANDSHAKE.splitlines()
    read = f"if (how == {how}) data"
    return f"handshake.cu:{next(i for i, x in enumerate(lines, 1) if read in x)}"


def test_release_and_acquire_order_memory(race_checker: None) -> None:
    """Data published by a release, or by a fence and a relaxed store, reaches who acquires."""
    assert check_races(RUN.format(ways=[0, 1, 2], text=HANDSHAKE)) == []


def test_relaxed_orders_nothing(race_checker: None) -> None:
    """A flag that is relaxed on either side publishes nothing, and the race is found."""
    races = "\n".join(check_races(RUN.format(ways=[3, 4], text=HANDSHAKE)))
    assert [how for how in range(5) if line_of(how) in races] == [3, 4]


# ---- Vectors


def test_vectors_are_copied(kernels: dict[str, HostKernel]) -> None:
    """16-byte loads and stores move all four words, in order."""
    given, out = np.arange(4 * WARP, dtype=np.uint32), words(4 * WARP)
    kernels["vectors"].launch(1, WARP, [(given, out, 0, 0)], shared_bytes=16 * WARP)
    assert (out == 2 * given).all()


@pytest.mark.parametrize(("global_shift", "shared_shift", "told"), [
    (1, 0, "no multiple of 16"), (0, 4, "no multiple of 16"), (0, 16, "outside the CTA's 512"),
])
def test_bad_addresses_are_told(
    kernels: dict[str, HostKernel], global_shift: int, shared_shift: int, told: str
) -> None:
    """A misaligned 16-byte access and one outside shared memory fail, with thread and reason."""
    given, out = words(8 * WARP), words(4 * WARP)
    with pytest.raises(KernelFailed, match=rf"GPU 0, CTA 0, thread \d+.*{told}"):
        kernels["vectors"].launch(1, WARP, [(given, out, global_shift, shared_shift)],
                                  shared_bytes=16 * WARP)


# ---- Asynchronous copies


@pytest.mark.parametrize("n_bytes", [0, 1, 6, 16])
def test_cp_async_arrives_when_waited_for(kernels: dict[str, HostKernel], n_bytes: int) -> None:
    """cp.async data is there once its group is waited for, not sooner, and never uncommitted."""
    given, out = np.arange(100, 112, dtype=np.uint32), words(4, 3, 4)
    kernels["cp_async"].launch(1, WARP, [(given, out, n_bytes)], shared_bytes=48)
    copies = given.reshape(3, 4).copy()
    copies[1] = np.frombuffer(copies[1].tobytes()[:n_bytes].ljust(16, b"\0"), np.uint32)
    arrived = [[], [0], [0, 1], [0, 1, 2]]
    for step, here in enumerate(arrived):
        for copy in range(3):
            expected = copies[copy] if copy in here else np.full(4, POISON)
            assert (out[step, copy] == expected).all(), (step, copy)


def bulk(kernel: HostKernel, wrong: int) -> tuple[list[int], int]:
    """What a bulk copy's thread saw at its destination, and what was there in the end."""
    to, out = np.full(4, 77, np.uint32), words(3)
    kernel.launch(1, WARP, [(to, out, wrong)], shared_bytes=1024)
    assert (to == to[0]).all()
    return out.tolist(), int(to[0])


def test_bulk_copy_is_read_then_written(kernels: dict[str, HostKernel]) -> None:
    """Its source may be reused after wait_group.read; its data has arrived after wait_group."""
    assert bulk(kernels["bulk"], wrong=0) == ([77, 77, 1], 1)


def test_bulk_source_reused_too_early_shows(kernels: dict[str, HostKernel]) -> None:
    """A source that is overwritten before wait_group.read arrives overwritten."""
    assert bulk(kernels["bulk"], wrong=1)[1] == 2


@pytest.mark.parametrize(("wrong", "told"), [
    (2, "fence.proxy.async"), (3, "before its bulk copies have read"),
    (4, "before its bulk copies have read"), (5, "8 bytes, no multiple of 16"),
    (6, "outside the CTA's 1024 bytes"),
])
def test_bulk_copy_misused_is_told(
    kernels: dict[str, HostKernel], wrong: int, told: str
) -> None:
    """Bulk copies without fence, wait or commit, of a bad size or from elsewhere, fail."""
    with pytest.raises(KernelFailed, match=told):
        bulk(kernels["bulk"], wrong)


def test_bulk_groups_are_waited_for_in_order(kernels: dict[str, HostKernel]) -> None:
    """wait_group N leaves the latest N groups, those read by wait_group.read keep what was read."""
    to, out = np.full((3, 4), 77, np.uint32), words(3)
    kernels["groups"].launch(1, WARP, [(to, out)], shared_bytes=48)
    assert out.tolist() == [0, 77, 77]
    assert to[:, 0].tolist() == [0, 1, 8]


# ---- Warps


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_hands_out_fragments(kernels: dict[str, HostKernel], transposed: bool) -> None:
    """Lane i gets of each 8x8 matrix row i / 4, columns 2 (i % 4) and the next, or transposed."""
    rng = np.random.default_rng(3)
    matrices = rng.integers(0, 2**16, (4, 8, 8), np.uint16)
    out = words(WARP, 4)
    kernels["ldmatrix"].launch(1, WARP, [(matrices.view(np.uint32), out, int(transposed))],
                               shared_bytes=512)
    expected = matrices.transpose(0, 2, 1) if transposed else matrices
    # (matrix, row, pair of columns, half) -> (lane = 4 row + pair, matrix, half)
    expected = expected.reshape(4, 8, 4, 2).transpose(1, 2, 0, 3).reshape(WARP, 4, 2)
    assert (unpack(out) == expected).all()


def fragments(n_registers: int, place: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Row and column of each value of each lane, by the manual's formula for value i."""
    group, in_group = np.divmod(np.arange(WARP)[:, None], 4)
    return np.broadcast_arrays(*place(group, in_group, np.arange(n_registers)[None, :]))


def place_a(group: Any, in_group: Any, i: Any) -> Any:
    return group + np.where(i // 2 % 2 == 0, 0, 8), in_group * 2 + i % 2 + np.where(i < 4, 0, 8)


def place_b(group: Any, in_group: Any, i: Any) -> Any:
    return in_group * 2 + i % 2 + np.where(i < 2, 0, 8), group


def place_d(group: Any, in_group: Any, i: Any) -> Any:
    return group + np.where(i < 2, 0, 8), in_group * 2 + i % 2


@pytest.mark.parametrize("seed", range(5))
def test_mma_multiplies(kernels: dict[str, HostKernel], seed: int) -> None:
    """mma.m16n8k16 adds the product of two bf16 matrices to fp32, as NumPy does in float64."""
    rng = np.random.default_rng(seed)
    a, b = random_bf16(rng, 16, 16), random_bf16(rng, 16, 8)
    c = rng.standard_normal((16, 8), np.float32)
    at_a, at_b, at_d = fragments(8, place_a), fragments(4, place_b), fragments(4, place_d)
    d = np.ascontiguousarray(c[at_d])
    registers = [np.ascontiguousarray(m[at]).view(np.uint32) for m, at in ((a, at_a), (b, at_b))]
    kernels["mma"].launch(1, WARP, [(*registers, d)])
    result = np.full((16, 8), np.nan)
    result[at_d] = d
    expected = to_float(a).astype(np.float64) @ to_float(b) + c
    assert np.abs(result - expected).max() < 1e-5


def test_bf16_is_the_nearest(kernels: dict[str, HostKernel]) -> None:
    """Conversion gives the nearest bf16, of two equally near ones the even, and keeps NaN."""
    rng = np.random.default_rng(5)
    x = rng.integers(0, 2**32, 2 * 4096, np.uint32).view(np.float32)
    x[:6] = [1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), np.inf, np.nan, 3.4e38]
    x[6::97] = (x[6::97].view(np.uint32) & 0xFFFF0000 | 0x8000).view(np.float32)  # ties
    out = words(4096)
    kernels["convert"].launch(64, 64, [(x, out)])
    got = unpack(out).ravel()
    assert to_float(got[:4]).tolist() == [1.0, 1 + 2**-6, -1.0, np.inf]
    assert to_float(got[5:6])[0] == np.inf
    assert (np.isnan(to_float(got)) == np.isnan(x)).all()
    usual = np.isfinite(to_float(got)) & np.isfinite(x) & (np.abs(x) > 1e-30)
    x, got = x[usual].astype(np.float64), got[usual]
    error = np.abs(to_float(got).astype(np.float64) - x)
    for neighbour in (got - 1, got + 1):
        other = np.abs(to_float(neighbour).astype(np.float64) - x)
        assert ((error < other) | (error == other) & (got % 2 == 0) | np.isnan(other)).all()


def test_lanes_exchange_values(kernels: dict[str, HostKernel]) -> None:
    """Shuffles and votes give what the manual says, lanes out of range keep their own value."""
    x = np.random.default_rng(7).permutation(2 * WARP).astype(np.int64) * 2**33 + 1
    x[WARP:] = np.arange(WARP)
    out, votes = np.zeros((4, 2, WARP), np.int64), words(2, 2, WARP)
    kernels["lanes"].launch(1, 2 * WARP, [(x, out, votes)])
    x = x.reshape(2, WARP)
    lane = np.arange(WARP)
    assert (out[0] == x[:, [5]]).all()
    assert (out[1] == x[:, lane ^ 3]).all()
    assert (out[2] == x[:, np.where(lane + 7 < WARP, lane + 7, lane)]).all()
    assert (out[3] == x[:, np.where(lane >= 7, lane - 7, lane)]).all()
    even = ((x % 2 == 0) << lane).sum(1)
    assert (votes[0] == even[:, None]).all()
    assert (votes[1] == np.array([[0], [1 + 2]])).all()


# ---- Barriers, clocks, waits


@pytest.mark.parametrize("seed", [0, 4])
def test_named_barrier_holds_who_takes_part(kernels: dict[str, HostKernel], seed: int) -> None:
    """Nobody passes a named barrier before all who take part have come; others do not matter."""
    order = words(3 * WARP)
    kernels["named"].launch(1, 3 * WARP, [(order, 3, 2 * WARP, 2 * WARP)], seed=seed)
    assert (order[WARP:] == 2 * WARP).all()


@pytest.mark.parametrize(("arguments", "told"), [
    ((0, 64, 64), "there are 1 to 15"), ((3, 48, 48), "multiples of 32"),
    ((3, 128, 128), "up to the CTA's 96"), ((3, 64, 96), "others wait for"),
])
def test_named_barrier_misused_is_told(
    kernels: dict[str, HostKernel], arguments: tuple[int, ...], told: str
) -> None:
    """A barrier out of range, of a part of a warp, or of two sizes at a time, fails."""
    with pytest.raises(KernelFailed, match=told):
        kernels["named"].launch(1, 3 * WARP, [(words(3 * WARP), *arguments)])


def test_clocks_never_go_back(kernels: dict[str, HostKernel]) -> None:
    """Later reads of a clock are larger, and every CTA has an SM of its own."""
    t, sm = np.zeros((2 * 64, 3), np.int64), words(2)
    kernels["clocks"].launch(2, 64, [(t, sm)])
    assert (np.diff(t) > 0).all()
    assert sm.tolist() == [0, 1]


def wait(kernel: HostKernel, counter: int, wanted: int, abort: int = 0) -> tuple[bool, str]:
    report, came = words(8), words(1)
    kernel.launch(1, WARP, [(np.array([counter], np.uint32), wanted,
                             np.array([abort], np.uint32), report, came)])
    return bool(came[0]), describe_report(report, ["a slot", "a tile"])


@pytest.mark.parametrize(("counter", "wanted", "comes"), [
    (5, 5, True), (6, 5, True), (4, 5, False), (2, 2**32 - 3, True), (2**32 - 3, 2, False),
])
def test_wait_compares_counters_that_wrap(
    kernels: dict[str, HostKernel], counter: int, wanted: int, comes: bool
) -> None:
    """A wait ends well once the counter is at or past what is wanted, also over 2**32."""
    came, told = wait(kernels["waits"], counter, wanted)
    assert came == comes
    assert (told == "") == comes


def test_wait_in_vain_is_reported(kernels: dict[str, HostKernel]) -> None:
    """A wait whose budget is spent, or that is aborted, says who waited for what and saw what."""
    _, spent = wait(kernels["waits"], 4, 9)
    assert spent == ("CTA 0, thread 1, step 42 waited for a tile: it saw 4 and needs 9; "
                     "its cycle budget was spent.")
    assert "the abort flag was raised" in wait(kernels["waits"], 4, 9, abort=1)[1]
