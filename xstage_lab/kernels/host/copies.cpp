// Fences and asynchronous copies. Nothing moves before it is waited for.
#include <cstring>

#include "shim.hpp"

namespace host {

void fence() {
#ifdef XSTAGE_THREADS
    current->fenced = true;
    if (current->polled != nullptr)  // after a relaxed load, a fence acquires
        load(static_cast<const unsigned*>(current->polled), std::memory_order_acquire);
#else
    std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

namespace {

// Calls `complete` for each copy of all but the latest `n_left` groups.
template <class Complete>
void complete_groups(CopyGroups& groups, std::size_t n_left, Complete complete) {
    for (std::size_t i = 0; i + n_left < groups.committed.size(); ++i)
        for (Copy& copy : groups.committed[i]) complete(copy);
}

void forget_groups(CopyGroups& groups, std::size_t n_left) {
    if (groups.committed.size() > n_left)
        groups.committed.erase(groups.committed.begin(), groups.committed.end() - n_left);
}

}  // namespace

void cp_async(void* smem, const void* gmem, unsigned n_bytes) {
    if (n_bytes > 16) fail("cp.async of " + std::to_string(n_bytes) + " bytes; 0 to 16 are allowed");
    std::memset(shared(aligned(smem), 16), POISON, 16);
    current->copies.open.push_back({static_cast<std::byte*>(smem),
                                    static_cast<const std::byte*>(aligned(gmem)), n_bytes});
}

void cp_async_wait(std::size_t n_left) {
    complete_groups(current->copies, n_left, [](Copy& copy) {
        std::memset(copy.to, 0, 16);
        std::memcpy(copy.to, copy.from, copy.n_bytes);
    });
    forget_groups(current->copies, n_left);
}

void bulk_store(void* gmem, const void* smem, unsigned n_bytes) {
    if (n_bytes % 16 != 0)
        fail("cp.async.bulk of " + std::to_string(n_bytes) + " bytes, no multiple of 16");
    if (!current->cta->proxy_fenced.load(std::memory_order_relaxed))
        fail("cp.async.bulk without a fence.proxy.async after the writes to its source");
    current->bulk_copies.open.push_back(
        {static_cast<std::byte*>(aligned(gmem)),
         static_cast<const std::byte*>(shared(aligned(smem), n_bytes)), n_bytes});
}

void bulk_wait_read(std::size_t n_left) {
    complete_groups(current->bulk_copies, n_left, [](Copy& copy) {
        if (copy.read.empty()) copy.read.assign(copy.from, copy.from + copy.n_bytes);
    });
}

void bulk_wait(std::size_t n_left) {
    bulk_wait_read(n_left);
    complete_groups(current->bulk_copies, n_left, [](Copy& copy) {
        if (!copy.read.empty()) std::memcpy(copy.to, copy.read.data(), copy.read.size());
    });
    forget_groups(current->bulk_copies, n_left);
}

// What a thread leaves behind: stores that have left shared memory arrive by themselves.
void end_copies() {
    bool unread = !current->bulk_copies.open.empty();
    complete_groups(current->bulk_copies, 0, [&](const Copy& copy) {
        unread |= copy.read.empty() && copy.n_bytes != 0;
    });
    if (unread) fail("ends before its bulk copies have read their source (bulk_wait_read)");
    bulk_wait(0);
}

}  // namespace host
