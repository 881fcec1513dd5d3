// What each source file puts into the module: functions, classes, and the constants that Python needs as well.
#pragma once
#include <nanobind/nanobind.h>

// Puts a constant into `module` under its own name.
#define RELIVE_EXPORT(name) module.attr(#name) = name

namespace relive {

void bind_ring(nanobind::module_ &module);
void bind_steps(nanobind::module_ &module);
void bind_adding(nanobind::module_ &module);
void bind_draws(nanobind::module_ &module);
void bind_tree(nanobind::module_ &module);
void bind_priorities(nanobind::module_ &module);
void bind_windows(nanobind::module_ &module);
void bind_sequences(nanobind::module_ &module);
void bind_goals(nanobind::module_ &module);
void bind_tensors(nanobind::module_ &module);
void bind_batches(nanobind::module_ &module);
void bind_joined(nanobind::module_ &module);
void bind_returns(nanobind::module_ &module);
void bind_rollouts(nanobind::module_ &module);
void bind_counters(nanobind::module_ &module);
void bind_pages(nanobind::module_ &module);
void bind_scaling(nanobind::module_ &module);
void bind_weights(nanobind::module_ &module);

}  // namespace relive
