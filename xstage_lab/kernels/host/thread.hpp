// A CUDA thread and the launch it belongs to; what goes wrong in one ends the other.
//
// The headers declare, and include little: each kernel's build reads them again. What does not
// depend on the kernel is built once, from the .cpp files.
#pragma once
#include <atomic>
#include <cstddef>
#include <ctime>
#include <deque>
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
    Launch(const Settings& settings, void* const* const* arguments)
        : Settings(settings), arguments(arguments), grid{n_ctas}, block{n_threads} {}
    void* const* const* arguments;  // arguments[gpu][i] points to parameter i
    dim3 grid, block;

    std::atomic<bool> stop = false;  // every thread ends at its next wait
    std::string failure;             // why
    bool hung = false;
    long long clock = 0;
};

inline Launch* launch = nullptr;  // one at a time
inline std::atomic<bool> interrupted = false;
#ifdef XSTAGE_THREADS
inline thread_local Thread* current = nullptr;
#else
inline Thread* current = nullptr;
#endif

inline long long now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000ll + now.tv_nsec;
}

struct Stopped {};  // thrown to end a CUDA thread where it stands

// Ends the launch; the first reason counts. `hung`: because nobody came.
void stop_all(const std::string& reason, bool hung = false);

// Ends the launch because of what the current thread does.
[[noreturn]] void fail(const std::string& reason);

// Runs `body` for all threads until they end (fibers.cpp or threads.cpp).
void run_all(std::deque<Thread>& threads, void (*body)(Thread&));

// Ends the launch if it takes too long or somebody wants it to end.
class Watch {
  public:
    void look() const;

  private:
    long long start_ns_ = now_ns();
};

}  // namespace host
