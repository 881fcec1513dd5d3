// The extension module `relive.core._core`.
#define RELIVE_IMPORTS_NUMPY
#include "arrays.hpp"
#include "bindings.hpp"

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
}
