// Reads windows of steps as sequences: the rows before, the window, and its n-step targets.
#include "sequences.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <tuple>

#include "batches.hpp"
#include "bindings.hpp"
#include "copies.hpp"
#include "gil.hpp"
#include "tensors.hpp"

namespace relive {

namespace {

constexpr std::int64_t LONGEST = std::int64_t{1} << 40;  // rows of a sequence: no sum or product of it overflows
constexpr std::int64_t AHEAD = 2;  // how many of its rows are asked for when it is known where a window starts

// Fills `facts`, with the number of rows up to the anchor in place of the lengths.
void find(const Ring &ring, Places places, std::int64_t burn_in, std::span<WindowFacts> facts) {
    for (std::int64_t b = 0; b < places.size(); ++b) {
        std::int64_t at = ring.step[places[b]];
        auto [env, begin, number] = ring.owner_of(places[b]);
        auto start = ring.counters->window_start(at);
        auto first = std::max<std::int64_t>(start - burn_in, 0);
        auto back = at - first;  // row 0 is so many before the anchor: less than `rows` if the window is live
        auto &fact = facts[b];
        fact.index = number * ring.num_envs() + env;
        fact.env = env;
        fact.lengths = back + 1;
        fact.burn_in = start - first;
        fact.start = number - at + start;  // number - at is that of the episode's first step
        // back < rows, so one turn of the ring at most lies in between
        fact.first = places[b] - back + (places[b] - back < begin ? ring.rows : 0);
    }
}

// What is known of a window of `own` steps from `first` on, and the rewards of these and of those they reach to. Up to n
// sums read a reward, so it is looked up here, once; where the rewards stop, the n-step windows of all steps do.
SequenceNotes::Mark scan(const Ring &ring, Place first, std::int64_t own, std::int64_t n, double *rewards) {
    auto begin = first - remainder_of(first, ring.rows, ring.inverse);
    std::int64_t known = 0;
    Place place = first, last = first;
    // rewards beyond the anchor count only while rows are complete
    while (known < own || (known < own + n - 1 && ring.stamp[place] >= 0)) {
        rewards[known++] = ring.reward[place];
        last = place;
        place = ring.after(place, begin);
    }
    bool opens = ring.step[first] == 0;
    auto before = opens ? -1 : first > begin ? first - 1 : begin + ring.rows - 1;
    return {first, begin, before, own, known, opens, ring.terminated[last], ring.truncated[last]};
}

// Writes windows `low` to `high` row by row: their steps, then the final observation if there is one, then blanks.
void write(const Ring &ring, const SequenceLayout &layout, double gamma, std::int64_t low, std::int64_t high,
           std::int64_t total, Rows out, const std::byte *blank, std::span<const WindowFacts> facts,
           Vector<std::int64_t> table, SequenceNotes &notes) {
    auto count = std::ssize(facts), n = layout.n;
    auto &to = layout;
    for (std::int64_t t = 0; t < total; ++t) {
        for (auto b = low; b < high; ++b) {
            // the next windows' rows come while these are written
            if (b + high - low < count) fetch(ring.row(facts[b + high - low].first + t), ring.width);
            auto &mark = notes.marks[b - low];
            auto at = to.time_first ? t * count + b : b * total + t;
            auto *row = out.first + at * out.stride;
            auto place = mark.place;
            bool beyond = t > mark.known, bounds = t == mark.known && (mark.terminated | mark.truncated);
            if (beyond || bounds) copy_short(row, blank, out.columns);
            if (table.size()) table[at] = beyond ? -1 : bounds ? -2 - place : place;
            if (beyond) continue;
            copy_short(row, ring.row(place), bounds ? to.obs_bytes : to.step_bytes);
            for (auto &last : to.lasts)
                if (bounds || !last.stored)
                    copy_bytes(row + last.to, mark.before < 0 ? blank + last.to : ring.row(mark.before) + last.from,
                               last.bytes);
            mark.before = place;
            mark.place = ring.after(place, mark.begin);
            auto k = t < mark.own ? std::min(n, mark.known - t) : 0;  // so t + k <= known: within what was scanned
            // of all that was scanned only the last step may have ended its episode
            const auto *rewards = notes.rewards(b - low) + t;
            auto read = [rewards](std::int64_t j) -> WindowStep { return {rewards[j], 0, 0}; };
            auto window = sum_window(k, gamma, read, [](std::int64_t) { return true; });
            if (k > 0 && t + k == mark.known) {
                window.terminated = mark.terminated;
                window.truncated = mark.truncated;
            }
            if (k == 0) window.discount = 0.0;  // no target, so nothing to bootstrap from
            write_window(to, row, window);
            put<std::int64_t>(row + to.next, k ? t + k : -1);
            // burn-in and what comes after the anchor do not count
            put<std::uint8_t>(row + to.mask, facts[b].burn_in <= t && t < mark.own);
            put<std::uint8_t>(row + to.is_start, t == 0 && mark.opens);
        }
    }
}

}  // namespace

bool SequenceLayout::fits(std::int64_t row, std::int64_t ring_row) const {
    for (auto &last : lasts)
        if (!lies_within(last.to, last.bytes, row) || !lies_within(last.from, last.bytes, ring_row)) return false;
    auto copied = [&](std::int64_t bytes) {
        return bytes >= 0 && bytes % 16 == 0 && bytes <= row && bytes <= ring_row;
    };
    auto inside = [&](std::int64_t at, std::int64_t bytes) { return lies_within(at, bytes, row); };
    return inside(reward, 4) && inside(terminated, 1) && inside(truncated, 1) && inside(discount, 4) &&
           inside(steps, 4) && inside(next, 8) && inside(mask, 1) && inside(is_start, 1) && copied(step_bytes) &&
           copied(obs_bytes) && row % 16 == 0 && burn_in >= 0 && n >= 1;
}

// In each env a row is not complete, so rewards reach no further than there are rows.
SequenceNotes::SequenceNotes(std::int64_t total, const SequenceLayout &layout, const Ring &ring)
    : room_(total + std::min(layout.n, ring.rows)), rewards_(new double[GROUP * room_]) {}

std::int64_t read_sequences(const Ring &ring, const SequenceLayout &layout, double gamma, Places places, Rows out,
                            const std::byte *blank, std::span<WindowFacts> facts, Vector<std::int64_t> table,
                            SequenceNotes &notes) {
    auto count = places.size(), all = ring.places();
    if (count == 0) return -1;
    auto total = out.rows / count, n = std::min(layout.n, ring.rows);
    for (std::int64_t b = 0; b < count; ++b)
        if (places[b] < 0 || places[b] >= all) return b;
    // the indices, which say where windows start, come for all of them at once
    for (auto place : places) fetch(ring.row(place), ring.width);
    find(ring, places, layout.burn_in, facts);
    // checked before any row is read: a window that is not in the ring would be read across its seam
    for (std::int64_t b = 0; b < count; ++b)
        if (facts[b].lengths < 1 || facts[b].lengths > std::min(ring.rows, total)) return b;
    for (std::int64_t b = 0; b < count; ++b) fetch(ring.row(facts[b].first), AHEAD * ring.width);
    // so that rows are written next to each other, and read one after another
    auto group = layout.time_first ? SequenceNotes::GROUP : 1;
    for (std::int64_t low = 0; low < count; low += group) {
        auto high = std::min(low + group, count);
        for (auto b = low; b < high; ++b) {
            auto &mark = notes.marks[b - low];
            mark = scan(ring, facts[b].first, facts[b].lengths, n, notes.rewards(b - low));
            facts[b].lengths = mark.known + 1;
        }
        write(ring, layout, gamma, low, high, total, out, blank, facts, table, notes);
    }
    return -1;
}

namespace {

// Sequences of one ring as batches of one form: drawn, read and handed out.
class SequenceWindows {
  public:
    SequenceWindows(nb::object ring, SequenceLayout layout, std::int64_t total, nb::object fields, nb::object facts,
                    nb::object weighed, KeptVector<const std::uint8_t> blank, bool tabled, bool in_files)
        : ring_(held<Ring>(ring, "expected the compiled ring")), layout_(std::move(layout)), total_(total),
          fields_(fields_of(fields)), facts_(fields_of(facts)), weighed_(fields_of(weighed)), blank_(std::move(blank)),
          tabled_(tabled), in_files_(in_files), kept_{ring, fields, facts, weighed} {
        auto width = static_cast<std::int64_t>(fields_->width);
        require(total > 0 && total <= LONGEST && blank_.size() == width && layout_.fits(width, ring_->width),
                "the layout of sequences does not fit their rows, or those of the ring");
        require(facts_->width == sizeof(WindowFacts) && weighed_->width == sizeof(WindowFacts),
                "the facts about sequences are fields of 64 bytes each");
    }

    // The tensors [T, B, ...], or [B, T, ...], of a draw, or of places (int64 [B]), and facts [B]; the places of the
    // rows 0; and those of all rows, or None. Or the position of the first place that no window ends at.
    nb::object sample(nb::handle what, double gamma) {
        Anchors anchors(what, true);
        auto count = anchors.count(), width = static_cast<std::int64_t>(fields_->width);
        require(layout_.fits(width, ring_->width), "the ring was bound to rows of another width");
        auto known_at = Anchors::bytes({count, total_, width});  // a multiple of 16: facts lie behind the rows
        Target block(anchors.standing(), pool_, known_at + Anchors::bytes({count, sizeof(WindowFacts)}));
        auto memory = scratch<Place>(static_cast<std::size_t>(count));
        auto *found = reinterpret_cast<WindowFacts *>(block->rows() + known_at);
        std::span<WindowFacts> facts{found, static_cast<std::size_t>(count)};
        auto across = layout_.time_first;
        std::int64_t sizes[] = {across ? total_ : count, across ? count : total_};
        std::int64_t strides[] = {sizes[1] * width, width};
        Vector<std::int64_t> first, table;
        auto places = new_array({count}, first);
        auto listed = tabled_ ? new_array({sizes[0], sizes[1]}, table) : nb::none();
        SequenceNotes notes(total_, layout_, *ring_);
        bool some;
        std::int64_t bad = -1;
        {
            LongWork hold(count * total_ * width > LONG_WORK || in_files_);
            auto stride = static_cast<std::ptrdiff_t>(sizeof(WindowFacts));
            auto *facts_at = block->rows() + known_at;
            some = anchors.into({memory.get(), facts.size()},
                                {facts_at + offsetof(WindowFacts, probability), stride, count},
                                {facts_at + offsetof(WindowFacts, weight), stride, count});
            Rows out{block->rows(), width, count * total_, width};
            if (some) bad = read_sequences(*ring_, layout_, gamma, {memory.get(), count}, out,
                                           reinterpret_cast<const std::byte *>(blank_.data), facts, table, notes);
        }
        anchors.require(some, bad);
        if (bad >= 0) return nb::int_(bad);
        for (std::int64_t b = 0; b < count; ++b) first[b] = facts[b].first;
        nb::dict into;
        fields_->put(*block, PackedRows{block->rows(), sizes, strides}, into, block.slot);
        (anchors.weighed() ? weighed_ : facts_)->put(*block, block->rows() + known_at, count, into, block.slot);
        return nb::make_tuple(into, places, listed);
    }

  private:
    static const Fields *fields_of(nb::handle fields) {
        return held<Fields>(fields, "expected the fields of packed rows");
    }
    static nb::object new_array(std::initializer_list<npy_intp> shape, Vector<std::int64_t> &view) {
        auto axes = static_cast<int>(shape.size());
        auto array = array_or_raise(PyArray_SimpleNew(axes, const_cast<npy_intp *>(shape.begin()), NPY_INT64));
        view = {numbers_of<std::int64_t>(array), 1};
        for (auto size : shape) view.count *= size;
        return array;
    }

    const Ring *ring_;
    SequenceLayout layout_;
    std::int64_t total_;
    const Fields *fields_, *facts_, *weighed_;
    KeptVector<const std::uint8_t> blank_;
    bool tabled_, in_files_;  // rows may have to be read from a disk first
    Pool pool_;
    std::array<nb::object, 4> kept_;
};

}  // namespace

void bind_sequences(nb::module_ &module) {
    using Word = std::int64_t;
    nb::class_<SequenceLayout>(module, "SequenceLayout",
                               "Where a row of a batch of sequences has what, in bytes, and how windows are cut.")
        .def("__init__",
             [](SequenceLayout *self, Word reward, Word terminated, Word truncated, Word discount, Word steps,
                Word next, Word mask, Word is_start, Word step_bytes, Word obs_bytes, Word burn_in, Word n,
                bool time_first, const std::vector<std::tuple<Word, Word, Word, bool>> &lasts) {
                 new (self) SequenceLayout{reward, terminated, truncated, discount, steps, next, mask, is_start,
                                           step_bytes, obs_bytes, burn_in, n, time_first, {}};
                 for (auto [from, to, bytes, stored] : lasts) self->lasts.push_back({from, to, bytes, stored});
             },
             nb::kw_only(), nb::arg("reward"), nb::arg("terminated"), nb::arg("truncated"), nb::arg("discount"),
             nb::arg("steps"), nb::arg("next"), nb::arg("mask"), nb::arg("is_start"), nb::arg("step_bytes"),
             nb::arg("obs_bytes"), nb::arg("burn_in"), nb::arg("n"), nb::arg("time_first"), nb::arg("lasts"))
        .def_ro("reward", &SequenceLayout::reward)
        .def_ro("terminated", &SequenceLayout::terminated)
        .def_ro("truncated", &SequenceLayout::truncated)
        .def_ro("discount", &SequenceLayout::discount)
        .def_ro("steps", &SequenceLayout::steps)
        .def_ro("next", &SequenceLayout::next)
        .def_ro("mask", &SequenceLayout::mask)
        .def_ro("is_start", &SequenceLayout::is_start)
        .def_ro("step_bytes", &SequenceLayout::step_bytes)
        .def_ro("obs_bytes", &SequenceLayout::obs_bytes)
        .def_ro("burn_in", &SequenceLayout::burn_in)
        .def_ro("n", &SequenceLayout::n)
        .def_ro("time_first", &SequenceLayout::time_first)
        .def_prop_ro("lasts", [](const SequenceLayout &layout) {
            std::vector<std::tuple<Word, Word, Word, bool>> lasts;
            for (auto [from, to, bytes, stored] : layout.lasts) lasts.emplace_back(from, to, bytes, stored);
            return lasts;
        });
    nb::class_<SequenceWindows>(module, "SequenceWindows", "Reads sequences of a ring as batches of one form.")
        .def(nb::init<nb::object, SequenceLayout, Word, nb::object, nb::object, nb::object,
                      KeptVector<const std::uint8_t>, bool, bool>(),
             nb::arg("ring"), nb::arg("layout"), nb::arg("total"), nb::arg("fields"), nb::arg("facts"),
             nb::arg("weighed"), nb::arg("blank"), nb::arg("tabled") = false, nb::arg("in_files") = false)
        .def("sample", &SequenceWindows::sample, nb::arg("draw"), nb::arg("gamma"),
             "The tensors by path of a draw or of places, the places of rows 0, and those of all rows or None;\n"
             "or the position of the first place that no window ends at.");
}

}  // namespace relive
