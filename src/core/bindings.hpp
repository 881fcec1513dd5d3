// What each source file puts into the module: functions, classes, and the constants that Python needs as well.
#pragma once
#include <nanobind/nanobind.h>

#include <initializer_list>
#include <string>
#include <string_view>

// Puts constants of one type into `module` under their own names.
#define RELIVE_EXPORT(...) relive::export_constants(module, #__VA_ARGS__, {__VA_ARGS__})

namespace relive {

// `names` are separated by a comma and a space, as the preprocessor writes a list.
template <typename T>
void export_constants(nanobind::module_ &module, std::string_view names, std::initializer_list<T> constants) {
    for (auto constant : constants) {
        auto end = names.find(',');
        module.attr(std::string(names.substr(0, end)).c_str()) = +constant;  // of an enumerator, its number
        if (end != names.npos) names.remove_prefix(end + 2);
    }
}

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
