// CUDA on CPU threads: the part of CUDA that our kernels use, enough to check results and races.
//
// build.py puts this file before a kernel and kernel.hpp after it, and g++ makes a shared library
// that launch.py calls. Several emulated GPUs share one address space. Each CUDA thread is a fiber
// of one operating-system thread, so a run is fast and repeats exactly; with XSTAGE_THREADS it is
// a thread of its own, so that ThreadSanitizer can look for races.
//
// Every loop that waits for somebody must call __nanosleep or read through ptx.cuh: others run
// there. Times mean nothing here, scopes are not told apart, and x86 hides weak memory order.
#pragma once
#define XSTAGE_HOST 1

#include <cstdint>

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ shared_memory_is_declared_by_DYNAMIC_SHARED

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

#include "rendezvous.hpp"
#include "grid.hpp"
#include "memory.hpp"
#include "warp.hpp"

#define threadIdx (host::current->index)
#define blockIdx (host::current->block_index)
#define blockDim (host::launch->block)
#define gridDim (host::launch->grid)

inline void __syncthreads(host::Place place = host::Place::current()) {
    host::current->cta->barrier.meet("__syncthreads", place);
}

inline void __syncwarp(unsigned mask = ~0u, host::Place place = host::Place::current()) {
    host::require_full(mask, "__syncwarp");
    host::current->warp->meeting.meet("__syncwarp", place);
}

inline void __nanosleep(unsigned, host::Place place = host::Place::current()) {
    host::pause("__nanosleep", place);
}

inline void __threadfence() { host::fence(); }
inline void __threadfence_system() { host::fence(); }

// Atomic functions are relaxed, as in CUDA.
template <class T> T atomicAdd(T* p, T n) {
    return std::atomic_ref<T>(*p).fetch_add(n, host::relaxed());
}
template <class T> T atomicExch(T* p, T value) {
    return std::atomic_ref<T>(*p).exchange(value, host::relaxed());
}
template <class T> T atomicCAS(T* p, T expected, T desired) {
    std::atomic_ref<T>(*p).compare_exchange_strong(expected, desired, host::relaxed());
    return expected;
}
template <class T> T atomicMax(T* p, T value) { return host::update(p, value, max<T>); }
template <class T> T atomicMin(T* p, T value) { return host::update(p, value, min<T>); }

template <class T> T __shfl_sync(unsigned mask, T value, int lane) {
    return host::shuffle("__shfl_sync", mask, value, lane & 31);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits) {
    return host::shuffle("__shfl_xor_sync", mask, value, host::current->lane ^ bits);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned n) {
    return host::shuffle("__shfl_down_sync", mask, value, host::current->lane + n);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned n) {
    return host::shuffle("__shfl_up_sync", mask, value, host::current->lane - n);
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
    return host::ballot("__ballot_sync", mask, vote != 0);
}
inline int __any_sync(unsigned mask, int vote) {
    return host::ballot("__any_sync", mask, vote != 0) != 0;
}
inline int __all_sync(unsigned mask, int vote) {
    return host::ballot("__all_sync", mask, vote != 0) == ~0u;
}
