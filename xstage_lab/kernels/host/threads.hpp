// Each CUDA thread is a thread of the operating system, for ThreadSanitizer to look for races.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
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
    void lock() { mutex_.lock(); }
    void unlock() { mutex_.unlock(); }
    void open() { opened_.notify_all(); }
    void wait(const unsigned& generation, std::unique_lock<Gate>& lock) {
        for (const unsigned mine = generation; generation == mine;) {
            if (launch->stop.load(std::memory_order_relaxed)) throw Stopped{};
            opened_.wait_for(lock, std::chrono::milliseconds(50));
        }
    }

  private:
    std::mutex mutex_;
    std::condition_variable_any opened_;
};

inline void pause(Place place) {
    current->waits_in = "__nanosleep";
    current->place = place;
    if (launch->stop.load(std::memory_order_relaxed)) throw Stopped{};
    std::this_thread::yield();
    current->waits_in = nullptr;
}

inline long long tick() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(64);
}

// Runs `body` for every thread, all at a time.
inline void run_all(std::deque<Thread>& threads, const std::function<void(Thread&)>& body) {
    const auto deadline = std::chrono::steady_clock::now() +
                          std::chrono::duration<double>(launch->timeout_s);
    std::atomic<std::size_t> n_ended = 0;
    std::vector<std::thread> running;
    for (Thread& thread : threads)
        running.emplace_back([&] {
            current = &thread;
            body(thread);
            n_ended.fetch_add(1, std::memory_order_relaxed);
        });
    while (n_ended.load(std::memory_order_relaxed) < threads.size()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (std::chrono::steady_clock::now() > deadline) stop_all("not over in time:", true);
    }
    for (std::thread& each : running) each.join();
}

}  // namespace host
