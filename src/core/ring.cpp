// Takes the arrays of a ring from Python, and holds their lengths to each other once.
#include "ring.hpp"

#include <cstddef>
#include <string>

#include "bindings.hpp"

namespace relive {

namespace {

constexpr std::size_t WORD = sizeof(std::int64_t);
constexpr std::int64_t COLUMNS = sizeof(Env) / WORD;  // of `state`

template <typename T> T argument(nb::handle item, const char *name) {
    T out;
    if (!nb::try_cast(item, out))
        throw nb::type_error((std::string("a ring's `") + name + "` has another dtype or other axes").c_str());
    return out;
}

// All arrays of `relive.core.RingArrays`; every length is held to the others here, since nothing checks them later.
Ring ring_of(nb::object arrays) {
    auto member = [&](const char *name) { return arrays.attr(name); };
    auto state = argument<Matrix<std::int64_t>>(member("state"), "state");
    auto counters = argument<Vector<std::int64_t>>(member("counters"), "counters");
    auto memory = argument<Matrix<std::uint8_t>>(member("memory"), "memory");
    Ring ring;
    ring.rows = nb::cast<std::int64_t>(member("rows"));
    ring.step_bytes = nb::cast<std::size_t>(member("step_bytes"));
    ring.obs_bytes = nb::cast<std::size_t>(member("obs_bytes"));
    ring.step = argument<Column<std::int32_t>>(member("step"), "step");
    ring.stamp = argument<Column<std::int64_t>>(member("stamp"), "stamp");
    ring.order = argument<Column<std::int32_t>>(member("order"), "order");
    ring.reward = argument<Column<float>>(member("reward"), "reward");
    ring.terminated = argument<Column<std::uint8_t>>(member("terminated"), "terminated");
    ring.truncated = argument<Column<std::uint8_t>>(member("truncated"), "truncated");
    ring.ends = argument<Vector<std::int32_t>>(member("ends"), "ends");
    ring.seen = argument<Vector<std::int64_t>>(member("seen"), "seen");
    ring.undo = argument<Vector<std::int64_t>>(member("undo"), "undo");
    ring.reserve = argument<Vector<std::int64_t>>(member("reserve"), "reserve");
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
    ring.lines = Lines(static_cast<std::size_t>(state.rows));
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
        .def("changed", [](Ring &self) { self.lines.forget(); },
             "Python changed the cursors, the rule or stamps, which draws must not take for what they were.");
}

}  // namespace relive
