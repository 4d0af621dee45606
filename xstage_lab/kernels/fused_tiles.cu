// Fused tiles: a persistent kernel that executes a tile program. MMA warps multiply bf16 tiles and
// hand them through staging slots in shared memory to store warps, which write each tile to the
// memory of the GPU that owns it.
//
// Launch: any number of CTAs of N_THREADS threads, all of them resident at the same time. Row i of
// the program runs on CTA i % gridDim.x, and a CTA runs its rows in order.
//
// Parameters of the compilation
//   TILE_M, TILE_N   64, 128 or 256 each, not both 256
//   TILE_K           k of an operand stage, 32 or 64
//   N_STAGES         operand stages, 2 or more
//   ISSUE_DEPTH      tiles the CTA may hold from the start of their MMA to their last store
//   OUT_BYTES        2: output is bf16; 4: fp32
//   BULK             0: 16-byte register stores; 1: bulk copies from the slots (sm_90)
//   SIGNAL           how a stored tile is announced. 0: not at all; 1: release; 2: fence
//   SHARED_BYTES     dynamic shared memory of a CTA, checked in tile_program.cuh
//
// Argument: Params of tile_program.cuh. Counters, flags, `started` and the report are zero at launch.
//
// Matrices: A is (m, k) and B is (n, k), both row by row (B as weights are kept), out is (m, n) row
// by row. Addresses and leading dimensions are multiples of 16 bytes; m, n and k may be anything.
// The last 16 bytes of a row of a tile are written whole, zeros behind column n, so a row of out
// holds n rounded up to 16 bytes.
//
// Slots: depth D has D - 1, taken when a tile's sums are complete. Depth 1 has none: the tile is
// staged where its operands were, and the CTA's next loads wait until its stores are accepted, so
// that compute and issue take turns. A slot is released once its stores have issued (register
// stores) or its bytes have been read (bulk copies), never after a fence.
//
// Order and scope: `full` and `empty` hand a slot over, release and acquire, cta scope. A counter
// is raised by release at gpu scope, and the task that waits for it acquires. Stores are weak; the
// flag of a tile is raised by release at sys scope (SIGNAL 1), or relaxed after a sys fence (2).
// Before either, bulk copies are waited for until they are written.
//
// What the clock brackets: see TileTimes. A tile's issue span is from the earliest issue_start to
// the latest issue_end of its store warps; counter and flag come after it.
#include "tile_mma.cuh"
#include "tile_program.cuh"

// ---- MMA role ---------------------------------------------------------------------------------

// Computes the tile whose first stages are on their way. Fetches the task in row `next`, too.
WRAPPER void compute_tile(Sums& sums, Shared& s, const Params& p, int use, int next) {
    const Task& task = s.tasks[use % 2];
    if (next < p.n_tasks) fetch_task(s.tasks[(use + 1) % 2], p.tasks[next]);
    for (auto& row : sums)
        for (auto& fragment : row)
            for (float& sum : fragment) sum = 0.0f;
    int stage = 0;
    for (int step = 0; step * TILE_K < task.k; ++step) {
        cp_async_wait<N_STAGES - 2>();
        mma_barrier();  // `stage` has arrived for all, and nobody reads the one before it
        const int ahead = step + N_STAGES - 1;
        if (ahead * TILE_K < task.k)
            load_stage(s, p, task, ahead, stage == 0 ? N_STAGES - 1 : stage - 1);
        cp_async_commit();
        multiply(sums, s.stages, stage);
        stage = stage + 1 == N_STAGES ? 0 : stage + 1;
    }
    cp_async_wait<0>();
    mma_barrier();  // nobody reads the stages, and the next task is there
}

// The MMA role's first thread waits until the tile's slot is empty.
WRAPPER bool wait_for_slot(Shared& s, const Params& p, int use, int row) {
    const long long start = clock_cycles();
    const bool empty = wait_at_least<ld_acquire_cta>(
        &s.empty[use % N_SLOTS], use / N_SLOTS * N_STORE_WARPS, p.limit, FOR_SLOT, row);
    p.tile_times[row].slot_wait = clock_cycles() - start;
    return empty;
}

// The MMA role's first thread waits until the tile may be started. For other tasks it waits half
// the budget, so that this is reported, and not that the store warps wait for the tile.
WRAPPER bool wait_for_start(Shared& s, const Params& p, int use, int row) {
    const Task& task = s.tasks[use % 2];
    const WaitLimit sooner = {p.limit.abort, p.limit.budget_cycles / 2, p.limit.report};
    if (task.waits_for >= 0 &&
        !wait_at_least<ld_acquire_gpu>(&p.counters[task.waits_for],
                                       task.wait_count * N_STORE_WARPS, sooner, FOR_COUNTER, row))
        return false;
    return OVERLAPS || wait_for_slot(s, p, use, row);
}

WRAPPER void mma_role(const Params& p, Shared& s) {
    const bool first = threadIdx.x == 0;
    bool loading = false;  // the tile's first stages are on their way
    if (static_cast<int>(blockIdx.x) >= p.n_tasks) return;
    fetch_task(s.tasks[0], p.tasks[blockIdx.x]);
    cp_async_commit();
    cp_async_wait<0>();
    for (int use = 0;; ++use) {
        const int row = blockIdx.x + use * gridDim.x, next = row + gridDim.x;
        if (!loading) {
            mma_barrier();  // the first task is there
            if (first && !wait_for_start(s, p, use, row)) s.gave_up_at_start = true;
            mma_barrier();
            if (s.gave_up_at_start) return;
            load_first_stages(s, p, s.tasks[use % 2]);
        }
        if (first) p.tile_times[row].mma_start = clock_cycles();
        Sums sums;
        compute_tile(sums, s, p, use, next);
        if (first) p.tile_times[row].mma_end = clock_cycles();

        const Task& next_task = s.tasks[(use + 1) % 2];
        loading = OVERLAPS && next < p.n_tasks && next_task.waits_for < 0;
        if (loading) load_first_stages(s, p, next_task);
        if (OVERLAPS) {
            if (first && !wait_for_slot(s, p, use, row)) s.gave_up_at_slot = true;
            mma_barrier();
            if (s.gave_up_at_slot) return;
        }
        stage_tile(sums, slot_of(s, use));
#if BULK
        fence_proxy_async();
#endif
        __syncwarp();
        if (threadIdx.x % 32 == 0) red_release_cta(&s.full[use % N_SLOTS], 1);
        if (first) p.tile_times[row].handed_over = clock_cycles();
        if (next >= p.n_tasks) return;
    }
}

// ---- Store role -------------------------------------------------------------------------------

// Issues the thread's share of a tile's stores, until they are accepted.
WRAPPER void store_tile(const Task& task, const Layer& layer, const unsigned char* slot) {
    const int thread = threadIdx.x - N_MMA_THREADS;
    const long long ld_bytes = layer.out_ld * OUT_BYTES;
    unsigned char* out = layer.out[task.owner] + task.m0 * ld_bytes + task.n0 * OUT_BYTES;
    const int row_bytes = (task.n * OUT_BYTES + 15) / 16 * 16;
#if BULK
    for (int row = thread; row < task.m; row += N_STORE_THREADS)
        bulk_store(out + row * ld_bytes, slot + row * SLOT_ROW_BYTES, row_bytes);
    bulk_commit();
    bulk_wait_read<0>();
#else
    constexpr int N_COLUMNS = TILE_N * OUT_BYTES / 16, N_ROWS = N_STORE_THREADS / N_COLUMNS;
    constexpr int BATCH = 4;  // loads under way together
    static_assert(TILE_M % (N_ROWS * BATCH) == 0, "the tile is too small for the store warps");
    const int column = thread % N_COLUMNS * 16;
    for (int first = thread / N_COLUMNS; first < TILE_M; first += N_ROWS * BATCH) {
        uint4 chunks[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            chunks[i] = ld_shared_v4(slot + (first + i * N_ROWS) * SLOT_ROW_BYTES + column);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int row = first + i * N_ROWS;
            if (row < task.m && column < row_bytes)
                st_global_v4(out + row * ld_bytes + column, chunks[i]);
        }
    }
#endif
}

// Raises the task's counter, for tasks of this GPU, and the tile's flag, for who will read it.
WRAPPER void signal_tile(const Params& p, const Task& task, int row) {
    const bool counts = task.signals >= 0, flags = SIGNAL != 0 && task.owner >= 0;
    if (!counts && !flags) return;
#if BULK
    bulk_wait<0>();
#endif
    __syncwarp();  // all lanes' stores come before what the first lane does now
    if (threadIdx.x % 32 != 0) return;
    if (counts) red_release_gpu(&p.counters[task.signals], 1);
    if (!flags) return;
#if SIGNAL == 1
    red_release_sys(&p.flags[task.owner][row], 1);
#else
    fence_acq_rel_sys();
    red_relaxed_sys(&p.flags[task.owner][row], 1);
#endif
}

WRAPPER void store_role(const Params& p, Shared& s) {
    const int warp = threadIdx.x / 32 - N_MMA_WARPS;
    const bool first = threadIdx.x % 32 == 0;
    for (int use = 0;; ++use) {
        const int row = blockIdx.x + use * gridDim.x, slot = use % N_SLOTS;
        if (row >= p.n_tasks) return;
        const Task task = p.tasks[row];
        bool full = true;
        if (first)
            full = wait_at_least<ld_acquire_cta>(&s.full[slot], (use / N_SLOTS + 1) * N_MMA_WARPS,
                                                 p.limit, FOR_TILE, row);
        if (!__all_sync(~0u, full)) return;
        __syncwarp();  // all lanes see the tile that the first has acquired
        const long long issue_start = clock_cycles();
        if (task.owner >= 0) store_tile(task, p.layers[task.layer], slot_of(s, use));
        __syncwarp();
        const long long issue_end = clock_cycles();
        if (first) red_release_cta(&s.empty[slot], 1);
        signal_tile(p, task, row);
        if (first) {
            p.tile_times[row].issue_start[warp] = issue_start;
            p.tile_times[row].issue_end[warp] = issue_end;
            p.tile_times[row].signal_end[warp] = clock_cycles();
        }
    }
}

extern "C" __global__ void __launch_bounds__(N_THREADS, 1) fused_tiles(const Params p) {
    DYNAMIC_SHARED(memory);
    Shared& s = *reinterpret_cast<Shared*>(memory);
    CtaTimes& times = p.cta_times[blockIdx.x];
    if (threadIdx.x < N_SLOTS) s.full[threadIdx.x] = s.empty[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        s.gave_up_at_start = s.gave_up_at_slot = false;
        times.sm = smid();
        next_timer_step();
        times.start_ns = global_ns();
        times.start_cycles = clock_cycles();
        red_release_sys(p.started, 1);
        s.gave_up_at_launch = !wait_at_least<ld_acquire_sys>(p.started, p.n_starters, p.limit,
                                                             FOR_ALL_CTAS, 0);
    }
    __syncthreads();
    if (s.gave_up_at_launch) return;
    if (threadIdx.x < N_MMA_THREADS) {
        setmaxnreg_inc<216>();  // 2 x 216 + 72 are the 3 x 168 of the launch
        mma_role(p, s);
    } else {
        setmaxnreg_dec<72>();
        store_role(p, s);
        if (threadIdx.x == N_MMA_THREADS) {
            next_timer_step();
            times.end_ns = global_ns();
            times.end_cycles = clock_cycles();
        }
    }
}
