// Each CUDA thread is a fiber: it runs until it waits, and then the next one runs.
//
// Everything happens on one operating-system thread, so that a run repeats exactly; another seed
// gives another interleaving. ucontext starts a fiber, setjmp and longjmp switch without the
// system calls of swapcontext.
#pragma once
#include <csetjmp>
#include <chrono>
#include <deque>
#include <functional>
#include <random>

#include <sys/mman.h>
#include <ucontext.h>

#include "thread.hpp"

namespace host {

struct Fiber {
    Thread* thread = nullptr;
    const std::function<void(Thread&)>* body = nullptr;
    std::byte* stack = nullptr;
    const unsigned* awaits = nullptr;  // it goes on once this is no longer `generation`
    unsigned generation = 0;
    bool started = false;
    jmp_buf here;
};

inline Fiber* running = nullptr;
inline jmp_buf scheduler;
constexpr std::size_t STACK_BYTES = 64 * 1024;

// Lets the others run. Ends the thread if the launch ends.
[[gnu::noinline]] inline void switch_out() {
    if (_setjmp(running->here) == 0) _longjmp(scheduler, 1);
    if (launch->stop) throw Stopped{};
}

inline void enter() {
    (*running->body)(*running->thread);
    _longjmp(scheduler, 1);
}

[[gnu::noinline]] inline void switch_to(Fiber& fiber) {
    running = &fiber;
    current = fiber.thread;
    if (_setjmp(scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.here, 1);
    fiber.started = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = fiber.stack;
    start.uc_stack.ss_size = STACK_BYTES;
    start.uc_link = nullptr;
    makecontext(&start, enter, 0);
    setcontext(&start);
}

// Holds fibers until a generation is over.
class Gate {
  public:
    void lock() {}
    void unlock() {}
    void open() {}
    void wait(const unsigned& generation, std::unique_lock<Gate>&) {
        running->awaits = &generation;
        running->generation = generation;
        switch_out();
        running->awaits = nullptr;
    }
};

inline void pause(Place place) {
    current->waits_in = "__nanosleep";
    current->place = place;
    switch_out();
    current->waits_in = nullptr;
}

inline long long tick() { return ++launch->clock; }

struct Unobserved {};  // threads.hpp: what ThreadSanitizer must not see

// Memory of the fibers' stacks, taken from the system in one piece.
class Stacks {
  public:
    explicit Stacks(std::size_t n) : n_bytes_(n * STACK_BYTES) {
        void* p = mmap(nullptr, n_bytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        start_ = static_cast<std::byte*>(p);
    }
    ~Stacks() { munmap(start_, n_bytes_); }
    Stacks(const Stacks&) = delete;
    std::byte* operator[](std::size_t i) const { return start_ + i * STACK_BYTES; }

  private:
    std::byte* start_;
    std::size_t n_bytes_;
};

inline bool can_run(const Fiber& fiber) {
    return fiber.awaits == nullptr || *fiber.awaits != fiber.generation || launch->stop;
}

// Runs `body` for every thread, each in turn until it waits.
inline void run_all(std::deque<Thread>& threads, const std::function<void(Thread&)>& body) {
    const Stacks stacks(threads.size());
    std::vector<Fiber> fibers(threads.size());
    std::vector<Fiber*> alive;
    for (std::size_t i = 0; i < fibers.size(); ++i) {
        fibers[i].thread = &threads[i];
        fibers[i].body = &body;
        fibers[i].stack = stacks[i];
        alive.push_back(&fibers[i]);
    }
    std::minstd_rand random(launch->seed);
    const auto deadline = std::chrono::steady_clock::now() +
                          std::chrono::duration<double>(launch->timeout_s);
    while (!alive.empty()) {
        if (launch->seed != 0) std::shuffle(alive.begin(), alive.end(), random);
        bool moved = false;
        for (Fiber* fiber : alive) {
            if (!can_run(*fiber)) continue;
            switch_to(*fiber);
            moved = true;
        }
        std::erase_if(alive, [](const Fiber* fiber) { return fiber->thread->finished; });
        launch->clock += 32;
        if (!moved) stop_all("no thread can go on:", true);
        else if (std::chrono::steady_clock::now() > deadline) stop_all("not over in time:", true);
    }
}

}  // namespace host
