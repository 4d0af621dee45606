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
//   SHARED_BYTES     dynamic shared memory of a CTA, checked below
//
// Argument: Params, described below. Counters, flags, `started` and the report are zero at launch.
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
#include "ptx.cuh"

#if !defined(TILE_M) || !defined(TILE_N) || !defined(TILE_K)
#error "TILE_M, TILE_N, TILE_K: the tile and the k of a stage"
#endif
#if !defined(N_STAGES) || !defined(ISSUE_DEPTH)
#error "N_STAGES, ISSUE_DEPTH: operand stages, and tiles in flight"
#endif
#if !defined(OUT_BYTES) || !defined(BULK) || !defined(SIGNAL) || !defined(SHARED_BYTES)
#error "OUT_BYTES, BULK, SIGNAL, SHARED_BYTES: see the top of fused_tiles.cu"
#endif
#if BULK && !defined(XSTAGE_HOST) && __CUDA_ARCH__ < 900
#error "BULK=1 needs sm_90 or newer; take BULK=0"
#endif

constexpr int N_MMA_WARPS = 8, N_STORE_WARPS = 4;
constexpr int N_MMA_THREADS = 32 * N_MMA_WARPS, N_STORE_THREADS = 32 * N_STORE_WARPS;
constexpr int N_THREADS = N_MMA_THREADS + N_STORE_THREADS;
constexpr int MAX_GPUS = 8, MAX_LAYERS = 2;

// Every MMA warp computes WARP_M x WARP_N of the tile.
constexpr int WARPS_M = TILE_M > TILE_N ? 4 : 2, WARPS_N = N_MMA_WARPS / WARPS_M;
constexpr int WARP_M = TILE_M / WARPS_M, WARP_N = TILE_N / WARPS_N;

constexpr bool OVERLAPS = ISSUE_DEPTH > 1;  // else the only slot lies over the stages
constexpr int N_SLOTS = OVERLAPS ? ISSUE_DEPTH - 1 : 1;
constexpr int ROW_BYTES = 2 * TILE_K, ROW_CHUNKS = ROW_BYTES / 16;  // of an operand in a stage
constexpr int STAGE_BYTES = (TILE_M + TILE_N) * ROW_BYTES;
constexpr int SLOT_ROW_BYTES = (TILE_N + 8) * OUT_BYTES;  // + 8: rows begin in different banks
constexpr int SLOT_BYTES = TILE_M * SLOT_ROW_BYTES;
constexpr int STAGES_BYTES =
    OVERLAPS || N_STAGES * STAGE_BYTES > SLOT_BYTES ? N_STAGES * STAGE_BYTES : SLOT_BYTES;

static_assert(TILE_K == 32 || TILE_K == 64, "TILE_K is 32 or 64");
static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "an MMA warp computes multiples of 16 x 16");
static_assert(WARP_M * WARP_N <= 32 * 128, "a thread has registers for 128 sums");
static_assert(N_STAGES >= 2, "one stage is computed while another is loaded");
static_assert(ISSUE_DEPTH >= 1 && N_SLOTS <= N_THREADS, "ISSUE_DEPTH is out of range");
static_assert(OUT_BYTES == 2 || OUT_BYTES == 4, "output is bf16 or fp32");

struct alignas(16) Task {   // a row of the program
    int m0, n0, m, n, k;    // the tile's first row and column, its extent, the length of its sums
    int layer;              // which operands, and which output
    int owner;              // the GPU it is stored to; -1: nobody, compute only
    int waits_for;          // counter that wait_count tasks must have raised; -1: none
    int wait_count;
    int signals;            // counter raised once the tile's stores are accepted; -1: none
};

struct Layer {
    const unsigned short* a;  // bf16
    const unsigned short* b;
    unsigned char* out[MAX_GPUS];  // by owner: where this GPU's output lies in its memory
    long long a_ld, b_ld, out_ld;  // elements
};

struct TileTimes {          // cycles of the SM
    long long mma_start;    // the MMA role turns to the tile
    long long mma_end;      // the tile's sums are complete
    long long slot_wait;    // how long the role waited for a slot: after mma_end, or at depth 1
                            // before mma_start
    long long handed_over;  // the tile is in its slot
    long long issue_start[N_STORE_WARPS];  // the store warp turns to the tile
    long long issue_end[N_STORE_WARPS];    // its stores are accepted
    long long signal_end[N_STORE_WARPS];   // counter and flag are raised
};

struct CtaTimes {           // aligns SMs and tells the clock's rate
    long long sm;
    long long start_cycles, start_ns;  // once all CTAs of all GPUs are there
    long long end_cycles, end_ns;      // once the first store warp is done
};

struct Params {
    Layer layers[MAX_LAYERS];
    unsigned* flags[MAX_GPUS];  // by owner: a flag for each row, raised by every store warp
    const Task* tasks;          // [n_tasks]
    unsigned* counters;         // raised by every store warp of a task
    TileTimes* tile_times;      // [n_tasks]
    CtaTimes* cta_times;        // [gridDim.x]
    unsigned* started;          // one for all GPUs: CTAs that are there
    WaitLimit limit;
    int n_tasks;
    int n_starters;             // CTAs of all GPUs
};

enum Wait : unsigned { FOR_ALL_CTAS, FOR_COUNTER, FOR_SLOT, FOR_TILE };

struct Shared {
    Task tasks[2];            // the CTA's tile `use` is tasks[use % 2]
    unsigned full[N_SLOTS];   // MMA warps that have filled the slot, in all its uses
    unsigned empty[N_SLOTS];  // store warps that have emptied it
    bool gave_up_at_launch, gave_up_at_start, gave_up_at_slot;
    alignas(1024) unsigned char stages[STAGES_BYTES];
#if ISSUE_DEPTH > 1
    unsigned char slots[N_SLOTS * SLOT_BYTES];
#endif
};
static_assert(SHARED_BYTES == sizeof(Shared), "SHARED_BYTES is not what the kernel needs");

// The slot of the CTA's tile `use`.
WRAPPER unsigned char* slot_of(Shared& s, int use) {
#if ISSUE_DEPTH > 1
    return s.slots + use % N_SLOTS * SLOT_BYTES;
#else
    return s.stages;
#endif
}

WRAPPER void mma_barrier() { barrier_sync(1, N_MMA_THREADS); }

// ---- Operands: global memory -> stages -> sums ------------------------------------------------
// Addresses are computed anew in every k-step (tid() hides from the compiler that it could keep
// them): a 128 x 256 tile leaves 40 registers for everything but its sums.

// Where a 16-byte chunk of a row lies in a stage: chunks change places within a row, so that those
// of eight rows and one column lie in different banks, for ldmatrix.
WRAPPER int chunk_offset(int row, int chunk) {
    const int swizzle = ROW_CHUNKS == 8 ? row & 7 : (row >> 1) & 3;
    return row * ROW_BYTES + (chunk ^ swizzle) * 16;
}

// Starts to copy k-step `step` of both operands into a stage; what lies beyond an edge becomes
// zero. Every MMA thread copies one chunk of every PASS_ROWS-th row.
WRAPPER void load_stage(Shared& s, const Params& p, const Task& task, int step, int stage) {
    constexpr int PASS_ROWS = N_MMA_THREADS / ROW_CHUNKS;
    const unsigned thread = tid();
    const int row = thread / ROW_CHUNKS, chunk = thread % ROW_CHUNKS;
    const int k = step * TILE_K + chunk * 8;
    const int n_bytes = 2 * min(max(task.k - k, 0), 8);
    unsigned char* to = s.stages + stage * STAGE_BYTES + chunk_offset(row, chunk);
    const Layer& layer = p.layers[task.layer];
    const unsigned short* from = layer.a + (task.m0 + row) * layer.a_ld + k;
#pragma unroll
    for (int pass = 0; pass < TILE_M; pass += PASS_ROWS) {
        cp_async_16_zfill(to + pass * ROW_BYTES, from, row + pass < task.m ? n_bytes : 0);
        from += PASS_ROWS * layer.a_ld;
    }
    from = layer.b + (task.n0 + row) * layer.b_ld + k;
#pragma unroll
    for (int pass = 0; pass < TILE_N; pass += PASS_ROWS) {
        cp_async_16_zfill(to + (TILE_M + pass) * ROW_BYTES, from,
                          row + pass < task.n ? n_bytes : 0);
        from += PASS_ROWS * layer.b_ld;
    }
}

// Starts the loads of a tile's first k-steps, a group of copies each.
WRAPPER void load_first_stages(Shared& s, const Params& p, const Task& task) {
    for (int step = 0; step < N_STAGES - 1; ++step) {
        if (step * TILE_K < task.k) load_stage(s, p, task, step, step);
        cp_async_commit();
    }
}

WRAPPER void fetch_task(Task& to, const Task& from) {
    if (threadIdx.x < sizeof(Task) / 16)
        cp_async_16(reinterpret_cast<uint4*>(&to) + threadIdx.x,
                    reinterpret_cast<const uint4*>(&from) + threadIdx.x);
}

using Sums = float[WARP_M / 16][WARP_N / 8][4];

// Adds the product of one k-step to the warp's part of the tile.
WRAPPER void multiply(Sums& sums, const unsigned char* stages, int stage) {
    const unsigned thread = tid(), warp = thread / 32, lane = thread % 32;
    const int a_row = warp / WARPS_N * WARP_M + lane % 16;
    const int b_row = TILE_M + warp % WARPS_N * WARP_N + lane % 8 + lane / 16 * 8;
    const int a_offset = stage * STAGE_BYTES + chunk_offset(a_row, lane / 16);
    const int b_offset = stage * STAGE_BYTES + chunk_offset(b_row, lane / 8 % 2);
#pragma unroll
    for (int k_bytes = 0; k_bytes < ROW_BYTES; k_bytes += 32) {  // 16 values of k
        unsigned a[WARP_M / 16][4];
#pragma unroll
        for (int i = 0; i < WARP_M / 16; ++i)  // ^ as chunks have changed places
            ldmatrix_x4(a[i], stages + 16 * i * ROW_BYTES + (a_offset ^ k_bytes));
#pragma unroll
        for (int j = 0; j < WARP_N / 16; ++j) {
            unsigned b[4];
            ldmatrix_x4(b, stages + 16 * j * ROW_BYTES + (b_offset ^ k_bytes));
            const unsigned left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
#pragma unroll
            for (int i = 0; i < WARP_M / 16; ++i) {
                mma_bf16_16816(sums[i][2 * j], a[i], left);
                mma_bf16_16816(sums[i][2 * j + 1], a[i], right);
            }
        }
    }
}

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

// Writes the warp's part of the tile to a slot.
WRAPPER void stage_tile(const Sums& sums, unsigned char* slot) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_row = warp / WARPS_N * WARP_M + lane / 4;
    const int first_column = warp % WARPS_N * WARP_N + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < WARP_M / 16; ++i)
#pragma unroll
        for (int j = 0; j < WARP_N / 8; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = first_row + 16 * i + 8 * half, column = first_column + 8 * j;
                const float low = sums[i][j][2 * half], high = sums[i][j][2 * half + 1];
                unsigned char* to = slot + row * SLOT_ROW_BYTES + column * OUT_BYTES;
#if OUT_BYTES == 2
                *reinterpret_cast<unsigned*>(to) = cvt_rn_bf16x2(high, low);
#else
                *reinterpret_cast<float2*>(to) = make_float2(low, high);
#endif
            }
}

// The MMA role's first thread waits until the tile's slot is empty.
WRAPPER bool wait_for_slot(Shared& s, const Params& p, int use, int row) {
    const long long start = clock_cycles();
    const bool empty = wait_at_least<ld_acquire_cta>(
        &s.empty[use % N_SLOTS], use / N_SLOTS * N_STORE_WARPS, p.limit, FOR_SLOT, row);
    p.tile_times[row].slot_wait = clock_cycles() - start;
    return empty;
}

// The MMA role's first thread waits until the tile may be started.
WRAPPER bool wait_for_start(Shared& s, const Params& p, int use, int row) {
    const Task& task = s.tasks[use % 2];
    if (task.waits_for >= 0 &&
        !wait_at_least<ld_acquire_gpu>(&p.counters[task.waits_for],
                                       task.wait_count * N_STORE_WARPS, p.limit, FOR_COUNTER, row))
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
        red_release_sys(p.started, 1);
        s.gave_up_at_launch = !wait_at_least<ld_acquire_sys>(p.started, p.n_starters, p.limit,
                                                             FOR_ALL_CTAS, 0);
        times.sm = smid();
        times.start_cycles = clock_cycles();
        times.start_ns = global_ns();
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
            times.end_cycles = clock_cycles();
            times.end_ns = global_ns();
        }
    }
}
