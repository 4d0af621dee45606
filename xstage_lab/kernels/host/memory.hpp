// Flags, fences and asynchronous copies.
#pragma once
#include <cstring>
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
    if (me.n_same >= 16) {  // a loop that forgets __nanosleep must not keep the others from running
        me.n_same = 0;
        pause(Place::current());
    }
    return value;
}

// ThreadSanitizer knows no fences. With one before it, a relaxed store releases.
inline std::memory_order after_fence(std::memory_order order) {
    return current->fenced ? std::memory_order_release : order;
}

inline void store(unsigned* p, unsigned value, std::memory_order order) {
    std::atomic_ref<unsigned>(*p).store(value, after_fence(order));
}

inline void add(unsigned* p, unsigned n, std::memory_order order) {
    std::atomic_ref<unsigned>(*p).fetch_add(n, after_fence(order));
}

inline unsigned compare_exchange(unsigned* p, unsigned expected, unsigned desired) {
    std::atomic_ref<unsigned>(*p).compare_exchange_strong(expected, desired,
                                                          after_fence(std::memory_order_relaxed));
    return expected;
}

template <class T, class F> T update(T* p, T value, F combine) {
    std::atomic_ref<T> cell(*p);
    T before = cell.load(std::memory_order_relaxed);
    while (!cell.compare_exchange_weak(before, combine(before, value), std::memory_order_relaxed)) {
    }
    return before;
}

inline void fence() {
#ifdef XSTAGE_THREADS
    current->fenced = true;
    if (current->polled != nullptr)  // after a relaxed load, a fence acquires
        load(static_cast<const unsigned*>(current->polled), std::memory_order_acquire);
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

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

// Calls `complete` for each copy of all but the latest `n_left` groups.
template <class Complete>
void complete_groups(CopyGroups& groups, std::size_t n_left, Complete complete) {
    for (std::size_t i = 0; i + n_left < groups.committed.size(); ++i)
        for (Copy& copy : groups.committed[i]) complete(copy);
}

inline void forget_groups(CopyGroups& groups, std::size_t n_left) {
    if (groups.committed.size() > n_left)
        groups.committed.erase(groups.committed.begin(), groups.committed.end() - n_left);
}

inline void cp_async(void* smem, const void* gmem, unsigned n_bytes) {
    if (n_bytes > 16) fail("cp.async of " + std::to_string(n_bytes) + " bytes; 0 to 16 are allowed");
    std::memset(shared(aligned(smem), 16), POISON, 16);
    current->copies.open.push_back({static_cast<std::byte*>(smem),
                                    static_cast<const std::byte*>(aligned(gmem)), n_bytes});
}

inline void cp_async_commit() { current->copies.commit(); }

inline void cp_async_wait(std::size_t n_left) {
    complete_groups(current->copies, n_left, [](Copy& copy) {
        std::memset(copy.to, 0, 16);
        std::memcpy(copy.to, copy.from, copy.n_bytes);
    });
    forget_groups(current->copies, n_left);
}

inline void bulk_store(void* gmem, const void* smem, unsigned n_bytes) {
    if (n_bytes % 16 != 0)
        fail("cp.async.bulk of " + std::to_string(n_bytes) + " bytes, no multiple of 16");
    if (!current->cta->proxy_fenced.load(std::memory_order_relaxed))
        fail("cp.async.bulk without a fence.proxy.async after the writes to its source");
    current->bulk_copies.open.push_back(
        {static_cast<std::byte*>(aligned(gmem)),
         static_cast<const std::byte*>(shared(aligned(smem), n_bytes)), n_bytes});
}

inline void bulk_commit() { current->bulk_copies.commit(); }

inline void bulk_wait_read(std::size_t n_left) {
    complete_groups(current->bulk_copies, n_left, [](Copy& copy) {
        if (copy.read.empty()) copy.read.assign(copy.from, copy.from + copy.n_bytes);
    });
}

inline void bulk_wait(std::size_t n_left) {
    bulk_wait_read(n_left);
    complete_groups(current->bulk_copies, n_left, [](Copy& copy) {
        if (!copy.read.empty()) std::memcpy(copy.to, copy.read.data(), copy.read.size());
    });
    forget_groups(current->bulk_copies, n_left);
}

inline void fence_proxy_async() {
    current->cta->proxy_fenced.store(true, std::memory_order_relaxed);
}

// What a thread leaves behind: stores that have left shared memory arrive by themselves.
inline void end_copies() {
    const auto unread = [](const Copy& copy) { return copy.read.empty() && copy.n_bytes != 0; };
    CopyGroups& bulk = current->bulk_copies;
    bool lost = !bulk.open.empty();
    for (const auto& group : bulk.committed) lost |= std::any_of(group.begin(), group.end(), unread);
    if (lost) fail("ends before its bulk copies have read their source (bulk_wait_read)");
    bulk_wait(0);
}

}  // namespace host
