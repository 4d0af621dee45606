// A launch from start to end, and what is told when it fails.
#include <cstdio>
#include <exception>

#include "shim.hpp"

namespace host {

void stop_all(const std::string& reason, bool hung) {
    if (launch->stop.exchange(true)) return;
    launch->failure = reason;
    launch->hung = hung;
}

void fail(const std::string& reason) {
    stop_all("GPU " + std::to_string(current->gpu) + ", CTA " +
             std::to_string(current->block_index.x) + ", thread " +
             std::to_string(current->index.x) + ": " + reason);
    throw Stopped{};
}

void Watch::look() const {
    if (interrupted) stop_all("interrupted");
    if (1e-9 * static_cast<double>(now_ns() - start_ns_) > launch->timeout_s)
        stop_all("not over in time:", true);
}

void named_barrier(unsigned id, unsigned n_threads, Place place) {
    if (id < 1 || id > 15) fail("barrier " + std::to_string(id) + "; there are 1 to 15");
    if (n_threads == 0 || n_threads % WARP_SIZE != 0 || n_threads > launch->n_threads)
        fail("a barrier of " + std::to_string(n_threads) + " threads; allowed are multiples of 32 "
             "up to the CTA's " + std::to_string(launch->n_threads));
    static constexpr const char* NAMES[] = {
        "", "barrier 1", "barrier 2", "barrier 3", "barrier 4", "barrier 5", "barrier 6",
        "barrier 7", "barrier 8", "barrier 9", "barrier 10", "barrier 11", "barrier 12",
        "barrier 13", "barrier 14", "barrier 15"};
    current->cta->named[id].meet(NAMES[id], place, n_threads);
}

namespace {

constexpr std::size_t MAX_REPORT_LINES = 16;

// Where a thread stands.
std::string wait_of(const Thread& thread) {
    const std::string file = thread.place.file_name();
    std::string text = "GPU " + std::to_string(thread.gpu) + ", CTA " +
                       std::to_string(thread.block_index.x) + ": waits in " + thread.waits_in +
                       " (" + file.substr(file.rfind('/') + 1) + ":" +
                       std::to_string(thread.place.line()) + ")";
    const bool polls = thread.waits_in == std::string_view("__nanosleep") ||
                       thread.waits_in == std::string_view("a load");
    if (!polls || thread.polled == nullptr) return text;
    char address[32];
    std::snprintf(address, sizeof address, "%p", thread.polled);
    return text + ", having read " + std::to_string(thread.seen) + " at " + address;
}

// Who waits where, threads of a CTA that wait alike in one line.
std::string who_waits(const std::deque<Thread>& threads) {
    struct Line { std::string text; unsigned first, last, n; };
    std::vector<Line> lines;
    std::size_t first_of_cta = 0;
    for (const Thread& thread : threads) {
        if (thread.index.x == 0) first_of_cta = lines.size();
        if (thread.waits_in == nullptr) continue;
        const std::string text = wait_of(thread);
        std::size_t i = first_of_cta;
        while (i < lines.size() && lines[i].text != text) ++i;
        if (i == lines.size()) lines.push_back({text, thread.index.x, thread.index.x, 0});
        lines[i].last = thread.index.x;
        ++lines[i].n;
    }
    std::string report;
    for (std::size_t i = 0; i < lines.size() && i < MAX_REPORT_LINES; ++i)
        report += "\n  " + lines[i].text + ": " + std::to_string(lines[i].n) + " threads, " +
                  std::to_string(lines[i].first) + " to " + std::to_string(lines[i].last);
    if (lines.size() > MAX_REPORT_LINES)
        report += "\n  and " + std::to_string(lines.size() - MAX_REPORT_LINES) + " such lines more";
    return report;
}

// One CUDA thread from start to end.
void run_thread(Thread& thread) {
    try {
        run_kernel(thread);
        end_copies();
        thread.warp->meeting.leave("__syncwarp");
        thread.cta->barrier.leave("__syncthreads");
    } catch (const Stopped&) {
    } catch (const std::exception& error) {
        stop_all(error.what());
    }
    thread.finished = true;
}

}  // namespace

std::string run_launch() {
    std::deque<Cta> ctas;
    std::deque<Thread> threads;
    for (unsigned gpu = 0; gpu < launch->n_gpus; ++gpu)
        for (unsigned cta = 0; cta < launch->n_ctas; ++cta) {
            ctas.emplace_back();
            for (unsigned i = 0; i < launch->n_threads; ++i) {
                Thread& thread = threads.emplace_back();
                thread.index.x = i;
                thread.block_index.x = cta;
                thread.gpu = gpu;
                thread.lane = i % WARP_SIZE;
                thread.cta = &ctas.back();
                thread.warp = &ctas.back().warps[i / WARP_SIZE];
            }
        }
    run_all(threads, run_thread);
    for (std::size_t i = 0; i < ctas.size() && launch->failure.empty(); ++i)
        if (!ctas[i].shared.guard_is_whole())
            launch->failure = "GPU " + std::to_string(i / launch->n_ctas) + ", CTA " +
                              std::to_string(i % launch->n_ctas) + ": writes behind its " +
                              std::to_string(launch->shared_bytes) + " bytes of shared memory";
    return launch->failure + (launch->hung ? who_waits(threads) : "");
}

}  // namespace host
