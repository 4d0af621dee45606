// Flags, fences and asynchronous copies.
#pragma once
#include <string>

#include "grid.hpp"

namespace host {

// ---- Flags and counters -----------------------------------------------------------------------

inline unsigned load(const unsigned* p, std::memory_order order) {
    const unsigned value = std::atomic_ref<unsigned>(*const_cast<unsigned*>(p)).load(order);
    Thread& me = *current;
    me.n_same = p == me.polled && value == me.seen ? me.n_same + 1 : 0;
    me.polled = p;
    me.seen = value;
    if (me.n_same >= 16)  // a loop that forgets __nanosleep must not keep the others from running
        pause("a load", Place::current());
    return value;
}

// ThreadSanitizer knows no fences: after one, a thread's relaxed stores release.
inline std::memory_order relaxed() {
    return current->fenced ? std::memory_order_release : std::memory_order_relaxed;
}

inline void store_release(unsigned* p, unsigned value) {
    std::atomic_ref<unsigned>(*p).store(value, std::memory_order_release);
}

inline void add(unsigned* p, unsigned n, std::memory_order order) {
    std::atomic_ref<unsigned>(*p).fetch_add(n, order);
}

inline unsigned compare_exchange(unsigned* p, unsigned expected, unsigned desired) {
    std::atomic_ref<unsigned>(*p).compare_exchange_strong(expected, desired, relaxed());
    return expected;
}

template <class T, class F> T update(T* p, T value, F combine) {
    std::atomic_ref<T> cell(*p);
    T before = cell.load(std::memory_order_relaxed);
    while (!cell.compare_exchange_weak(before, combine(before, value), relaxed())) {
    }
    return before;
}

void fence();

// ---- Addresses --------------------------------------------------------------------------------

template <class T> T* aligned(T* p) {
    if (reinterpret_cast<std::uintptr_t>(p) % 16 != 0)
        fail("a 16-byte access to an address that is no multiple of 16");
    return p;
}

template <class T> T* shared(T* p, std::size_t n_bytes) {
    if (!current->cta->shared.holds(p, n_bytes))
        fail("an address outside the CTA's " + std::to_string(launch->shared_bytes) +
             " bytes of shared memory");
    return p;
}

// ---- Asynchronous copies ----------------------------------------------------------------------
// Nothing moves before it is waited for. What waits too little sees poison or old data.

void cp_async(void* smem, const void* gmem, unsigned n_bytes);
void cp_async_wait(std::size_t n_left);
inline void cp_async_commit() { current->copies.commit(); }

void bulk_store(void* gmem, const void* smem, unsigned n_bytes);
void bulk_wait_read(std::size_t n_left);
void bulk_wait(std::size_t n_left);
inline void bulk_commit() { current->bulk_copies.commit(); }

inline void fence_proxy_async() {
    current->cta->proxy_fenced.store(true, std::memory_order_relaxed);
}

// At a thread's end: stores that have left shared memory arrive by themselves.
void end_copies();

}  // namespace host
