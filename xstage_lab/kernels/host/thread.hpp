// A CUDA thread and the launch it belongs to; what goes wrong in one ends the other.
#pragma once
#include <atomic>
#include <cstddef>
#include <mutex>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

namespace host {

using Place = std::source_location;

struct Warp;
struct Cta;

// One instruction's asynchronous copy.
struct Copy {
    std::byte* to;
    const std::byte* from;
    unsigned n_bytes;
    std::vector<std::byte> read{};  // what a bulk copy has read and not yet written
};

// A thread's asynchronous copies: the committed groups, oldest first, and the open one.
struct CopyGroups {
    std::vector<std::vector<Copy>> committed;
    std::vector<Copy> open;
    void commit() { committed.push_back(std::exchange(open, {})); }
};

struct Thread {
    uint3 index{}, block_index{};
    unsigned gpu = 0, lane = 0;
    Warp* warp = nullptr;
    Cta* cta = nullptr;
    CopyGroups copies, bulk_copies;

    // What it waits for, told if that never comes.
    const char* waits_in = nullptr;
    Place place;
    const void* polled = nullptr;
    unsigned seen = 0, n_same = 0;

    bool fenced = false;  // with XSTAGE_THREADS: its relaxed stores release
    bool finished = false;
};

// What launch.py says of a launch.
struct Settings {
    unsigned n_gpus, n_ctas, n_threads, shared_bytes, seed;
    double timeout_s;
};

struct Launch : Settings {
    explicit Launch(const Settings& settings)
        : Settings(settings), grid{n_ctas}, block{n_threads} {}
    dim3 grid, block;

    std::atomic<bool> stop = false;  // every thread ends at its next wait
    std::mutex mutex;
    std::string failure;             // the first
    bool hung = false;               // it ended because nobody came
    long long clock = 0;
};

inline Launch* launch = nullptr;  // one at a time
#ifdef XSTAGE_THREADS
inline thread_local Thread* current = nullptr;
#else
inline Thread* current = nullptr;
#endif

struct Stopped {};  // thrown to end a CUDA thread where it stands

inline void stop_all(const std::string& reason, bool hung = false) {
    const std::lock_guard lock(launch->mutex);
    if (launch->stop) return;
    launch->failure = reason;
    launch->hung = hung;
    launch->stop = true;
}

// Ends the launch because of what the current thread does.
[[noreturn]] inline void fail(const std::string& reason) {
    stop_all("GPU " + std::to_string(current->gpu) + ", CTA " +
             std::to_string(current->block_index.x) + ", thread " +
             std::to_string(current->index.x) + ": " + reason);
    throw Stopped{};
}

}  // namespace host
