// Where threads wait for each other: the last to come opens it for all.
#pragma once
#include <string>
#include <string_view>

#ifdef XSTAGE_THREADS
#include "threads.hpp"
#else
#include "fibers.hpp"
#endif

namespace host {

class Rendezvous {
  public:
    explicit Rendezvous(unsigned n_expected = 0) : n_expected_(n_expected) {}

    // Waits for the others. `last` is done by the last to come, before anybody goes on.
    template <class Last> void meet(const char* what, Place place, Last last) {
        Gate::Held held(gate_);
        if (n_arrived_ != 0 && what != what_ && std::string_view(what) != what_)
            fail(std::string("comes to ") + what + " while others wait in " + what_);
        what_ = what;
        if (++n_arrived_ == n_expected_) {
            last();
            open();
            return;
        }
        current->waits_in = what;
        current->place = place;
        gate_.wait(generation_, held);
        current->waits_in = nullptr;
    }
    void meet(const char* what, Place place) { meet(what, place, [] {}); }

    // The same, where how many must come is said on arrival.
    void meet(const char* what, Place place, unsigned n_expected) {
        expect(n_expected);
        meet(what, place);
    }

    // A thread that has ended is waited for no more, except in what needs every lane.
    void leave(std::string_view opens) {
        [[maybe_unused]] const Gate::Held held(gate_);
        --n_expected_;
        if (n_arrived_ == 0 || n_arrived_ != n_expected_) return;
        if (opens != what_) fail(std::string("ends while its warp waits in ") + what_);
        open();
    }

    unsigned n_expected() const { return n_expected_; }

  private:
    void expect(unsigned n) {
        [[maybe_unused]] const Gate::Held held(gate_);
        if (n_arrived_ != 0 && n != n_expected_)
            fail("comes to a barrier of " + std::to_string(n) + " threads, where others wait for " +
                 std::to_string(n_expected_));
        n_expected_ = n;
    }
    void open() {
        n_arrived_ = 0;
        ++generation_;
        gate_.open();
    }

    Gate gate_;
    unsigned n_expected_, n_arrived_ = 0, generation_ = 0;
    const char* what_ = "";
};

}  // namespace host
