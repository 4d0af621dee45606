// Each CUDA thread is a fiber: it runs until it waits, and then the next one runs.
//
// Everything happens on one operating-system thread, so that a run repeats exactly; another seed
// gives another interleaving.
#pragma once
#include "thread.hpp"

namespace host {

constexpr unsigned MAX_THREADS = 65536;

// Lets the others run until *awaits is no longer `generation`, or once round if null. Ends the
// thread if the launch ends.
void switch_out(const unsigned* awaits, unsigned generation);

// Holds fibers until a generation is over.
class Gate {
  public:
    struct Held {  // nothing to hold: no other fiber runs before this one waits
        explicit Held(Gate&) {}
    };
    void open() {}
    void wait(const unsigned& generation, Held&) { switch_out(&generation, generation); }
};

inline void pause(const char* what, Place place) {
    current->waits_in = what;
    current->place = place;
    current->n_same = 0;
    switch_out(nullptr, 0);
    current->waits_in = nullptr;
}

inline long long tick() { return ++launch->clock; }

struct Unobserved {};  // threads.hpp: what ThreadSanitizer must not see

}  // namespace host
