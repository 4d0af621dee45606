// What launch.py calls in a kernel's shared library. build.py puts it last, with
// HOST_KERNEL(name) for the one kernel.
#pragma once
#include <exception>
#include <type_traits>

#include "shim.hpp"

namespace host {

// A parameter's type as launch.py reads it: a NumPy type, after "*" where it is a pointer to such
// values and "const*" where the kernel only reads them. Other types are V and their size.
template <class T> std::string type_name() {
    if constexpr (std::is_pointer_v<T>) {
        using Target = std::remove_pointer_t<T>;
        const std::string pointer = std::is_const_v<Target> ? "const*" : "*";
        if constexpr (std::is_void_v<Target>) return pointer + "V1";
        else return pointer + type_name<std::remove_const_t<Target>>();
    } else {
        const char kind = std::is_floating_point_v<T> ? 'f' : !std::is_integral_v<T> ? 'V'
                        : std::is_signed_v<T> ? 'i' : 'u';
        return kind + std::to_string(sizeof(T));
    }
}

template <class... Parameters> std::string signature(void (*)(Parameters...)) {
    std::string text;
    ((text += (text.empty() ? "" : " ") + type_name<Parameters>()), ...);
    return text;
}

template <class... Parameters>
void call(void (*kernel)(Parameters...), void* const* arguments) {
    [&]<std::size_t... i>(std::index_sequence<i...>) {
        kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[i])...);
    }(std::index_sequence_for<Parameters...>{});
}

}  // namespace host

#define HOST_KERNEL(name)                                                                         \
    void host::run_kernel(const Thread& thread) {                                                 \
        call(::name, launch->arguments[thread.gpu]);                                              \
    }                                                                                             \
    extern "C" const char* host_signature() {                                                     \
        static const std::string text = host::signature(::name);                                  \
        return text.c_str();                                                                      \
    }

// Of all CTAs of all GPUs of a launch.
extern "C" unsigned host_max_threads() { return host::MAX_THREADS; }

// Returns whether all went well, and if not writes to `message` what did not.
extern "C" bool host_launch(const host::Settings* settings, void* const* const* arguments,
                            char* message, std::size_t n_message) {
    host::Launch launch(*settings, arguments);
    host::launch = &launch;
    host::interrupted = false;
    std::string failure;
    try {
        failure = host::run_launch();
    } catch (const std::exception& error) {
        failure = error.what();
    }
    message[failure.copy(message, n_message - 1)] = '\0';
    return failure.empty();
}

extern "C" void host_interrupt() { host::interrupted = true; }
