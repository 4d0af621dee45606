// Instructions that the 32 lanes of a warp execute together: they exchange registers and order no
// memory accesses.
#pragma once
#include <bit>
#include <string>

#include "memory.hpp"

namespace host {

inline void require_full(unsigned mask, const char* what) {
    if (mask != ~0u) fail(std::string(what) + " of a part of a warp; only full warps are emulated");
}

// Meets the other lanes at an instruction. The last to come computes for all, from and into what
// each lane gives as `mine`; operands(i) is that of lane i.
template <class Operands, class Compute>
void together(const char* what, Operands& mine, Compute compute) {
    [[maybe_unused]] const Unobserved scope;
    Warp& warp = *current->warp;
    warp.operands[current->lane] = &mine;
    warp.meeting.meet(what, Place::current(), [&] {
        compute([&](unsigned lane) -> Operands& {
            return *static_cast<Operands*>(warp.operands[lane]);
        });
    });
}

// The value of `lane`; a lane beyond the warp gives its own.
template <class T> T shuffle(const char* what, unsigned mask, T value, unsigned lane) {
    require_full(mask, what);
    struct { T given; unsigned lane; T taken; } mine{value, lane, value};
    together(what, mine, [](auto operands) {
        for (unsigned i = 0; i < WARP_SIZE; ++i)
            if (operands(i).lane < WARP_SIZE) operands(i).taken = operands(operands(i).lane).given;
    });
    return mine.taken;
}

inline unsigned ballot(const char* what, unsigned mask, bool vote) {
    require_full(mask, what);
    struct { bool vote; unsigned votes; } mine{vote, 0};
    together(what, mine, [](auto operands) {
        unsigned votes = 0;
        for (unsigned i = 0; i < WARP_SIZE; ++i) votes |= unsigned{operands(i).vote} << i;
        for (unsigned i = 0; i < WARP_SIZE; ++i) operands(i).votes = votes;
    });
    return mine.votes;
}

inline void ldmatrix_x4(unsigned (&r)[4], const void* row, bool transposed) {
    struct { std::uint16_t row[8]; bool transposed; unsigned r[4]; } mine{};
    std::memcpy(mine.row, shared(aligned(row), 16), 16);
    mine.transposed = transposed;
    together(transposed ? "ldmatrix_x4_trans" : "ldmatrix_x4", mine, [](auto operands) {
        for (unsigned i = 0; i < WARP_SIZE; ++i)
            for (unsigned j = 0; j < 4; ++j) {
                const unsigned outer = i / 4, inner = 2 * (i % 4);
                const auto value = [&](unsigned k) -> unsigned {
                    return operands(i).transposed ? operands(8 * j + k).row[outer]
                                                  : operands(8 * j + outer).row[k];
                };
                operands(i).r[j] = value(inner) | value(inner + 1) << 16;
            }
    });
    std::copy_n(mine.r, 4, r);
}

inline float from_bf16(unsigned bits) { return std::bit_cast<float>(bits << 16); }

inline unsigned to_bf16(float value) {
    const unsigned bits = std::bit_cast<unsigned>(value);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline void mma_bf16_16816(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    struct { float d[4]; unsigned a[4], b[2]; } mine;
    std::copy_n(d, 4, mine.d);
    std::copy_n(a, 4, mine.a);
    std::copy_n(b, 2, mine.b);
    together("mma_bf16_16816", mine, [](auto operands) {
        float A[16][16], B[16][8], D[16][8];
        for (unsigned i = 0; i < WARP_SIZE; ++i) {
            const unsigned g = i / 4, t = 2 * (i % 4);
            for (unsigned half = 0; half < 2; ++half) {  // the lower column or row, the next
                for (unsigned j = 0; j < 4; ++j)
                    A[g + 8 * (j % 2)][t + 8 * (j / 2) + half] =
                        from_bf16(operands(i).a[j] >> 16 * half & 0xffff);
                for (unsigned j = 0; j < 2; ++j) {
                    B[t + 8 * j + half][g] = from_bf16(operands(i).b[j] >> 16 * half & 0xffff);
                    D[g + 8 * j][t + half] = operands(i).d[2 * j + half];
                }
            }
        }
        for (unsigned m = 0; m < 16; ++m)
            for (unsigned k = 0; k < 16; ++k)
                for (unsigned n = 0; n < 8; ++n) D[m][n] += A[m][k] * B[k][n];
        for (unsigned i = 0; i < WARP_SIZE; ++i)
            for (unsigned j = 0; j < 4; ++j)
                operands(i).d[j] = D[i / 4 + 8 * (j / 2)][2 * (i % 4) + j % 2];
    });
    std::copy_n(mine.d, 4, d);
}

}  // namespace host
