// Each CUDA thread is a thread of the operating system, for ThreadSanitizer to look for races.
#pragma once
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "thread.hpp"

extern "C" {  // of ThreadSanitizer
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
}

namespace host {

constexpr unsigned MAX_THREADS = 2048;

// What is done here is no access and orders nothing in ThreadSanitizer's eyes: lanes that exchange
// registers meet, but their memory accesses stay unordered, as on a GPU.
struct Unobserved {
    Unobserved() {
        AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~Unobserved() {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
        AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
    }
};

// Holds threads until a generation is over.
class Gate {
  public:
    struct Held : std::unique_lock<std::mutex> {
        explicit Held(Gate& gate) : unique_lock(gate.mutex_) {}
    };
    void open() { opened_.notify_all(); }
    void wait(const unsigned& generation, Held& held) {
        for (const unsigned mine = generation; generation == mine;) {
            if (launch->stop) throw Stopped{};
            opened_.wait_until(held, std::chrono::system_clock::now() +
                                     std::chrono::milliseconds(50));
        }
    }

  private:
    std::mutex mutex_;
    std::condition_variable opened_;
};

inline void pause(const char* what, Place place) {
    current->waits_in = what;
    current->place = place;
    current->n_same = 0;
    if (launch->stop.load(std::memory_order_relaxed)) throw Stopped{};
    std::this_thread::yield();
    current->waits_in = nullptr;
}

inline long long tick() { return now_ns() / 64; }

}  // namespace host
