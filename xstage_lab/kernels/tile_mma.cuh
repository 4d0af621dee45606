// The arithmetic of fused_tiles.cu: operands from global memory to stages, from stages to sums, and
// sums to a slot.
//
// Addresses are computed anew in every k-step (tid() hides from the compiler that it could keep
// them): before sm_90, a 128 x 256 tile leaves 40 registers for everything but its sums.
#pragma once
#include "tile_program.cuh"

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
    const int a_rows = task.m - row, b_rows = task.n - row;  // that exist from this one on
    const int n_bytes = 2 * min(max(task.k - k, 0), 8);
    unsigned char* to = s.stages + stage * STAGE_BYTES + chunk_offset(row, chunk);
    const Layer& layer = p.layers[task.layer];
    const unsigned short* from = layer.a + (task.m0 + row) * layer.a_ld + k;
#pragma unroll
    for (int pass = 0; pass < TILE_M; pass += PASS_ROWS) {
        cp_async_16_zfill(to + pass * ROW_BYTES, from, pass < a_rows ? n_bytes : 0);
        from += PASS_ROWS * layer.a_ld;
    }
    from = layer.b + (task.n0 + row) * layer.b_ld + k;
#pragma unroll
    for (int pass = 0; pass < TILE_N; pass += PASS_ROWS) {
        cp_async_16_zfill(to + (TILE_M + pass) * ROW_BYTES, from, pass < b_rows ? n_bytes : 0);
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
