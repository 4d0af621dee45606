// How fibers take turns. ucontext starts a fiber, setjmp and longjmp switch without the system
// calls of swapcontext.
#ifndef XSTAGE_THREADS
#include <csetjmp>
#include <new>

#include <sys/mman.h>
#include <ucontext.h>

#include "shim.hpp"

namespace host {
namespace {

constexpr std::size_t STACK_BYTES = 128 * 1024;

struct Fiber {
    Thread* thread;
    void (*body)(Thread&);
    std::byte* stack;
    const unsigned* awaits = nullptr;  // it goes on once this is no longer `generation`
    unsigned generation = 0;
    bool started = false;
    jmp_buf here{};
};

Fiber* running = nullptr;
jmp_buf scheduler;
std::vector<Fiber*> alive;
std::size_t turn = 0;  // the index in `alive` that is next in this round

void enter();

bool can_run(const Fiber& fiber) {
    return fiber.awaits == nullptr || *fiber.awaits != fiber.generation || launch->stop;
}

// The next fiber of this round that can run, or null at the round's end.
Fiber* next_of_round() {
    while (turn < alive.size())
        if (Fiber* fiber = alive[turn++]; can_run(*fiber)) return fiber;
    return nullptr;
}

// Goes on where a fiber stands, or starts it.
[[noreturn]] void go_on(Fiber& fiber) {
    running = &fiber;
    current = fiber.thread;
    if (fiber.started) _longjmp(fiber.here, 1);
    fiber.started = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = fiber.stack;
    start.uc_stack.ss_size = STACK_BYTES;
    start.uc_link = nullptr;
    makecontext(&start, enter, 0);
    setcontext(&start);
    __builtin_unreachable();
}

[[noreturn]] void go_on_with_next() {
    if (Fiber* next = next_of_round()) go_on(*next);
    _longjmp(scheduler, 1);
}

void enter() {
    running->body(*running->thread);
    go_on_with_next();
}

[[gnu::noinline]] void leave_fiber() {
    if (_setjmp(running->here) == 0) go_on_with_next();
}

// Gives every fiber that can run its turn; returns whether there was one.
[[gnu::noinline]] bool run_round() {
    turn = 0;
    Fiber* first = next_of_round();
    if (first == nullptr) return false;
    if (_setjmp(scheduler) == 0) go_on(*first);
    return true;
}

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

void shuffle(std::vector<Fiber*>& fibers, unsigned& random) {
    for (std::size_t i = fibers.size(); i > 1; --i) {
        random ^= random << 13;  // xorshift32
        random ^= random >> 17;
        random ^= random << 5;
        std::swap(fibers[i - 1], fibers[random % i]);
    }
}

}  // namespace

void switch_out(const unsigned* awaits, unsigned generation) {
    running->awaits = awaits;
    running->generation = generation;
    leave_fiber();
    if (launch->stop) throw Stopped{};
}

// Each thread in turn until it waits.
void run_all(std::deque<Thread>& threads, void (*body)(Thread&)) {
    const Stacks stacks(threads.size());
    const Watch watch;
    std::deque<Fiber> fibers;
    alive.clear();
    for (Thread& thread : threads)
        alive.push_back(&fibers.emplace_back(Fiber{&thread, body, stacks[fibers.size()]}));
    unsigned random = launch->seed;
    while (!alive.empty()) {
        if (random != 0) shuffle(alive, random);
        const bool moved = run_round();
        std::erase_if(alive, [](const Fiber* fiber) { return fiber->thread->finished; });
        launch->clock += 32;
        watch.look();
        if (!moved) stop_all("no thread can go on:", true);
    }
}

}  // namespace host

#endif
