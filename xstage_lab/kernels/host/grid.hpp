// Warps and CTAs, and a grid of them on every emulated GPU from start to end.
#pragma once
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <sstream>
#include <vector>

#include "rendezvous.hpp"

namespace host {

constexpr unsigned WARP_SIZE = 32;
constexpr std::size_t SHARED_ALIGNMENT = 1024, GUARD_BYTES = 1024;
constexpr int POISON = 0xff;  // a NaN in every floating-point type

struct Warp {
    Rendezvous meeting{WARP_SIZE};
    std::array<void*, WARP_SIZE> operands{};  // of the lanes that have come to an instruction
};

// Dynamic shared memory, poisoned, with a guard behind it.
class SharedMemory {
  public:
    explicit SharedMemory(std::size_t n_bytes) : n_bytes_(n_bytes) {
        const std::size_t whole = n_bytes + GUARD_BYTES + SHARED_ALIGNMENT;
        memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(
            SHARED_ALIGNMENT, whole / SHARED_ALIGNMENT * SHARED_ALIGNMENT)));
        std::memset(memory_.get(), POISON, n_bytes + GUARD_BYTES);
    }
    unsigned char* start() const { return memory_.get(); }
    bool holds(const void* p, std::size_t n) const {
        const auto* byte = static_cast<const unsigned char*>(p);
        return byte >= start() && byte + n <= start() + n_bytes_;
    }
    bool guard_is_whole() const {
        return std::all_of(start() + n_bytes_, start() + n_bytes_ + GUARD_BYTES,
                           [](unsigned char byte) { return byte == POISON; });
    }

  private:
    struct Free {
        void operator()(unsigned char* p) const { std::free(p); }
    };
    std::size_t n_bytes_;
    std::unique_ptr<unsigned char, Free> memory_;
};

struct Cta {
    Cta() : barrier(launch->block.x), warps(launch->block.x / WARP_SIZE),
            shared(launch->shared_bytes) {}
    Rendezvous barrier;
    std::array<Rendezvous, 16> named;
    std::deque<Warp> warps;
    SharedMemory shared;
    std::atomic<bool> proxy_fenced = false;  // fence.proxy.async was executed
};

inline unsigned char* shared_memory() { return current->cta->shared.start(); }

inline void named_barrier(unsigned id, unsigned n_threads, Place place = Place::current()) {
    if (id < 1 || id > 15) fail("barrier " + std::to_string(id) + "; there are 1 to 15");
    if (n_threads == 0 || n_threads % WARP_SIZE != 0 || n_threads > launch->block.x)
        fail("a barrier of " + std::to_string(n_threads) + " threads; allowed are multiples of 32 "
             "up to the CTA's " + std::to_string(launch->block.x));
    current->cta->named[id].meet("barrier_sync", place, n_threads);
}

void end_copies();  // memory.hpp

// Who stands where, threads with the same fate in one line.
inline std::string who_waits(const std::deque<Thread>& threads) {
    std::map<std::string, std::vector<unsigned>> waiting;
    for (const Thread& thread : threads) {
        if (thread.waits_in == nullptr) continue;
        std::ostringstream line;
        line << "GPU " << thread.gpu << ", CTA " << thread.block_index.x << ": wait in "
             << thread.waits_in << " (" << thread.place.file_name() << ':' << thread.place.line()
             << ')';
        if (thread.waits_in == std::string_view("__nanosleep") && thread.polled != nullptr)
            line << ", having read " << thread.seen << " at " << thread.polled;
        waiting[line.str()].push_back(thread.index.x);
    }
    std::ostringstream text;
    std::size_t n_lines = 0;
    for (const auto& [line, who] : waiting) {
        if (++n_lines > 16) break;
        text << "\n  " << who.size() << " threads (" << who.front() << " to " << who.back()
             << ") of " << line;
    }
    if (waiting.size() > 16) text << "\n  and " << waiting.size() - 16 << " more such lines";
    return text.str();
}

// Runs `kernel(gpu)` for every thread of every GPU's grid; returns what went wrong, or nothing.
template <class Kernel> std::string run_grids(Kernel kernel) {
    std::deque<Cta> ctas;
    std::deque<Thread> threads;
    for (unsigned gpu = 0; gpu < launch->n_gpus; ++gpu)
        for (unsigned cta = 0; cta < launch->grid.x; ++cta) {
            ctas.emplace_back();
            for (unsigned i = 0; i < launch->block.x; ++i) {
                Thread& thread = threads.emplace_back();
                thread.index.x = i;
                thread.block_index.x = cta;
                thread.gpu = gpu;
                thread.lane = i % WARP_SIZE;
                thread.cta = &ctas.back();
                thread.warp = &ctas.back().warps[i / WARP_SIZE];
            }
        }
    run_all(threads, [&](Thread& thread) {
        try {
            kernel(thread.gpu);
            end_copies();
            thread.warp->meeting.leave("__syncwarp");
            thread.cta->barrier.leave("__syncthreads");
        } catch (const Stopped&) {
        } catch (const std::exception& error) {
            stop_all(error.what());
        }
        thread.finished = true;
    });
    for (std::size_t i = 0; i < ctas.size() && launch->failure.empty(); ++i)
        if (!ctas[i].shared.guard_is_whole())
            launch->failure = "GPU " + std::to_string(i / launch->grid.x) + ", CTA " +
                              std::to_string(i % launch->grid.x) + ": writes behind its " +
                              std::to_string(launch->shared_bytes) + " bytes of shared memory";
    return launch->failure + (launch->hung ? who_waits(threads) : "");
}

}  // namespace host
