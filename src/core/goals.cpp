#include "goals.hpp"

#include <cmath>

#include "bindings.hpp"
#include "copies.hpp"
#include "gil.hpp"
#include "random.hpp"

namespace relive {

namespace {

// The first number of a batch's stream that decides on goals; samplers stay below.
constexpr std::uint64_t GOALS = std::uint64_t{1} << 32;

// The ordinal, among the episodes of an env, of the one that a live row belongs to: each has one row that never becomes
// a transition. `order` is kept modulo 2**32; fewer transitions of the env are newer, so the difference fits.
std::int64_t episode_of(const Ring &ring, std::int64_t e, Place place, Number number) {
    auto count = ring.envs[e].count;
    return number - count + static_cast<std::uint32_t>(count - ring.order[place]);
}

// Notes all rows of an env that are live and were not noted before; the last one of each episode stays noted. Adding
// rows does not know of `ends`.
void note_ends(const Ring &ring, std::int64_t e) {
    auto head = ring.envs[e].head;
    for (auto number = std::max(ring.seen[e], ring.oldest(e)); number < head; ++number) {
        auto episode = episode_of(ring, e, ring.place_of(number, e), number);
        ring.ends[ring.place_of(episode, e)] = static_cast<std::int32_t>(number);  // its lower 32 bits
    }
    ring.seen[e] = head;
}

// The rows to be relabelled: their positions to `which`; and, in the place of what is filled later, their numbers to
// `first`, the entries of `ends` for their episodes to `end`, and their envs to `aim`. These entries were asked for.
std::int64_t look_up(const Ring &ring, Places places, std::uint64_t key, double ratio, RelabelledSteps &steps) {
    std::int64_t found = 0;
    for (std::int64_t i = 0; i < places.size(); ++i) {
        // two numbers of the stream belong to row i, so other rows do not change its goal
        if (uniform(key, GOALS + 2 * i) >= ratio) continue;
        auto [e, begin, number] = ring.owner_of(places[i]);
        // a user's sampler may name a place whose row was never written
        if (number < ring.oldest(e)) continue;
        note_ends(ring, e);
        auto entry = ring.place_of(episode_of(ring, e, places[i], number), e);
        __builtin_prefetch(&ring.ends[entry]);
        steps.which[found] = i, steps.first[found] = number, steps.end[found] = entry, steps.aim[found] = e;
        ++found;
    }
    return found;
}

struct Range {
    Number low, high;
};

// The first and the last of the rows from which the goal of row `number` is drawn; none if the last is less.
Range choice(Strategy strategy, Number number, Number first, Number end) {
    switch (strategy) {
        case Strategy::FUTURE: return {number + 1, end};
        case Strategy::FINAL: return {end, end};
        case Strategy::EPISODE: return {first + 1, end};
        case Strategy::PAST: return {first + 1, number};
        case Strategy::RANDOM: break;
    }
    return {0, 0};
}

// The steps and goals of the windows of `found` rows. By now these goals, which were asked for, have come. A window has
// at most n steps, and the lists have room for n steps a row of the batch.
void list_steps(const Ring &ring, const GoalLayout &layout, Places places, Rows out, std::int64_t found,
                RelabelledSteps &steps, std::byte *pairs) {
    auto size = layout.goal_bytes;
    auto *reached = pairs, *wanted = pairs + steps.steps() * size;
    std::int64_t entry = 0;
    steps.begin[0] = 0;
    for (std::int64_t m = 0; m < found; ++m) {
        auto i = steps.which[m];
        auto *row = out.first + i * out.stride;
        const auto *aim = ring.row(steps.aim[m]) + layout.goal_at;
        auto here = places[i], begin = here - remainder_of(here, ring.rows, ring.inverse);
        if (size) {
            copy_bytes(row + layout.into_obs, aim, size);
            copy_bytes(row + layout.into_next, aim, size);
        }
        for (auto left = get<std::int32_t>(row + layout.window.steps); left > 0; --left, ++entry) {
            steps.now[entry] = here, steps.rewards[entry] = ring.reward[here];
            steps.terminated[entry] = ring.terminated[here], steps.truncated[entry] = ring.truncated[here];
            here = ring.after(here, begin);
            steps.after[entry] = here;
            if (!size) continue;
            copy_bytes(reached + entry * size, ring.row(here) + layout.goal_at, size);
            copy_bytes(wanted + entry * size, aim, size);
        }
        steps.begin[m + 1] = entry;
    }
}

}  // namespace

bool GoalLayout::fits(std::int64_t row, std::int64_t ring_row) const {
    auto inside = [](std::int64_t at, std::int64_t bytes, std::int64_t size) {
        return at >= 0 && bytes >= 0 && bytes <= size && at <= size - bytes;
    };
    return window.fits(row, ring_row) && inside(goal_at, goal_bytes, ring_row) && inside(into_obs, goal_bytes, row) &&
           inside(into_next, goal_bytes, row) && inside(mark, 1, row);
}

std::int64_t plan_goals(const Ring &ring, const GoalLayout &layout, Places places, std::int64_t n, double gamma,
                        std::uint64_t key, double ratio, Places others, Rows out, Vector<Place> last,
                        RelabelledSteps &steps, std::byte *pairs) {
    steps.found = 0, steps.of = ring.places(), steps.begin[0] = 0;
    auto bad = read_windows(ring, layout.window, places, n, gamma, out, last);
    if (bad >= 0) return -1 - bad;
    for (std::int64_t i = 0; i < places.size(); ++i) out[i][layout.mark] = 0;
    if (ring.ends.size() != ring.places() || ring.seen.size() != ring.num_envs()) return 0;
    auto drawn = look_up(ring, places, key, ratio, steps);
    std::int64_t found = 0;
    for (std::int64_t m = 0; m < drawn; ++m) {
        auto i = steps.which[m], e = steps.aim[m];
        auto number = steps.first[m];
        std::int64_t noted = ring.ends[steps.end[m]];
        // an episode may have begun before the oldest live row
        auto first = number - std::min<std::int64_t>(ring.step[places[i]], number - ring.oldest(e));
        auto end = number + static_cast<std::uint32_t>(noted - number);  // an episode is shorter than 2**32
        auto [low, high] = choice(layout.strategy, number, first, end);
        const auto &env = ring.envs[e];
        if (high < low || (layout.finished && end == env.head - 1 && env.next > 0)) continue;
        Place aim;
        if (layout.strategy == Strategy::RANDOM) {
            aim = ring.after(others[i], others[i] - remainder_of(others[i], ring.rows, ring.inverse));
        } else {
            auto u = uniform(key, GOALS + 2 * i + 1);  // below 1, so what is chosen is at most `high`
            aim = ring.place_of(low + static_cast<std::int64_t>(u * static_cast<double>(high - low + 1)), e);
        }
        fetch(ring.row(aim) + layout.goal_at, layout.goal_bytes);
        // found <= m, so what is overwritten has been read
        steps.which[found] = i, steps.first[found] = ring.place_of(first, e);
        steps.end[found] = ring.place_of(end, e), steps.aim[found] = aim;
        ++found;
    }
    list_steps(ring, layout, places, out, found, steps, pairs);
    return steps.found = found;
}

std::int64_t relabel_windows(const Ring &ring, const GoalLayout &layout, double gamma, bool judged, Rows out,
                             Vector<Place> last, RelabelledSteps &steps, const float *rewards) {
    for (std::int64_t entry = 0; judged && entry < steps.begin[steps.found]; ++entry)
        if (!std::isfinite(rewards[entry])) return entry;
    auto to = layout.window;
    for (std::int64_t m = 0; m < steps.found; ++m) {
        auto i = steps.which[m], entry = steps.begin[m] - 1;
        auto *row = out.first + i * out.stride;
        double value = 0.0, discount = 1.0;
        std::int32_t k = 0;
        std::uint8_t terminal = 0, cut = 0;
        while (entry + 1 < steps.begin[m + 1]) {
            ++entry, ++k;
            add_reward(value, discount, rewards[entry], gamma);
            terminal = steps.terminated[entry], cut = steps.truncated[entry];
            if (terminal | cut) break;
        }
        auto after = steps.after[entry];
        steps.used[m] = entry, last[i] = after, out[i][layout.mark] = 1;
        // a window of the same length has its next observation already
        if (to.next_bytes > 0 && k != get<std::int32_t>(row + to.steps)) {
            copy_bytes(row + to.next_at, ring.row(after), to.next_bytes);
            copy_bytes(row + layout.into_next, row + layout.into_obs, layout.goal_bytes);
        }
        // the row k later in the same env
        auto following = get<std::int64_t>(row + to.index) + k * ring.num_envs();
        write_window(to, row, following, k, value, bootstrap(discount, terminal), terminal, cut);
    }
    return -1;
}

namespace {

template <typename T> nb::object array_of(int type, std::initializer_list<npy_intp> shape, T *&data) {
    auto *array = PyArray_SimpleNew(static_cast<int>(shape.size()), const_cast<npy_intp *>(shape.begin()), type);
    if (!array) nb::raise_python_error();
    data = static_cast<T *>(PyArray_DATA(reinterpret_cast<PyArrayObject *>(array)));
    return nb::steal(array);
}

nb::object array_of(std::int64_t count, Vector<std::int64_t> &out) {
    out.count = count;
    return array_of(NPY_INT64, {count}, out.data);
}

}  // namespace

RelabelledSteps::RelabelledSteps(std::int64_t rows, std::int64_t n) : rows_(rows), steps_(rows * n) {
    arrays.which = array_of(rows, which), arrays.begin = array_of(rows + 1, begin);
    arrays.now = array_of(steps_, now), arrays.after = array_of(steps_, after);
    arrays.spans = array_of(NPY_INT64, {3, rows}, first);
    end = first + rows, aim = end + rows;
    rewards.count = steps_;
    arrays.rewards = array_of(NPY_FLOAT32, {steps_}, rewards.data);
    arrays.flags = array_of(NPY_UINT8, {2, steps_}, terminated);
    truncated = terminated + steps_;
    arrays.used = array_of(rows, used);
    begin[0] = 0;
}

namespace {

[[noreturn]] void refuse(const char *what) { throw nb::value_error(what); }

std::int64_t plan(const Ring &ring, const GoalLayout &layout, Places places, std::int64_t n, double gamma,
                  std::uint64_t key, double ratio, Places others, Rows out, Vector<Place> last, RelabelledSteps &steps,
                  Vector<std::uint8_t> pairs) {
    auto count = places.size();
    if (n < 1) refuse("plan_goals: `n` is at least 1");
    if (out.rows != count || last.size() != count || others.size() != count)
        refuse("plan_goals: one row, one `last` and one of the `others` a place");
    if (steps.rows() != count || steps.steps() != count * n) refuse("plan_goals: `steps` are those of another batch");
    if (!layout.fits(out.columns, ring.width)) refuse("plan_goals: the layout reaches beyond a row");
    if (pairs.size() != 2 * steps.steps() * layout.goal_bytes) refuse("plan_goals: `pairs` are two goals a step");
    if (layout.strategy == Strategy::RANDOM)
        for (auto other : others)
            if (other < 0 || other >= ring.places()) refuse("plan_goals: `others` are places of rows");
    LongWork hold(count * 2 * (ring.width + out.columns) + pairs.size() > LONG_WORK);
    return plan_goals(ring, layout, places, n, gamma, key, ratio, others, out, last, steps,
                      reinterpret_cast<std::byte *>(pairs.data));
}

// Python has had the arrays since they were planned.
bool whole(const Ring &ring, const RelabelledSteps &steps) {
    if (steps.of != ring.places() || steps.begin[0] != 0) return false;
    for (std::int64_t m = 0; m < steps.found; ++m) {
        if (steps.which[m] < 0 || steps.which[m] >= steps.rows()) return false;
        if (steps.begin[m + 1] <= steps.begin[m] || steps.begin[m + 1] > steps.steps()) return false;
    }
    for (std::int64_t entry = 0; entry < steps.begin[steps.found]; ++entry)
        if (steps.after[entry] < 0 || steps.after[entry] >= steps.of) return false;
    return true;
}

std::int64_t relabel(const Ring &ring, const GoalLayout &layout, double gamma, bool judged, Rows out,
                     Vector<Place> last, RelabelledSteps &steps, Vector<const float> rewards) {
    if (out.rows != steps.rows() || last.size() != steps.rows() || !whole(ring, steps))
        refuse("relabel_windows: `steps` are those of another batch");
    if (!layout.fits(out.columns, ring.width)) refuse("relabel_windows: the layout reaches beyond a row");
    if (rewards.size() < steps.begin[steps.found]) refuse("relabel_windows: one reward a step");
    return relabel_windows(ring, layout, gamma, judged, out, last, steps, rewards.data);
}

}  // namespace

void bind_goals(nb::module_ &module) {
    using Word = std::int64_t;
    nb::class_<GoalLayout>(module, "GoalLayout",
                           "Where goals are in rows of a ring and of a batch, in bytes, and how they are chosen.")
        .def("__init__",
             [](GoalLayout *self, WindowLayout window, Word goal_at, Word goal_bytes, Word into_obs, Word into_next,
                Word mark, int strategy, bool finished) {
                 if (strategy < 0 || strategy > static_cast<int>(Strategy::RANDOM)) refuse("no such strategy");
                 new (self) GoalLayout{window,    goal_at, goal_bytes, into_obs,
                                       into_next, mark,    Strategy{strategy}, finished};
             },
             nb::arg("window"), nb::kw_only(), nb::arg("goal_at"), nb::arg("goal_bytes"), nb::arg("into_obs"),
             nb::arg("into_next"), nb::arg("mark"), nb::arg("strategy"), nb::arg("finished"))
        .def_ro("window", &GoalLayout::window)
        .def_ro("goal_at", &GoalLayout::goal_at)
        .def_ro("goal_bytes", &GoalLayout::goal_bytes)
        .def_ro("into_obs", &GoalLayout::into_obs)
        .def_ro("into_next", &GoalLayout::into_next)
        .def_ro("mark", &GoalLayout::mark)
        .def_prop_ro("strategy", [](const GoalLayout &layout) { return static_cast<int>(layout.strategy); })
        .def_ro("finished", &GoalLayout::finished);
    auto member = [](nb::object RelabelledSteps::Arrays::*array) {
        return [array](const RelabelledSteps &steps) { return steps.arrays.*array; };
    };
    using Arrays = RelabelledSteps::Arrays;
    nb::class_<RelabelledSteps>(module, "RelabelledSteps",
                                "The steps in the windows of relabelled rows: of a batch of B rows at most B rows,\n"
                                "and M = B * n steps. Those of the m-th such row are entries begin[m] to begin[m + 1].")
        .def("__init__",
             [](RelabelledSteps *self, Word rows, Word n) {
                 if (rows < 0 || n < 1 || rows > (Word{1} << 40) / n) refuse("RelabelledSteps: no such batch");
                 new (self) RelabelledSteps(rows, n);
             },
             nb::arg("rows"), nb::arg("n"))
        .def_prop_ro("which", member(&Arrays::which), "int64 [B]: the rows of the batch.")
        .def_prop_ro("begin", member(&Arrays::begin), "int64 [B + 1].")
        .def_prop_ro("now", member(&Arrays::now), "int64 [M]: the places of the steps.")
        .def_prop_ro("after", member(&Arrays::after), "int64 [M]: the places of the rows that follow them.")
        .def_prop_ro("spans", member(&Arrays::spans),
                     "int64 [3, B]: the places of the episode's first and last live rows, and of the goal.")
        .def_prop_ro("rewards", member(&Arrays::rewards), "float32 [M]: the recorded rewards.")
        .def_prop_ro("flags", member(&Arrays::flags),
                     "uint8 [2, M]: terminated and truncated, as recorded and then with the new goal.")
        .def_prop_ro("used", member(&Arrays::used), "int64 [B]: the last step of each window with its new goal.");
    module.def("plan_goals", &plan, nb::arg("ring"), nb::arg("layout"), nb::arg("places"), nb::arg("n"),
               nb::arg("gamma"), nb::arg("key"), nb::arg("ratio"), nb::arg("others"), nb::arg("out"), nb::arg("last"),
               nb::arg("steps"), nb::arg("pairs"),
               "Read windows, and decide which of them get another goal, and which.");
    module.def("relabel_windows", &relabel, nb::arg("ring"), nb::arg("layout"), nb::arg("gamma"), nb::arg("judged"),
               nb::arg("out"), nb::arg("last"), nb::arg("steps"), nb::arg("rewards"),
               "Rewrite the windows of relabelled rows with the rewards and flags of their new goals.");
}

}  // namespace relive
