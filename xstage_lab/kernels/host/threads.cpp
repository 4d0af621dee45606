// All threads at a time.
#ifdef XSTAGE_THREADS
#include <thread>

#include "shim.hpp"

namespace host {

void run_all(std::deque<Thread>& threads, void (*body)(Thread&)) {
    const Watch watch;
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
        watch.look();
    }
    for (std::thread& each : running) each.join();
}

}  // namespace host

#endif
