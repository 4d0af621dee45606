// Burst trains: every CTA stores a burst, waits for a gap, stores the next, and notes when.
//
// Launch: n_ctas CTAs of N_THREADS threads, all of them resident at the same time (a cooperative
// launch checks it): they start together, those of all GPUs, and with lockstep wait for each other.
//
// Parameters of the compilation
//   N_THREADS  threads of a CTA, a multiple of 32
//   BULK       0: bursts are 16-byte register stores of all threads
//              1: a burst is one bulk copy from shared memory (sm_90)
//
// Dynamic shared memory: SHARED_BYTES, with BULK burst_bytes more.
//
// Arguments
//   destinations [n_destinations]       CTA c stores to destinations[c % n_destinations]: memory of
//                                       a peer, mapped host memory, or local memory (the control);
//                                       each (n_ctas, n_slots, burst_bytes), 16-byte aligned
//   burst_bytes                         a multiple of 16
//   n_bursts, n_slots                   burst j goes to slot j % n_slots. With fewer slots than
//                                       bursts a slot holds its last burst; bulk copies that are
//                                       under way together may also leave an earlier one
//   seed                                of the pattern
//   gap_cycles                          from the end of a burst (lockstep: of all CTAs' bursts) to
//                                       the start of the next. What the kernel does in between
//                                       takes some hundred cycles, with BULK also the filling of
//                                       the source: shorter gaps come out as long as that
//   lockstep                            0: CTAs run free; 1: all CTAs of this GPU end a burst
//                                       before any starts the gap to the next
//   spans int64 [n_ctas][n_bursts][2]   start and end of each burst, cycles of the CTA's SM
//   anchors int64 [n_ctas][5]           ns and cycles before the start and after the end, each at a
//                                       step of the global timer: what aligns SMs and tells the
//                                       clock's rate; and the cycles once all bursts have arrived
//   sms [n_ctas]                        the SM that ran the CTA
//   counter [1]                         zero at launch
//   started [1], n_starters             CTAs that are there, of all GPUs, zero at launch; and how
//                                       many there must be
//   abort, budget_cycles, report        WaitLimit of ptx.cuh; wait 0: all CTAs to start, 1: all
//                                       CTAs of this GPU to end their burst
//
// The pattern: word i (32 bits) of burst j of CTA c is hash(seed, c, j) + i, modulo 2**32.
//
// Order and scope: bursts are weak stores and nothing orders them. The lockstep counter is relaxed,
// gpu scope: a release would wait for the stores to complete, and it is their issue that is timed.
// One sys fence ends the kernel; when it is through, all bursts have arrived.
//
// What the clock brackets. Register stores: from before a warp's first store to after the issue of
// its last; the span of a burst is from the earliest warp's start to the latest warp's end. Bulk:
// from before the copy is issued to when its source may be reused.
#include "ptx.cuh"

#ifndef N_THREADS
#error "N_THREADS: threads of a CTA, a multiple of 32"
#endif
#ifndef BULK
#error "BULK: 0 stores from registers, 1 copies in bulk from shared memory"
#endif
#if BULK && !defined(XSTAGE_HOST) && __CUDA_ARCH__ < 900
#error "BULK=1 needs sm_90 or newer; take BULK=0"
#endif

constexpr unsigned N_WARPS = N_THREADS / 32;
constexpr unsigned N_STORE_WARPS = BULK ? 1 : N_WARPS;
constexpr unsigned SHARED_BYTES = 1024;  // before the source of bulk copies
enum Wait : unsigned { FOR_ALL_CTAS, FOR_BURSTS };
constexpr unsigned ABORT_CHECK_BURSTS = 64;  // free CTAs look at the abort flag this rarely

struct Shared {
    long long start[N_WARPS], end[N_WARPS];  // of the burst, by warp
    long long earliest;                      // the next burst starts no sooner
    bool all_there, goes_on;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "too many warps");

WRAPPER unsigned hash(unsigned seed, unsigned cta, unsigned burst) {
    unsigned x = seed;
    for (const unsigned word : {cta, burst}) {
        x = (x ^ word) * 0x9e3779b1u;
        x ^= x >> 15;
        x *= 0x85ebca77u;
        x ^= x >> 13;
    }
    return x;
}

WRAPPER uint4 pattern(unsigned first, unsigned vector) {
    const unsigned word = first + 4 * vector;
    return make_uint4(word, word + 1, word + 2, word + 3);
}

// Counts this CTA in and waits until all have come; false if the launch is to end.
WRAPPER bool meet_all(unsigned* counter, unsigned burst, const WaitLimit& limit) {
    red_relaxed_gpu(counter, 1);
    return wait_at_least<ld_relaxed_gpu>(counter, (burst + 1) * gridDim.x, limit, FOR_BURSTS,
                                         burst);
}

extern "C" __global__ void __launch_bounds__(N_THREADS, 1)
burst_gap(unsigned char* const* destinations, unsigned n_destinations, unsigned burst_bytes,
          unsigned n_bursts, unsigned n_slots, unsigned seed, long long gap_cycles,
          unsigned lockstep, long long* spans, long long* anchors, unsigned* sms,
          unsigned* counter, unsigned* started, unsigned n_starters, const unsigned* abort,
          long long budget_cycles, unsigned* report) {
    DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const WaitLimit limit = {abort, budget_cycles, report};
    const unsigned thread = threadIdx.x, warp = thread / 32, cta = blockIdx.x;
    const unsigned n_vectors = burst_bytes / 16;
    unsigned char* const region = destinations[cta % n_destinations] +
                                  static_cast<unsigned long long>(cta) * n_slots * burst_bytes;
    long long* const anchor = anchors + 5 * cta;
    if (thread == 0) {
        sms[cta] = smid();
        next_timer_step();
        anchor[0] = global_ns();
        anchor[1] = clock_cycles();
        red_release_sys(started, 1);
        shared.all_there =
            wait_at_least<ld_acquire_sys>(started, n_starters, limit, FOR_ALL_CTAS, 0);
    }
    __syncthreads();
    if (!shared.all_there) return;
    long long last_end = clock_cycles();

    for (unsigned burst = 0; burst < n_bursts; ++burst) {
        const unsigned first = hash(seed, cta, burst);
        unsigned char* const slot = region + static_cast<unsigned long long>(burst % n_slots) *
                                                 burst_bytes;
#if BULK
        unsigned char* const source = memory + SHARED_BYTES;
        for (unsigned i = thread; i < n_vectors; i += N_THREADS)
            st_shared_v4(source + 16 * i, pattern(first, i));
        fence_proxy_async();
#endif
        if (thread == 0) {
            shared.goes_on = true;
            if (lockstep) {
                shared.goes_on = meet_all(counter, burst, limit);
                last_end = clock_cycles();
            } else if (burst % ABORT_CHECK_BURSTS == ABORT_CHECK_BURSTS - 1) {
                shared.goes_on = ld_relaxed_sys(abort) == 0;
            }
            shared.earliest = burst == 0 ? last_end : last_end + gap_cycles;
        }
        __syncthreads();
        if (!shared.goes_on) return;
        const long long earliest = shared.earliest;
        while (clock_cycles() < earliest) {}  // for time to pass, not for anybody

        long long start = clock_cycles(), end = start;
#if BULK
        if (thread == 0) {
            bulk_store(slot, source, burst_bytes);
            bulk_commit();
            bulk_wait_read<0>();
            end = clock_cycles();
        }
#else
        for (unsigned i = thread; i < n_vectors; i += N_THREADS)
            st_global_v4(slot + 16ull * i, pattern(first, i));
        __syncwarp();
        end = clock_cycles();
#endif
        if (thread % 32 == 0) {
            shared.start[warp] = start;
            shared.end[warp] = end;
        }
        __syncthreads();
        if (thread == 0) {
            for (unsigned w = 0; w < N_STORE_WARPS; ++w) {
                start = min(start, shared.start[w]);
                end = max(end, shared.end[w]);
            }
            spans[2 * (static_cast<unsigned long long>(cta) * n_bursts + burst)] = start;
            spans[2 * (static_cast<unsigned long long>(cta) * n_bursts + burst) + 1] = end;
            last_end = end;
        }
    }

#if BULK
    if (thread == 0) bulk_wait<0>();
#endif
    fence_acq_rel_sys();
    __syncthreads();
    if (thread == 0) {
        anchor[4] = clock_cycles();
        next_timer_step();
        anchor[2] = global_ns();
        anchor[3] = clock_cycles();
    }
}
