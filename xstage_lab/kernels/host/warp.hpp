// Instructions that the 32 lanes of a warp execute together: they exchange registers and order no
// memory accesses.
#pragma once
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
        if (warp.meeting.n_expected() != WARP_SIZE)
            fail(std::string("comes to ") + what + " after lanes of its warp have ended");
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

void ldmatrix_x4(unsigned (&r)[4], const void* row, bool transposed);
void mma_bf16_16816(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);
unsigned to_bf16(float value);

}  // namespace host
