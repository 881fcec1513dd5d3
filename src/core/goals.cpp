// Chooses which rows of a batch get another goal, and reads their windows with it.
#include "goals.hpp"

#include <nanobind/stl/vector.h>

#include <array>
#include <cmath>
#include <optional>

#include "batches.hpp"
#include "bindings.hpp"
#include "copies.hpp"
#include "gil.hpp"
#include "tensors.hpp"

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
// The end of an episode is looked up, not searched: 256 of 1 M rows take 10 µs, where walking takes 102 and bisecting
// 187. The batch that needs the table updates it, so a ring without hindsight has none.
void note_ends(const Ring &ring, std::int64_t e) {
    auto head = ring.envs[e].head;
    for (auto number = std::max(ring.seen[e], ring.oldest(e)); number < head; ++number) {
        auto episode = episode_of(ring, e, ring.place_of(number, e), number);
        ring.ends[ring.place_of(episode, e)] = static_cast<std::int32_t>(number);  // its lower 32 bits
    }
    ring.seen[e] = head;
}

struct Range {
    Number low, high;
};

// The first and the last of the rows from which the goal of row `number` is drawn; none if the last is less.
Range choice(Strategy strategy, Number number, Number first, Number end) {
    switch (strategy) {
        case FUTURE: return {number + 1, end};
        case FINAL: return {end, end};
        case EPISODE: return {first + 1, end};
        case PAST: return {first + 1, number};
        case RANDOM: break;
    }
    return {0, 0};
}

}  // namespace

bool GoalLayout::fits(std::int64_t row, std::int64_t ring_row) const {
    return window.fits(row, ring_row) && lies_within(goal_at, goal_bytes, ring_row) &&
           lies_within(into_obs, goal_bytes, row) && lies_within(into_next, goal_bytes, row) &&
           lies_within(mark, 1, row);
}

std::int64_t candidates(const Ring &ring, Places places, std::uint64_t key, double ratio, Candidate *found) {
    if (ring.ends.size() != ring.places() || ring.seen.size() != ring.num_envs()) return 0;
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < places.size(); ++i) {
        // two numbers of the stream belong to row i, so other rows do not change its goal
        if (uniform(key, GOALS + 2 * i) >= ratio) continue;
        auto [e, begin, number] = ring.owner_of(places[i]);
        // a user's sampler may name a place whose row was never written
        if (number < ring.oldest(e)) continue;
        note_ends(ring, e);
        auto noted = ring.place_of(episode_of(ring, e, places[i], number), e);
        __builtin_prefetch(&ring.ends[noted]);
        found[count++] = {i, number, e, noted};
    }
    return count;
}

std::int64_t choose_goals(const Ring &ring, const GoalLayout &layout, Places places, std::uint64_t key, Places others,
                          Rows out, const Candidate *candidates, std::int64_t count, RelabelledRow *chosen) {
    std::int64_t found = 0, steps = 0;
    for (std::int64_t m = 0; m < count; ++m) {
        auto [i, number, e, place] = candidates[m];
        std::int64_t noted = ring.ends[place];
        // an episode may have begun before the oldest live row
        auto first = number - std::min<std::int64_t>(ring.step[places[i]], number - ring.oldest(e));
        auto end = number + static_cast<std::uint32_t>(noted - number);  // an episode is shorter than 2**32
        auto [low, high] = choice(layout.strategy, number, first, end);
        const auto &env = ring.envs[e];
        if (high < low || (layout.finished && end == env.head - 1 && env.next > 0)) continue;
        Place aim;
        if (layout.strategy == RANDOM) {
            aim = ring.after(others[i], others[i] - remainder_of(others[i], ring.rows, ring.inverse));
        } else {
            auto u = uniform(key, GOALS + 2 * i + 1);  // below 1, so what is chosen is at most `high`
            aim = ring.place_of(low + static_cast<std::int64_t>(u * static_cast<double>(high - low + 1)), e);
        }
        fetch(ring.row(aim) + layout.goal_at, layout.goal_bytes);
        chosen[found++] = {i, first, end, aim, steps, 0};
        steps += get<std::int32_t>(out.first + i * out.stride + layout.window.steps);
    }
    chosen[found].begin = steps;
    return found;
}

void list_steps(const Ring &ring, const GoalLayout &layout, Places places, Rows out, const RelabelledRow *chosen,
                std::int64_t count, RelabelledStep *steps, std::byte *reached, std::byte *wanted) {
    auto size = layout.goal_bytes;
    for (std::int64_t m = 0; m < count; ++m) {
        auto i = chosen[m].row;
        auto *row = out.first + i * out.stride;
        const auto *aim = ring.row(chosen[m].aim) + layout.goal_at;  // was asked for
        auto here = places[i], begin = here - remainder_of(here, ring.rows, ring.inverse);
        copy_bytes(row + layout.into_obs, aim, size);
        copy_bytes(row + layout.into_next, aim, size);
        for (auto entry = chosen[m].begin; entry < chosen[m + 1].begin; ++entry) {
            auto after = ring.after(here, begin);
            steps[entry] = {here, after, ring.reward[here], ring.terminated[here], ring.truncated[here]};
            here = after;
            copy_bytes(reached + entry * size, ring.row(here) + layout.goal_at, size);
            copy_bytes(wanted + entry * size, aim, size);
        }
    }
}

void relabel_windows(const Ring &ring, const GoalLayout &layout, double gamma, Rows out, Vector<Place> last,
                     RelabelledRow *chosen, std::int64_t count, const RelabelledStep *steps) {
    auto to = layout.window;
    for (std::int64_t m = 0; m < count; ++m) {
        auto i = chosen[m].row, begin = chosen[m].begin;
        auto *row = out.first + i * out.stride;
        // the recorded window stopped where the stored rows do; with the new goal it may only be shorter
        auto read = [from = steps + begin](std::int64_t j) -> WindowStep {
            return {from[j].reward, from[j].terminated, from[j].truncated};
        };
        auto window = sum_window(chosen[m + 1].begin - begin, gamma, read, [](std::int64_t) { return true; });
        auto used = begin + window.steps - 1;
        auto after = steps[used].after;
        chosen[m].used = used;
        last[i] = after;
        out[i][layout.mark] = 1;
        // a window of the same length has its next observation already
        if (to.next_bytes > 0 && window.steps != get<std::int32_t>(row + to.steps)) {
            copy_bytes(row + to.next_at, ring.row(after), to.next_bytes);
            copy_bytes(row + layout.into_next, row + layout.into_obs, layout.goal_bytes);
        }
        // the row after the window's last, in the same env
        put(row + to.next_index, get<std::int64_t>(row + to.index) + window.steps * ring.num_envs());
        write_window(to, row, window);
    }
}

namespace {

// The numbers of an array, cast and made contiguous where they are not.
template <typename T> Vector<const T> numbers(nb::handle given, int type, std::int64_t count, nb::object &kept) {
    kept = array_or_raise(PyArray_FROMANY(given.ptr(), type, 1, 1, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST));
    Vector<const T> found;
    found.bind(reinterpret_cast<PyArrayObject *>(kept.ptr()));
    require(found.size() == count, "relabel: one reward, and one of each flag, a step");
    return found;
}

class GoalBatch;

// Windows of one ring as batches of one form, some of whose rows get other goals.
class GoalWindows {
  public:
    GoalWindows(nb::object ring, const GoalLayout &layout, nb::object fields, nb::object weighed,
                std::int64_t probability_at, std::int64_t weight_at, nb::object dtype, std::vector<npy_intp> shape,
                bool in_files, nb::handle large)
        : ring(held<Ring>(ring, "expected the compiled ring")), layout(layout),
          fields(held<Fields>(fields, "expected the fields of packed rows")),
          weighed(held<Fields>(weighed, "expected the fields of packed rows")), width(this->fields->width),
          large(large, *this->fields), in_files(in_files), dtype(dtype), shape(std::move(shape)),
          kept{ring, fields, weighed}, probability_at_(probability_at), weight_at_(weight_at) {
        auto within = [&](std::int64_t at, int size) { return 0 <= at && at <= width - size && at % size == 0; };
        require(layout.fits(width, this->ring->width) && this->weighed->width == this->fields->width &&
                    this->weighed->apart == this->fields->apart && width % 16 == 0 && within(probability_at, 8) &&
                    within(weight_at, 4),
                "the layout of a batch does not fit its rows, or those of the ring");
        require(PyArray_DescrCheck(dtype.ptr()), "the dtype of goals is one of NumPy");
        bool right = std::strchr("fiub", reinterpret_cast<PyArray_Descr *>(dtype.ptr())->kind);
        auto bytes = nb::cast<std::int64_t>(dtype.attr("itemsize"));
        for (auto size : this->shape) right &= size >= 0 && !__builtin_mul_overflow(bytes, size, &bytes);
        require(right && (layout.goal_bytes == 0 || bytes == layout.goal_bytes), "goals are numbers of `goal_bytes`");
    }

    nb::object draw(nb::handle what, std::int64_t steps, double gamma, Word stream, double ratio);

    const Ring *ring;
    GoalLayout layout;
    const Fields *fields, *weighed;
    std::int64_t width;
    LargeFields large;
    bool in_files;  // rows may have to be read from a disk first
    nb::object dtype;
    std::vector<npy_intp> shape;  // of a goal
    std::array<nb::object, 3> kept;

  private:
    std::int64_t probability_at_, weight_at_;
    Pool pool_;
};

// A batch that was drawn. Its memory is its own, whatever a function of goals does meanwhile.
class GoalBatch {
  public:
    const GoalWindows *of;
    nb::object owner;  // of is in there
    Target block;
    std::int64_t count;      // B
    Place places_of_ring;    // when it was drawn
    double gamma;
    bool weighed;
    std::unique_ptr<Place[]> places;  // the anchors, and `last`
    std::unique_ptr<RelabelledRow[]> rows;
    std::unique_ptr<RelabelledStep[]> steps = nullptr;
    std::int64_t chosen = 0, total = 0;
    nb::object reached = nb::none(), wanted = nb::none();

    Rows out() const { return {block->rows(), of->width, count, of->width}; }
    Vector<Place> last() const { return {places.get() + count, count}; }

    // Lists the steps of the chosen rows. Their goals become arrays of Python's, so the GIL is held in between.
    void list() {
        total = rows[chosen].begin;
        steps = scratch<RelabelledStep>(static_cast<std::size_t>(total));
        if (chosen == 0) return;
        std::byte *goals[2] = {nullptr, nullptr};
        if (of->layout.goal_bytes) {
            reached = new_goals(goals[0]);
            wanted = new_goals(goals[1]);
        }
        LongWork hold(total * of->layout.goal_bytes > LONG_WORK);
        list_steps(*of->ring, of->layout, {places.get(), count}, out(), rows.get(), chosen, steps.get(), goals[0],
                   goals[1]);
    }

    // Answers -1, or the first step whose reward is not finite; then nothing is written. None: as recorded.
    std::int64_t relabel(nb::handle rewards, nb::handle terminated, nb::handle truncated) {
        nb::object kept[3];
        std::optional<Vector<const float>> judged;
        std::optional<Vector<const std::uint8_t>> ends, cuts;
        if (!rewards.is_none()) judged = numbers<float>(rewards, NPY_FLOAT32, total, kept[0]);
        if (!terminated.is_none()) ends = numbers<std::uint8_t>(terminated, NPY_BOOL, total, kept[1]);
        if (!truncated.is_none()) cuts = numbers<std::uint8_t>(truncated, NPY_BOOL, total, kept[2]);
        // here, since arguments may run Python while they are read
        require(of->ring->places() == places_of_ring && of->layout.fits(of->width, of->ring->width),
                "relabel: the ring was bound to other rows");
        for (std::int64_t entry = 0; judged && entry < total; ++entry)
            if (!std::isfinite((*judged)[entry])) return entry;
        for (std::int64_t entry = 0; entry < total; ++entry) {
            auto &step = steps[entry];
            if (judged) step.reward = (*judged)[entry];
            if (ends) step.terminated = (*ends)[entry] != 0;
            if (cuts) step.truncated = (*cuts)[entry] != 0;
        }
        relabel_windows(*of->ring, of->layout, gamma, out(), last(), rows.get(), chosen, steps.get());
        return -1;
    }

    // The tensors by path, or as a batch of this kind of dict unless it is None. Large fields are read here, since the
    // windows end where the new goals have them end.
    nb::object fields(nb::handle kind) {
        if (!of->large.empty()) {
            LongWork hold(count * of->large.row_bytes() > LONG_WORK || of->in_files);
            of->large.read(*of->ring, {places.get(), 2 * count}, block.apart.first);
        }
        PackedRows packed{block->rows(), {&count, 1}, {&of->width, 1}, block.apart};
        auto *described = weighed ? of->weighed : of->fields;
        if (!kind.is_none()) return described->batch(*block, packed, kind, block.slot);
        nb::dict into;
        described->put(*block, packed, into, block.slot);
        return into;
    }

  private:
    nb::object new_goals(std::byte *&data) const {
        std::vector<npy_intp> sizes{total};
        sizes.insert(sizes.end(), of->shape.begin(), of->shape.end());
        auto *descr = reinterpret_cast<PyArray_Descr *>(Py_NewRef(of->dtype.ptr()));
        auto array = array_or_raise(PyArray_NewFromDescr(&PyArray_Type, descr, static_cast<int>(sizes.size()),
                                                         sizes.data(), nullptr, nullptr, 0, nullptr));
        data = numbers_of<std::byte>(array);
        return array;
    }
};

nb::object GoalWindows::draw(nb::handle what, std::int64_t steps, double gamma, Word stream, double ratio) {
    Anchors anchors(what, true);
    auto count = anchors.count();
    require(steps >= 1, "a window has at least 1 step");
    require(layout.fits(width, ring->width), "the ring was bound to rows of another width");
    large.require_all(*ring);
    auto room = static_cast<std::size_t>(count);
    Target block(anchors.standing(), pool_, Anchors::bytes({count, width}), fields->apart_bytes(count));
    GoalBatch batch{this, nb::find(*this), std::move(block), count, ring->places(), gamma, anchors.weighed(),
                    scratch<Place>(3 * room), scratch<RelabelledRow>(room + 1)};
    auto able = scratch<Candidate>(ratio > 0 ? room : 0);
    std::span<Place> places{batch.places.get(), room}, others{batch.places.get() + 2 * count, room};
    auto *first = batch.block->rows();
    bool some;
    std::int64_t bad = -1;
    {
        LongWork hold(count * 2 * (ring->width + width) > LONG_WORK || in_files);
        some = anchors.into(places, {first + probability_at_, width, count}, {first + weight_at_, width, count});
        Places found{places.data(), count};
        for (std::int64_t i = 0; some && bad < 0 && i < count; ++i)
            if (places[i] < 0 || places[i] >= ring->places()) bad = i;
        if (some && bad < 0) {
            auto drawn = ratio > 0 ? candidates(*ring, found, stream.value, ratio, able.get()) : 0;
            read_windows(*ring, layout.window, found, steps, gamma, batch.out(), batch.last());
            for (std::int64_t i = 0; i < count; ++i) batch.out()[i][layout.mark] = 0;
            // a stream of their own, so that the other random choices of a batch are those of every strategy
            bool random = ratio > 0 && layout.strategy == RANDOM;
            if (random && !draw_uniform(*ring, key(stream.value, OTHERS), 0, others))
                std::copy(places.begin(), places.end(), others.begin());
            batch.chosen = choose_goals(*ring, layout, found, stream.value, {others.data(), count}, batch.out(),
                                        able.get(), drawn, batch.rows.get());
        }
    }
    anchors.require(some, bad);
    if (bad >= 0) return nb::int_(bad);
    batch.list();
    return nb::cast(std::move(batch));
}

// A read-only array over what a batch keeps.
nb::object column(nb::handle batch, const void *first, int type, std::initializer_list<npy_intp> sizes,
                  std::initializer_list<npy_intp> strides) {
    auto axes = static_cast<int>(sizes.size());
    auto array = array_or_raise(PyArray_New(&PyArray_Type, axes, sizes.begin(), type, strides.begin(),
                                            const_cast<void *>(first), 0, NPY_ARRAY_ALIGNED, nullptr));
    set_base(array, nb::borrow(batch));
    return array;
}

// The batch that Python holds: one that was drawn.
const GoalBatch &batch_of(nb::handle self) { return *held<GoalBatch>(self, "expected a batch that was drawn"); }

template <auto MEMBER> nb::object row_member(nb::handle self) {
    const auto &batch = batch_of(self);
    return column(self, &(batch.rows.get()->*MEMBER), NPY_INT64, {batch.chosen}, {sizeof(RelabelledRow)});
}

template <auto MEMBER> nb::object step_member(nb::handle self) {
    const auto &batch = batch_of(self);
    return column(self, &(batch.steps.get()->*MEMBER), NPY_INT64, {batch.total}, {sizeof(RelabelledStep)});
}

}  // namespace

void bind_goals(nb::module_ &module) {
    using Word64 = std::int64_t;
    RELIVE_EXPORT(FUTURE, FINAL, EPISODE, PAST, RANDOM);
    nb::class_<GoalLayout>(module, "GoalLayout",
                           "Where goals are in rows of a ring and of a batch, in bytes, and how they are chosen.")
        .def("__init__",
             [](GoalLayout *self, WindowLayout window, Word64 goal_at, Word64 goal_bytes, Word64 into_obs,
                Word64 into_next, Word64 mark, int strategy, bool finished) {
                 require(strategy >= 0 && strategy <= RANDOM, "no such strategy");
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
    nb::class_<GoalBatch>(module, "GoalBatch",
                          "A batch of windows some of whose rows get other goals: M steps of C rows of B.")
        .def_ro("chosen", &GoalBatch::chosen, "C.")
        .def_ro("total", &GoalBatch::total, "M.")
        .def_prop_ro("goals", [](const GoalBatch &batch) { return nb::make_tuple(batch.reached, batch.wanted); },
                     "The goals achieved after the steps, and the new ones, [M, ...]; None where it cannot read them.")
        .def("relabel", &GoalBatch::relabel, nb::arg("rewards") = nb::none(), nb::arg("terminated") = nb::none(),
             nb::arg("truncated") = nb::none(),
             "Rewrite the windows with the rewards and flags [M] of the new goals; -1, or the first bad reward.")
        .def("fields", &GoalBatch::fields, nb::arg("kind") = nb::none(),
             "The tensors by path, or nested as this kind of dict.")
        .def_prop_ro("which", row_member<&RelabelledRow::row>, "int64 [C]: the rows of the batch.")
        .def_prop_ro("begin", row_member<&RelabelledRow::begin>, "int64 [C]: the first step of each.")
        .def_prop_ro("used", row_member<&RelabelledRow::used>, "int64 [C]: the last step of each new window.")
        .def_prop_ro("first", row_member<&RelabelledRow::first>, "int64 [C]: the number of its episode's first row.")
        .def_prop_ro("end", row_member<&RelabelledRow::end>, "int64 [C]: that of its last one.")
        .def_prop_ro("aim", row_member<&RelabelledRow::aim>, "int64 [C]: where its new goal is.")
        .def_prop_ro("now", step_member<&RelabelledStep::now>, "int64 [M]: the places of the steps.")
        .def_prop_ro("after", step_member<&RelabelledStep::after>, "int64 [M]: and of the rows that follow them.")
        .def_prop_ro("last", [](nb::handle self) {
            const auto &batch = batch_of(self);
            return column(self, batch.last().data, NPY_INT64, {batch.count}, {sizeof(Place)});
        }, "int64 [B]: the places of the rows with the next observations.")
        .def_prop_ro("rows", [](nb::handle self) {
            const auto &batch = batch_of(self);
            return column(self, batch.block->rows(), NPY_UINT8, {batch.count, batch.of->width}, {batch.of->width, 1});
        }, "uint8 [B, W]: the packed rows.");
    nb::class_<GoalWindows>(module, "GoalWindows", "Reads n-step windows of a ring some of whose rows get other goals.")
        .def(nb::init<nb::object, const GoalLayout &, nb::object, nb::object, Word64, Word64, nb::object,
                      std::vector<npy_intp>, bool, nb::handle>(),
             nb::arg("ring"), nb::arg("layout"), nb::arg("fields"), nb::arg("weighed"), nb::arg("probability_at"),
             nb::arg("weight_at"), nb::arg("dtype"), nb::arg("shape"), nb::arg("in_files") = false,
             nb::arg("large") = nb::make_tuple(),
             "Each of `large` is a field that lies apart, as `Windows` has them.")
        .def("draw", &GoalWindows::draw, nb::arg("draw"), nb::arg("steps"), nb::arg("gamma"), nb::arg("key"),
             nb::arg("ratio"),
             "The batch of a draw or of places; or the position of the first place that is no row's.");
}

}  // namespace relive
