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

#ifdef RELIVE_TSAN
// A race, planted: threads that call it at the same time add to one number without an order. A run that looks for races
// has to report it.
void race(relive::Vector<std::int64_t> number) {
    PyThreadState *state = PyEval_SaveThread();
    for (int i = 0; i < 100'000; ++i) *static_cast<volatile std::int64_t *>(number.data) = number[0] + 1;
    PyEval_RestoreThread(state);
}
#endif

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
    relive::bind_joined(module);
    relive::bind_returns(module);
    relive::bind_rollouts(module);
    relive::bind_counters(module);
    relive::bind_pages(module);
    relive::bind_scaling(module);
    relive::bind_weights(module);
    module.def("build_info", &build_info);
#ifdef RELIVE_TSAN
    module.def("race", &race);
#endif
}
