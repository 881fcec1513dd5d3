// The extension module `relive.core._core`.
#define RELIVE_IMPORTS_NUMPY
#include "arrays.hpp"
#include "bindings.hpp"

namespace {

// How this file was built, and the newest version of its functions that the processor can run: 1 for all processors.
nanobind::dict build_info() {
    nanobind::dict info;
    info["compiler"] = RELIVE_COMPILER;
    info["flags"] = RELIVE_FLAGS;
#ifdef RELIVE_CLONES
    info["clones"] = true;
    __builtin_cpu_init();
    info["level"] = __builtin_cpu_supports("x86-64-v4") ? 4 : __builtin_cpu_supports("x86-64-v3") ? 3 : 1;
#else
    info["clones"] = false;
    info["level"] = 1;
#endif
    return info;
}

}  // namespace

NB_MODULE(_core, module) {
    if (_import_array() < 0) nanobind::raise_python_error();
    // a replay that a thread still serves when Python ends is no leak that a user could mend
    nanobind::set_leak_warnings(false);
    relive::bind_ring(module);
    relive::bind_steps(module);
    relive::bind_adding(module);
    relive::bind_draws(module);
    relive::bind_tree(module);
    relive::bind_priorities(module);
    relive::bind_windows(module);
    relive::bind_sequences(module);
    relive::bind_goals(module);
    relive::bind_tensors(module);
    relive::bind_batches(module);
    relive::bind_returns(module);
    relive::bind_rollouts(module);
    relive::bind_counters(module);
    relive::bind_pages(module);
    relive::bind_scaling(module);
    relive::bind_weights(module);
    module.def("build_info", &build_info);
}
