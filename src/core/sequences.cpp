#include "sequences.hpp"

#include "bindings.hpp"
#include "copies.hpp"
#include "gil.hpp"

namespace relive {

namespace {

constexpr std::int64_t AHEAD = 2;  // how many of its rows are asked for when it is known where a window starts

// Fills `facts`, with the number of rows up to the anchor in place of the lengths.
void find(const Ring &ring, Places places, std::int64_t burn_in, Matrix<std::int64_t> facts) {
    for (std::int64_t b = 0; b < places.size(); ++b) {
        std::int64_t index = ring.step[places[b]];
        auto [env, begin, number] = ring.owner_of(places[b]);
        auto start = ring.counters->window_start(index);
        auto first = std::max<std::int64_t>(start - burn_in, 0);
        auto back = index - first;  // row 0 is so many before the anchor: less than `rows` if the window is live
        facts[INDEX][b] = number * ring.num_envs() + env;
        facts[LENGTHS][b] = back + 1;
        facts[BURN_IN][b] = start - first;
        facts[ENV][b] = env;
        facts[START][b] = number - index + start;  // number - index is that of the episode's first step
        // back < rows, so one turn of the ring at most lies in between
        facts[FIRST][b] = places[b] - back + (places[b] - back < begin ? ring.rows : 0);
    }
}

// What is known of a window of `own` steps from `first` on, and the rewards of these and of those they reach to.
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
    return {first, begin, own, known, ring.step[first] == 0, ring.terminated[last], ring.truncated[last]};
}

// Writes windows `low` to `high` row by row: their steps, then the final observation if there is one, then blanks.
void write(const Ring &ring, const SequenceLayout &layout, double gamma, std::int64_t low, std::int64_t high,
           std::int64_t total, Rows out, const std::byte *blank, Matrix<std::int64_t> facts,
           Vector<std::int64_t> table, SequenceNotes &notes) {
    auto count = facts.columns, n = layout.n;
    auto to = layout;
    const auto *first = facts[FIRST], *burn_in = facts[BURN_IN];
    for (std::int64_t t = 0; t < total; ++t) {
        for (auto b = low; b < high; ++b) {
            // the next windows' rows come while these are written
            if (b + high - low < count) fetch(ring.row(first[b + high - low] + t), ring.width);
            auto &mark = notes.marks[b - low];
            auto at = to.time_first ? t * count + b : b * total + t;
            auto *row = out.first + at * out.stride;
            auto place = mark.place;
            bool beyond = t > mark.known, bounds = t == mark.known && (mark.terminated | mark.truncated);
            if (beyond || bounds) copy_short(row, blank, out.columns);
            if (table.size()) table[at] = beyond ? -1 : bounds ? -2 - place : place;
            if (beyond) continue;
            copy_short(row, ring.row(place), bounds ? to.obs_bytes : to.step_bytes);
            mark.place = ring.after(place, mark.begin);
            auto k = t < mark.own ? std::min(n, mark.known - t) : 0;  // so t + k <= known: within what was scanned
            double value = 0.0, discount = 1.0;
            const auto *rewards = notes.rewards(b - low) + t;
            for (std::int64_t j = 0; j < k; ++j) value += discount * rewards[j], discount *= gamma;
            bool last = k > 0 && t + k == mark.known;
            std::uint8_t terminal = last ? mark.terminated : 0, cut = last ? mark.truncated : 0;
            put(row + to.reward, static_cast<float>(value));
            put(row + to.terminated, terminal);
            put(row + to.truncated, cut);
            put(row + to.discount, static_cast<float>(bootstrap(discount, k == 0 || terminal)));
            put(row + to.steps, static_cast<std::int32_t>(k));
            put<std::int64_t>(row + to.next, k ? t + k : -1);
            // burn-in and what comes after the anchor do not count
            put<std::uint8_t>(row + to.mask, burn_in[b] <= t && t < mark.own);
            put<std::uint8_t>(row + to.is_start, t == 0 && mark.opens);
        }
    }
}

}  // namespace

bool SequenceLayout::fits(std::int64_t row, std::int64_t ring_row) const {
    auto inside = [&](std::int64_t at, std::int64_t bytes) { return at >= 0 && at <= row - bytes; };
    auto copied = [&](std::int64_t bytes) {
        return bytes >= 0 && bytes % 16 == 0 && bytes <= row && bytes <= ring_row;
    };
    return inside(reward, 4) && inside(terminated, 1) && inside(truncated, 1) && inside(discount, 4) &&
           inside(steps, 4) && inside(next, 8) && inside(mask, 1) && inside(is_start, 1) && copied(step_bytes) &&
           copied(obs_bytes) && row % 16 == 0 && burn_in >= 0 && n >= 1;
}

// In each env a row is not complete, so rewards reach no further than there are rows.
SequenceNotes::SequenceNotes(std::int64_t total, const SequenceLayout &layout, const Ring &ring)
    : room_(total + std::min(layout.n, ring.rows)), rewards_(new double[GROUP * room_]) {}

std::int64_t read_sequences(const Ring &ring, const SequenceLayout &layout, double gamma, Places places, Rows out,
                            const std::byte *blank, Matrix<std::int64_t> facts, Vector<std::int64_t> table,
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
        if (facts[LENGTHS][b] < 1 || facts[LENGTHS][b] > std::min(ring.rows, total)) return b;
    for (std::int64_t b = 0; b < count; ++b) fetch(ring.row(facts[FIRST][b]), AHEAD * ring.width);
    // so that rows are written next to each other, and read one after another
    auto group = layout.time_first ? SequenceNotes::GROUP : 1;
    for (std::int64_t low = 0; low < count; low += group) {
        auto high = std::min(low + group, count);
        for (auto b = low; b < high; ++b) {
            auto &mark = notes.marks[b - low];
            mark = scan(ring, facts[FIRST][b], facts[LENGTHS][b], n, notes.rewards(b - low));
            facts[LENGTHS][b] = mark.known + 1;
        }
        write(ring, layout, gamma, low, high, total, out, blank, facts, table, notes);
    }
    return -1;
}

namespace {

[[noreturn]] void refuse(const char *what) { throw nb::value_error(what); }

std::int64_t sequences(const Ring &ring, const SequenceLayout &layout, double gamma, Places places, Rows out,
                       Vector<const std::uint8_t> blank, Matrix<std::int64_t> facts, Vector<std::int64_t> table) {
    auto count = places.size();
    if (count ? out.rows % count : out.rows) refuse("read_sequences: as many rows for each of the places");
    if (facts.rows != FACTS || facts.columns != count) refuse("read_sequences: `facts` is [6, B]");
    if (table.size() && table.size() != out.rows) refuse("read_sequences: `table` has an entry for each row, or none");
    if (blank.size() != out.columns || !layout.fits(out.columns, ring.width))
        refuse("read_sequences: the layout and `blank` are those of the rows");
    if (count == 0) return -1;
    SequenceNotes notes(out.rows / count, layout, ring);
    LongWork hold(out.rows * out.columns > LONG_WORK);
    return read_sequences(ring, layout, gamma, places, out, reinterpret_cast<const std::byte *>(blank.data), facts,
                          table, notes);
}

}  // namespace

void bind_sequences(nb::module_ &module) {
    using Word = std::int64_t;
    nb::class_<SequenceLayout>(module, "SequenceLayout",
                               "Where a row of a batch of sequences has what, in bytes, and how windows are cut.")
        .def(nb::init<Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, Word, bool>(), nb::kw_only(),
             nb::arg("reward"), nb::arg("terminated"), nb::arg("truncated"), nb::arg("discount"), nb::arg("steps"),
             nb::arg("next"), nb::arg("mask"), nb::arg("is_start"), nb::arg("step_bytes"), nb::arg("obs_bytes"),
             nb::arg("burn_in"), nb::arg("n"), nb::arg("time_first"))
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
        .def_ro("time_first", &SequenceLayout::time_first);
    module.def("read_sequences", &sequences, nb::arg("ring"), nb::arg("layout"), nb::arg("gamma"), nb::arg("places"),
               nb::arg("out"), nb::arg("blank"), nb::arg("facts"), nb::arg("table"),
               "Read the windows of steps that end at places (int64 [B]) into packed rows (uint8 [T * B, W]).");
}

}  // namespace relive
