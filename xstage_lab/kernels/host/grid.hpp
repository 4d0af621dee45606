// Warps and CTAs, and a grid of them on every emulated GPU from start to end.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "rendezvous.hpp"

namespace host {

constexpr unsigned WARP_SIZE = 32;
constexpr std::size_t SHARED_ALIGNMENT = 1024, GUARD_BYTES = 1024;
constexpr unsigned char POISON = 0xff;  // a NaN in every floating-point type

struct Warp {
    Rendezvous meeting{WARP_SIZE};
    std::array<void*, WARP_SIZE> operands{};  // of the lanes that have come to an instruction
};

// Dynamic shared memory, poisoned, with a guard behind it.
class SharedMemory {
  public:
    explicit SharedMemory(std::size_t n_bytes)
        : memory_(n_bytes + GUARD_BYTES + SHARED_ALIGNMENT, POISON) {
        const std::size_t past = reinterpret_cast<std::uintptr_t>(memory_.data()) % SHARED_ALIGNMENT;
        start_ = (SHARED_ALIGNMENT - past) % SHARED_ALIGNMENT;
        end_ = start_ + n_bytes;
    }
    unsigned char* start() { return memory_.data() + start_; }
    bool holds(const void* p, std::size_t n) {
        const auto* byte = static_cast<const unsigned char*>(p);
        return byte >= start() && byte + n <= memory_.data() + end_;
    }
    bool guard_is_whole() const {
        for (std::size_t i = end_; i < end_ + GUARD_BYTES; ++i)
            if (memory_[i] != POISON) return false;
        return true;
    }

  private:
    std::vector<unsigned char> memory_;
    std::size_t start_, end_;
};

struct Cta {
    Cta() : barrier(launch->n_threads), warps(launch->n_threads / WARP_SIZE),
            shared(launch->shared_bytes) {}
    Rendezvous barrier;
    std::array<Rendezvous, 16> named;
    std::deque<Warp> warps;
    SharedMemory shared;
    std::atomic<bool> proxy_fenced = false;  // fence.proxy.async was executed
};

inline unsigned char* shared_memory() { return current->cta->shared.start(); }

void named_barrier(unsigned id, unsigned n_threads, Place place = Place::current());

// Runs the launch; returns what went wrong, or nothing.
std::string run_launch();

void run_kernel(const Thread& thread);  // kernel.hpp

}  // namespace host
