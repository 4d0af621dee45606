// What fused_tiles.cu is made for and works on: its parameters, its arguments, its shared memory.
#pragma once
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
constexpr int MAX_GPUS = 8, MAX_LAYERS = 16;

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
    long long start_cycles, start_ns;  // at a step of the global timer, before the CTAs meet
    long long end_cycles, end_ns;      // at a step, once the first store warp is done
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
