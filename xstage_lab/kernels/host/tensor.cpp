// What the Tensor Core's instructions compute, from and into the registers of 32 lanes.
#include <bit>
#include <cstring>

#include "shim.hpp"

namespace host {

void ldmatrix_x4(unsigned (&r)[4], const void* row, bool transposed) {
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
    std::memcpy(r, mine.r, sizeof r);
}

static float from_bf16(unsigned bits) { return std::bit_cast<float>(bits << 16); }

unsigned to_bf16(float value) {
    const unsigned bits = std::bit_cast<unsigned>(value);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

void mma_bf16_16816(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    struct { float d[4]; unsigned a[4], b[2]; } mine;
    std::memcpy(mine.d, d, sizeof mine.d);
    std::memcpy(mine.a, a, sizeof mine.a);
    std::memcpy(mine.b, b, sizeof mine.b);
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
    std::memcpy(d, mine.d, sizeof d);
}

}  // namespace host
