// Takes the arrays of a ring from Python, and holds their lengths to each other once.
#include "ring.hpp"

#include <cstddef>
#include <string>

#include "bindings.hpp"

namespace relive {

namespace {

constexpr std::size_t WORD = sizeof(std::int64_t);
constexpr std::int64_t COLUMNS = sizeof(Env) / WORD;  // of `state`

// All arrays of `relive.core.RingArrays`; every length is held to the others here, since nothing checks them later.
Ring ring_of(nb::object arrays) {
    auto state = member<Matrix<std::int64_t>>(arrays, "state", "a ring's");
    auto counters = member<Vector<std::int64_t>>(arrays, "counters", "a ring's");
    auto memory = member<Matrix<std::uint8_t>>(arrays, "memory", "a ring's");
    Ring ring;
    ring.rows = nb::cast<std::int64_t>(arrays.attr("rows"));
    ring.step_bytes = nb::cast<std::size_t>(arrays.attr("step_bytes"));
    ring.obs_bytes = nb::cast<std::size_t>(arrays.attr("obs_bytes"));
    ring.step = member<Column<std::int32_t>>(arrays, "step", "a ring's");
    ring.stamp = member<Column<std::int64_t>>(arrays, "stamp", "a ring's");
    ring.order = member<Column<std::int32_t>>(arrays, "order", "a ring's");
    ring.reward = member<Column<float>>(arrays, "reward", "a ring's");
    ring.terminated = member<Column<std::uint8_t>>(arrays, "terminated", "a ring's");
    ring.truncated = member<Column<std::uint8_t>>(arrays, "truncated", "a ring's");
    ring.ends = member<Vector<std::int32_t>>(arrays, "ends", "a ring's");
    ring.seen = member<Vector<std::int64_t>>(arrays, "seen", "a ring's");
    ring.undo = member<Vector<std::int64_t>>(arrays, "undo", "a ring's");
    ring.reserve = member<Vector<std::int64_t>>(arrays, "reserve", "a ring's");
    Place places;
    bool few = !__builtin_mul_overflow(ring.rows, state.rows, &places);
    auto fits = [&](std::int64_t size, std::int64_t wanted) { return size == wanted || size == 0; };
    bool right = few && ring.rows > 0 && state.rows > 0 && state.columns == COLUMNS && state.stride == sizeof(Env) &&
                 counters.size() == COUNTERS && memory.rows == places && memory.stride == memory.columns &&
                 ring.obs_bytes <= ring.step_bytes && ring.step_bytes <= static_cast<std::size_t>(memory.columns) &&
                 ring.step.size() == places && ring.stamp.size() == places && ring.order.size() == places &&
                 ring.reward.size() == places && ring.terminated.size() == places &&
                 ring.truncated.size() == places && fits(ring.ends.size(), places) &&
                 fits(ring.seen.size(), state.rows) && fits(ring.reserve.size(), state.rows);
    if (!right) throw nb::value_error("the arrays of a ring do not fit each other");
    ring.inverse = 1.0 / static_cast<double>(ring.rows);
    ring.memory = reinterpret_cast<std::byte *>(memory.first);
    ring.width = memory.columns;
    ring.envs = {reinterpret_cast<Env *>(state.first), state.rows};
    ring.counters = reinterpret_cast<Counters *>(counters.data);
    ring.ranges = DrawRanges(static_cast<std::size_t>(state.rows));
    ring.kept = arrays;
    return ring;
}

}  // namespace

void bind_ring(nb::module_ &module) {
    // the columns of `state`
    module.attr("HEAD") = offsetof(Env, head) / WORD;
    module.attr("TAIL") = offsetof(Env, tail) / WORD;
    module.attr("NEXT") = offsetof(Env, next) / WORD;
    module.attr("COUNT") = offsetof(Env, count) / WORD;
    RELIVE_EXPORT(COLUMNS);
    // the entries of `counters`
    module.attr("COMPLETED") = offsetof(Counters, completed) / WORD;
    module.attr("DRAWABLE") = offsetof(Counters, drawable) / WORD;
    module.attr("EPISODES") = offsetof(Counters, episodes) / WORD;
    module.attr("HISTORY") = offsetof(Counters, history) / WORD;
    module.attr("LENGTH") = offsetof(Counters, length) / WORD;
    module.attr("STRIDE") = offsetof(Counters, stride) / WORD;
    module.attr("TAILS") = offsetof(Counters, tails) / WORD;
    module.attr("ACROSS") = Counters::ACROSS;
    module.attr("NOT_FINITE") = offsetof(Counters, not_finite) / WORD;
    module.attr("WEIGH") = offsetof(Counters, weigh) / WORD;
    RELIVE_EXPORT(COUNTERS);
    nb::class_<Ring>(module, "Ring", "The arrays of a ring (`RingArrays`), as compiled code holds them.")
        .def("__init__", [](Ring *self, nb::object arrays) { new (self) Ring(ring_of(arrays)); }, nb::arg("arrays"))
        .def("rebind", [](Ring &self, nb::object arrays) { self = ring_of(arrays); }, nb::arg("arrays"),
             "Take other arrays; who keeps this object follows.")
        .def("changed", [](Ring &self) { self.ranges.forget(); },
             "Python changed the cursors, the rule or stamps, which draws must not take for what they were.");
}

}  // namespace relive
