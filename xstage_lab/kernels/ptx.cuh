// One wrapper per PTX instruction, named for its memory order and scope.
//
// Each wrapper has two bodies: GPU(...) is inline PTX, HOST(...) runs where g++ builds the same
// kernel for CPU threads (host/shim.hpp, included before this file, defines XSTAGE_HOST). A CPU
// body shows what the instruction promises and no more: asynchronous copies arrive when they are
// waited for and not before, and only an acquire that reads from a release orders memory.
//
// Nothing is included: a kernel and this header are all that NVRTC needs. bf16 values travel as
// raw 16-bit words. Every asm that touches memory or a clock is volatile and clobbers memory, so
// that the compiler keeps them in the order in which they are written.
#pragma once

#ifdef XSTAGE_HOST
#define GPU(...)
#define HOST(...) __VA_ARGS__
#define DYNAMIC_SHARED(name) unsigned char* const name = host::shared_memory()
#else
#define GPU(...) __VA_ARGS__
#define HOST(...)
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#endif

#define WRAPPER __device__ __forceinline__

// ---- Flags and counters -----------------------------------------------------------------------
// A release makes the writes before it visible to the acquire that reads its value. cta: generic
// addresses, shared memory too; gpu, sys: global memory, sys also of peers and the mapped host.

WRAPPER unsigned ld_acquire_cta(const unsigned* p) {
    unsigned value;
    GPU(asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");)
    HOST(value = host::load(p, std::memory_order_acquire);)
    return value;
}

WRAPPER unsigned ld_acquire_gpu(const unsigned* p) {
    unsigned value;
    GPU(asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");)
    HOST(value = host::load(p, std::memory_order_acquire);)
    return value;
}

WRAPPER unsigned ld_acquire_sys(const unsigned* p) {
    unsigned value;
    GPU(asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");)
    HOST(value = host::load(p, std::memory_order_acquire);)
    return value;
}

WRAPPER unsigned ld_relaxed_gpu(const unsigned* p) {
    unsigned value;
    GPU(asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");)
    HOST(value = host::load(p, std::memory_order_relaxed);)
    return value;
}

WRAPPER unsigned ld_relaxed_sys(const unsigned* p) {
    unsigned value;
    GPU(asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");)
    HOST(value = host::load(p, std::memory_order_relaxed);)
    return value;
}

WRAPPER void st_release_sys(unsigned* p, unsigned value) {
    GPU(asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");)
    HOST(host::store_release(p, value);)
}

WRAPPER void red_release_cta(unsigned* p, unsigned n) {
    GPU(asm volatile("red.release.cta.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory");)
    HOST(host::add(p, n, std::memory_order_release);)
}

WRAPPER void red_release_gpu(unsigned* p, unsigned n) {
    GPU(asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory");)
    HOST(host::add(p, n, std::memory_order_release);)
}

WRAPPER void red_release_sys(unsigned* p, unsigned n) {
    GPU(asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory");)
    HOST(host::add(p, n, std::memory_order_release);)
}

WRAPPER void red_relaxed_cta(unsigned* p, unsigned n) {
    GPU(asm volatile("red.relaxed.cta.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory");)
    HOST(host::add(p, n, host::relaxed());)
}

WRAPPER void red_relaxed_gpu(unsigned* p, unsigned n) {
    GPU(asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory");)
    HOST(host::add(p, n, host::relaxed());)
}

WRAPPER void red_relaxed_sys(unsigned* p, unsigned n) {
    GPU(asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory");)
    HOST(host::add(p, n, host::relaxed());)
}

// Returns what was there before: `expected` if the exchange took place.
WRAPPER unsigned cas_relaxed_gpu(unsigned* p, unsigned expected, unsigned desired) {
    unsigned before;
    GPU(asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
                     : "=r"(before) : "l"(p), "r"(expected), "r"(desired) : "memory");)
    HOST(before = host::compare_exchange(p, expected, desired);)
    return before;
}

// Orders all memory accesses before it with those after it, for all GPUs and the host. Waits for
// outstanding stores to complete: never inside an issue span.
WRAPPER void fence_acq_rel_sys() {
    GPU(asm volatile("fence.acq_rel.sys;" ::: "memory");)
    HOST(host::fence();)
}

// ---- 16-byte loads and stores -----------------------------------------------------------------
// Weak accesses; both addresses must be multiples of 16.

WRAPPER void st_global_v4(void* p, uint4 v) {
    GPU(asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                     ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");)
    HOST(*static_cast<uint4*>(host::aligned(p)) = v;)
}

WRAPPER uint4 ld_global_v4(const void* p) {
    uint4 v;
    GPU(asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");)
    HOST(v = *static_cast<const uint4*>(host::aligned(p));)
    return v;
}

#ifndef XSTAGE_HOST
WRAPPER unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
#endif

WRAPPER void st_shared_v4(void* p, uint4 v) {
    GPU(asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                     ::"r"(shared_address(p)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");)
    HOST(*static_cast<uint4*>(host::aligned(host::shared(p, sizeof v))) = v;)
}

WRAPPER uint4 ld_shared_v4(const void* p) {
    uint4 v;
    GPU(asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(shared_address(p)) : "memory");)
    HOST(v = *static_cast<const uint4*>(host::aligned(host::shared(p, sizeof v)));)
    return v;
}

// ---- Clocks and places ------------------------------------------------------------------------

// Cycles of this SM's clock; differences mean something within one SM only. On the host: a count
// that never decreases and has no unit.
WRAPPER long long clock_cycles() {
    long long cycles;
    GPU(asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles) :: "memory");)
    HOST(cycles = host::tick();)
    return cycles;
}

// Nanoseconds of the GPU's global timer, the same for all SMs; its steps are up to 1 us.
WRAPPER long long global_ns() {
    long long ns;
    GPU(asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns) :: "memory");)
    HOST(ns = host::tick();)
    return ns;
}

// Waits for the global timer's next step, so that ns and cycles read right after it belong together
// much closer than the timer's step: what aligns the clocks of SMs, and tells their rate.
WRAPPER void next_timer_step() {
    const long long ns = global_ns();
    while (global_ns() == ns) {}  // for time to pass, not for anybody
}

// The SM this CTA runs on. On the host: the CTA's index.
WRAPPER unsigned smid() {
    unsigned sm;
    GPU(asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));)
    HOST(sm = blockIdx.x;)
    return sm;
}

// threadIdx.x, read anew at every call: values made from it need not be kept in registers.
WRAPPER unsigned tid() {
    unsigned thread;
    GPU(asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));)
    HOST(thread = threadIdx.x;)
    return thread;
}

// Waits until `n_threads` threads of the CTA (a multiple of 32) are at barrier `id`, 1 to 15.
// Orders their memory accesses. Barrier 0 is __syncthreads.
WRAPPER void barrier_sync(unsigned id, unsigned n_threads) {
    GPU(asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(n_threads) : "memory");)
    HOST(host::named_barrier(id, n_threads);)
}

// ---- Asynchronous copies into shared memory (sm_80) -------------------------------------------
// A thread's copies form groups. cp_async_wait<N> returns when all but the thread's N latest
// groups have arrived, for this thread; others see them after a barrier.

WRAPPER void cp_async_16(void* smem, const void* gmem) {
    GPU(asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     ::"r"(shared_address(smem)), "l"(gmem) : "memory");)
    HOST(host::cp_async(smem, gmem, 16);)
}

// Copies the first `n_bytes` (0 to 16) and fills the rest with zeros.
WRAPPER void cp_async_16_zfill(void* smem, const void* gmem, unsigned n_bytes) {
    GPU(asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     ::"r"(shared_address(smem)), "l"(gmem), "r"(n_bytes) : "memory");)
    HOST(host::cp_async(smem, gmem, n_bytes);)
}

WRAPPER void cp_async_commit() {
    GPU(asm volatile("cp.async.commit_group;" ::: "memory");)
    HOST(host::cp_async_commit();)
}

template <int N>
WRAPPER void cp_async_wait() {
    GPU(asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");)
    HOST(host::cp_async_wait(N);)
}

// ---- Bulk copies from shared memory (sm_90) ---------------------------------------------------
// The async proxy reads the source. bulk_wait_read<N>: all but the thread's N latest groups have
// been read, and their source may be reused; the data may still be on its way. bulk_wait<N>: they
// have been written. Addresses and size are multiples of 16.

#if defined(XSTAGE_HOST) || __CUDA_ARCH__ >= 900
WRAPPER void bulk_store(void* gmem, const void* smem, unsigned n_bytes) {
    GPU(asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     ::"l"(gmem), "r"(shared_address(smem)), "r"(n_bytes) : "memory");)
    HOST(host::bulk_store(gmem, smem, n_bytes);)
}

WRAPPER void bulk_commit() {
    GPU(asm volatile("cp.async.bulk.commit_group;" ::: "memory");)
    HOST(host::bulk_commit();)
}

template <int N>
WRAPPER void bulk_wait_read() {
    GPU(asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");)
    HOST(host::bulk_wait_read(N);)
}

template <int N>
WRAPPER void bulk_wait() {
    GPU(asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");)
    HOST(host::bulk_wait(N);)
}

// Makes this thread's ordinary writes to shared memory visible to bulk copies issued after it.
WRAPPER void fence_proxy_async() {
    GPU(asm volatile("fence.proxy.async.shared::cta;" ::: "memory");)
    HOST(host::fence_proxy_async();)
}
#endif

// ---- Tensor Core ------------------------------------------------------------------------------
// All 32 lanes of a warp execute these together.

// Four 8x8 matrices of 16-bit values. Lane i gives the address of row i % 8 of matrix i / 8, a
// multiple of 16, and receives in r[j] the values at row i / 4, columns 2 * (i % 4) and the next,
// of matrix j, the lower column in the lower half.
WRAPPER void ldmatrix_x4(unsigned (&r)[4], const void* row) {
    GPU(asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(row)) : "memory");)
    HOST(host::ldmatrix_x4(r, row, false);)
}

// The same of the transposed matrices: rows 2 * (i % 4) and the next, column i / 4.
WRAPPER void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
    GPU(asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(row)) : "memory");)
    HOST(host::ldmatrix_x4(r, row, true);)
}

// d += a * b: a is 16x16 row by row, b 16x8 column by column, bf16; d 16x8, fp32. With g = lane
// / 4 and t = 2 * (lane % 4), lower column or row in the lower half:
//   a[0], a[1]: row g, row g + 8, columns t, t + 1;  a[2], a[3]: the same, columns t + 8, t + 9
//   b[0]: rows t, t + 1, column g;                   b[1]: rows t + 8, t + 9, column g
//   d[0], d[1]: row g, columns t, t + 1;             d[2], d[3]: row g + 8, columns t, t + 1
WRAPPER void mma_bf16_16816(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    GPU(asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                     "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));)
    HOST(host::mma_bf16_16816(d, a, b);)
}

// Two fp32 values rounded to nearest even bf16, `low` in the lower half.
WRAPPER unsigned cvt_rn_bf16x2(float high, float low) {
    unsigned packed;
    GPU(asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));)
    HOST(packed = host::to_bf16(high) << 16 | host::to_bf16(low);)
    return packed;
}

// ---- Registers (sm_90a, sm_100a; elsewhere nothing happens) ------------------------------------
// The 128 threads of warps 4 i to 4 i + 3 execute these together: from now on each has N registers,
// a multiple of 8. `inc` waits until others have given up as many.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL)
#define SETMAXNREG(how) asm volatile("setmaxnreg." how ".sync.aligned.u32 %0;" ::"n"(N))
#else
#define SETMAXNREG(how)
#endif

template <int N>
WRAPPER void setmaxnreg_inc() {
    SETMAXNREG("inc");
}

template <int N>
WRAPPER void setmaxnreg_dec() {
    SETMAXNREG("dec");
}

// ---- Waiting ----------------------------------------------------------------------------------

// Every wait in a kernel goes through wait_at_least, is bounded and says who waited for what.
struct WaitLimit {
    const unsigned* abort;      // mapped host memory: the host writes non-zero to end the kernel
    long long budget_cycles;    // the longest wait allowed
    unsigned* report;           // 8 words of this GPU's memory, zeros at launch; the first thread
                                // that gives up writes: reason (1 budget, 2 abort), what, CTA,
                                // thread, step, value seen, value wanted
};

// Why a wait must end, or 0.
WRAPPER unsigned gives_up(const WaitLimit& limit, long long start) {
    if (ld_relaxed_gpu(limit.report) != 0) return 3;  // somebody else has given up
    if (ld_relaxed_sys(limit.abort) != 0) return 2;
    return clock_cycles() - start < limit.budget_cycles ? 0 : 1;
}

// Waits until *counter, read by `Load` (its scope and order are the wait's), has reached `wanted`;
// counters may wrap. `what` and `step` name the wait in the report. Returns whether it came so
// far: on false the kernel must end without further waits.
template <unsigned (*Load)(const unsigned*)>
WRAPPER bool wait_at_least(const unsigned* counter, unsigned wanted, const WaitLimit& limit,
                           unsigned what, unsigned step) {
    const long long start = clock_cycles();
    for (unsigned n_polls = 1;; ++n_polls) {
        // Rarely: the abort flag is a slow read over PCIe.
        const unsigned reason = n_polls % 64 == 0 ? gives_up(limit, start) : 0;
        const unsigned seen = Load(counter);
        if (static_cast<int>(seen - wanted) >= 0) return true;
        if (reason != 0) {
            if (cas_relaxed_gpu(limit.report, 0, reason) == 0) {
                limit.report[1] = what;
                limit.report[2] = blockIdx.x;
                limit.report[3] = threadIdx.x;
                limit.report[4] = step;
                limit.report[5] = seen;
                limit.report[6] = wanted;
            }
            return false;
        }
        __nanosleep(20);
    }
}
