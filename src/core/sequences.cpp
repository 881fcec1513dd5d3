// Reads windows of steps as sequences: the rows before, the window, and its n-step targets.
#include "sequences.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
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

// Fills `facts` of windows, with the number of rows up to the anchor in place of the lengths. Answers -1, or the first
// window that would not fit: it would be read across the ring's seam.
std::int64_t find_windows(const Ring &ring, Places places, std::int64_t burn_in, std::int64_t total,
                          std::span<WindowFacts> facts) {
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
        if (back < 0 || back >= std::min(ring.rows, total)) return b;
    }
    return -1;
}

// True if an episode ends, or was interrupted, at a row. What comes after the newest row is not known from a row.
bool ends_at(const Ring &ring, Place place, Place begin, Number number, const Env &env) {
    return number + 1 == env.head ? env.next <= 0 : ring.step[ring.after(place, begin)] == 0;
}

// Fills `facts` of chunks. Answers -1, or the first anchor that ends none.
std::int64_t find_chunks(const Ring &ring, Places places, bool own, std::int64_t total, std::span<WindowFacts> facts) {
    for (std::int64_t b = 0; b < places.size(); ++b) {
        auto place = places[b];
        auto [e, begin, number] = ring.owner_of(place);
        const auto &env = ring.envs[e];
        if (ring.stamp[place] < 0 || number < ring.oldest(e) || !ring.has_rows(number, total - 1, e)) return b;
        facts[b].index = number * ring.num_envs() + e;
        facts[b].env = e;
        facts[b].lengths = total;
        facts[b].burn_in = 0;
        bool final = false;
        // the row after the anchor is the last
        for (auto more = total - 2; more > 0; --more) {
            // an observation that is stored with its step is a row, too, and so may be the first one
            if (own && ring.step[place] == 0) final = --more == 0;
            place = ring.before(place, begin);
            --number;
        }
        if (!own) final = ends_at(ring, place, begin, number, env);
        facts[b].start = number;
        facts[b].first = final ? -2 - place : place;
    }
    return -1;
}

// The place of row 0, as facts have it.
Place shown(Place first) { return first < 0 ? -2 - first : first; }

// What a row of a batch is made of.
enum class Part { Step, Final, Nothing };  // Final: an observation alone, which an episode ended on

// The rows of a window, one after another.
class WindowRows {
  public:
    Place place = -1, before = -1;  // of the next row, and of the step before it; -1 before an episode's first

    // Up to n sums read a reward, so it is looked up here, once; where the rewards stop, the n-step windows of all steps
    // do. The length of the window becomes that of its rows.
    void start(const Ring &ring, WindowFacts &fact, std::int64_t n, double *rewards) {
        place = fact.first;
        begin_ = place - remainder_of(place, ring.rows, ring.inverse);
        step_ = ring.step[place];
        before = step_ == 0 ? -1 : ring.before(place, begin_);
        own_ = fact.lengths, burn_in_ = fact.burn_in, known_ = 0, rewards_ = rewards;
        // rewards beyond the anchor count only while rows are complete
        auto next = place, last = place;
        while (known_ < own_ || (known_ < own_ + n - 1 && ring.stamp[next] >= 0)) {
            rewards[known_++] = ring.reward[next];
            last = next;
            next = ring.after(next, begin_);
        }
        terminated_ = ring.terminated[last], truncated_ = ring.truncated[last];
        fact.lengths = known_ + 1;
    }
    Part part(std::int64_t t) const {
        if (t > known_) return Part::Nothing;
        return t == known_ && (terminated_ | truncated_) ? Part::Final : Part::Step;
    }
    // What is known of row t, and the next one.
    void note(const Ring &ring, const SequenceLayout &to, std::byte *row, std::int64_t t, std::int64_t n, double gamma) {
        auto k = t < own_ ? std::min(n, known_ - t) : 0;  // so t + k <= known_: within what was looked up
        // of all that was looked up only the last step may have ended its episode
        auto read = [rewards = rewards_ + t](std::int64_t j) -> WindowStep { return {rewards[j], 0, 0}; };
        auto window = sum_window(k, gamma, read, [](std::int64_t) { return true; });
        if (k > 0 && t + k == known_) {
            window.terminated = terminated_;
            window.truncated = truncated_;
        }
        if (k == 0) window.discount = 0.0;  // no target, so nothing to bootstrap from
        write_window(to, row, window);
        put<std::int64_t>(row + to.next, k ? t + k : -1);
        // burn-in and what comes after the anchor do not count
        put<std::uint8_t>(row + to.mask, burn_in_ <= t && t < own_);
        put<std::uint8_t>(row + to.is_start, t == 0 && step_ == 0);
        if (to.timestep >= 0) put<std::int64_t>(row + to.timestep, step_ + t);
        before = place;
        place = ring.after(place, begin_);
    }

  private:
    Place begin_ = 0;                     // of the env
    std::int64_t step_ = 0;               // the number of row 0 in its episode
    std::int64_t own_ = 0, burn_in_ = 0;  // steps up to the anchor, and how many of them are burn-in
    std::int64_t known_ = 0;  // steps with those that their rewards reach to; the row after them has an observation
    const double *rewards_ = nullptr;              // of these
    std::uint8_t terminated_ = 0, truncated_ = 0;  // of the last of them
};

// The rows of a chunk, one after another.
class ChunkRows {
  public:
    Place place = -1, before = -1;  // of the next row, and of the step before it; -1 before an episode's first

    void start(const Ring &ring, const WindowFacts &fact, bool own) {
        final_ = fact.first < 0;
        place = final_ ? -2 - fact.first : fact.first;
        begin_ = place - remainder_of(place, ring.rows, ring.inverse);
        number_ = fact.start, env_ = fact.env, own_ = own;
        before = own && final_ ? place : ring.step[place] == 0 ? -1 : ring.before(place, begin_);
        over_ = final_ && (!own || ends(ring));
    }
    Part part(std::int64_t) const { return final_ ? Part::Final : Part::Step; }
    // What is known of the row, and the next one.
    void note(const Ring &ring, const SequenceLayout &to, std::byte *row, std::int64_t, std::int64_t, double) {
        bool after = own_ && final_;  // the observation after a step, which is stored with it
        std::int64_t step = ring.step[place];
        put<std::uint8_t>(row + to.mask, 1);
        put<std::uint8_t>(row + to.is_start, step == 0 && !after);
        put<std::uint8_t>(row + to.is_last, over_);
        put<std::uint8_t>(row + to.is_terminal, over_ && before >= 0 && ring.terminated[before]);
        if (to.timestep >= 0) put<std::int64_t>(row + to.timestep, step + after);
        go_on(ring);
    }

  private:
    bool ends(const Ring &ring) const { return ends_at(ring, place, begin_, number_, ring.envs[env_]); }
    void go_on(const Ring &ring) {
        if (own_ && !final_) {
            over_ = ends(ring);
            final_ = over_ || number_ + 1 == ring.envs[env_].head;
            before = place;
            if (final_) return;
        } else {
            before = final_ ? -1 : place;
        }
        place = ring.after(place, begin_);
        ++number_;
        over_ = !own_ && ends(ring);
        final_ = over_;
    }

    Place begin_ = 0;  // of the env
    Number number_ = 0;
    std::int64_t env_ = 0;
    bool own_ = false;                   // observations are stored with the step that led to them
    bool final_ = false, over_ = false;  // the row is an observation alone; its episode ended or was interrupted there
};

// Writes sequences `low` to `high` row by row, side by side.
template <typename Source>
void write(const Ring &ring, const SequenceLayout &to, double gamma, std::int64_t low, std::int64_t high,
           std::int64_t total, Rows out, const std::byte *blank, std::span<const WindowFacts> facts,
           SequencePlaces found, std::span<Source> sources) {
    auto count = std::ssize(facts), n = to.n;
    for (std::int64_t t = 0; t < total; ++t) {
        for (auto b = low; b < high; ++b) {
            // the next ones' rows come while these are written
            if (b + high - low < count) fetch(ring.row(shown(facts[b + high - low].first) + t), ring.width);
            auto &source = sources[b - low];
            auto at = to.time_first ? t * count + b : b * total + t;
            auto *row = out.first + at * out.stride;
            auto part = source.part(t);
            auto place = source.place, before = source.before;
            if (part != Part::Step) copy_short(row, blank, out.columns);
            if (found.rows.size()) {
                found.rows[at] = part == Part::Nothing ? -1 : part == Part::Final ? -2 - place : place;
                found.before[at] = part == Part::Nothing ? -1 : before;
            }
            if (part == Part::Nothing) continue;
            bool final = part == Part::Final;
            copy_short(row, ring.row(place) + (final && to.own() ? to.own_at : 0),
                       final ? to.obs_bytes : to.step_bytes);
            for (auto &last : to.lasts)
                if (final || !last.stored)
                    copy_bytes(row + last.to, before < 0 ? blank + last.to : ring.row(before) + last.from, last.bytes);
            source.note(ring, to, row, t, n, gamma);
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
    bool known = inside(mask, 1) && inside(is_start, 1) && (timestep < 0 || inside(timestep, 8));
    bool further = across ? inside(is_last, 1) && inside(is_terminal, 1)
                          : inside(reward, 4) && inside(terminated, 1) && inside(truncated, 1) && inside(discount, 4) &&
                                inside(steps, 4) && inside(next, 8);
    return known && further && copied(step_bytes) && copied(obs_bytes) && row % 16 == 0 && burn_in >= 0 && n >= 1 &&
           (!own() || lies_within(own_at, obs_bytes, ring_row));
}

// In each env a row is not complete, so rewards reach no further than there are rows.
SequenceRewards::SequenceRewards(std::int64_t total, const SequenceLayout &layout, const Ring &ring)
    : room_(layout.across ? 0 : total + std::min(layout.n, ring.rows)), rewards_(new double[GROUP * room_]) {}

std::int64_t read_sequences(const Ring &ring, const SequenceLayout &layout, double gamma, Places places, Rows out,
                            const std::byte *blank, std::span<WindowFacts> facts, SequencePlaces found,
                            SequenceRewards &rewards) {
    auto count = places.size(), all = ring.places();
    if (count == 0) return -1;
    auto total = out.rows / count, n = std::min(layout.n, ring.rows);
    for (std::int64_t b = 0; b < count; ++b)
        if (places[b] < 0 || places[b] >= all) return b;
    // the indices, which say where windows start, come for all of them at once
    for (auto place : places) fetch(ring.row(place), ring.width);
    auto bad = layout.across ? find_chunks(ring, places, layout.own(), total, facts)
                             : find_windows(ring, places, layout.burn_in, total, facts);
    if (bad >= 0) return bad;  // before any row is read
    for (std::int64_t b = 0; b < count; ++b) fetch(ring.row(shown(facts[b].first)), AHEAD * ring.width);
    // so that rows are written next to each other, and read one after another
    auto group = layout.time_first ? SequenceRewards::GROUP : 1;
    std::array<WindowRows, SequenceRewards::GROUP> windows;
    std::array<ChunkRows, SequenceRewards::GROUP> chunks;
    for (std::int64_t low = 0; low < count; low += group) {
        auto high = std::min(low + group, count);
        if (layout.across) {
            for (auto b = low; b < high; ++b) chunks[b - low].start(ring, facts[b], layout.own());
            write<ChunkRows>(ring, layout, gamma, low, high, total, out, blank, facts, found, chunks);
        } else {
            for (auto b = low; b < high; ++b) windows[b - low].start(ring, facts[b], n, rewards.of(b - low));
            write<WindowRows>(ring, layout, gamma, low, high, total, out, blank, facts, found, windows);
        }
    }
    return -1;
}

void SequenceColumn::read(const SequencePlaces &found, Vector<Place> memory, Rows out) const {
    for (std::int64_t i = 0; i < out.rows; ++i)
        memory[i] = found.rows[i] < 0 ? -1 : before ? found.before[i] : found.rows[i];
    gather_rows(step, {memory.data, out.rows}, out, 0, out.columns);
    for (std::int64_t i = 0; i < out.rows; ++i) {
        if (found.rows[i] >= 0) continue;
        auto *to = out.first + i * out.stride;
        auto place = found.rows[i] == -1 || !final.first ? -1 : final_before ? found.before[i] : -2 - found.rows[i];
        if (place >= 0) copy_bytes(to, final.first + place * final.stride, out.columns);
        else if (fill) std::memset(to, fill, out.columns);
    }
}

namespace {

// Sequences of one ring as batches of one form: drawn, read and handed out.
class SequenceWindows {
  public:
    SequenceWindows(nb::object ring, SequenceLayout layout, std::int64_t total, nb::object fields, nb::object facts,
                    nb::object weighed, KeptVector<const std::uint8_t> blank, bool tabled, bool in_files,
                    nb::handle columns, nb::handle states)
        : ring_(held<Ring>(ring, "expected the compiled ring")), layout_(std::move(layout)), total_(total),
          fields_(fields_of(fields)), facts_(fields_of(facts)), weighed_(fields_of(weighed)), blank_(std::move(blank)),
          tabled_(tabled), in_files_(in_files), kept_{ring, fields, facts, weighed} {
        auto width = static_cast<std::int64_t>(fields_->width);
        require(total > 0 && total <= LONGEST && blank_.size() == width && layout_.fits(width, ring_->width),
                "the layout of sequences does not fit their rows, or those of the ring");
        require(!layout_.across || total > 1, "a chunk has at least 2 rows");
        require(facts_->width == sizeof(WindowFacts) && weighed_->width == sizeof(WindowFacts),
                "the facts about sequences are fields of 64 bytes each");
        std::vector<std::size_t> large, small;
        for (nb::handle one : columns) {
            nb::tuple fact(one);
            require(fact.size() == 5, "a large field is (rows of bytes, before, final rows or None, before, fill)");
            SequenceColumn column{{}, nb::cast<bool>(fact[1]), {}, nb::cast<bool>(fact[3]),
                                  nb::cast<std::uint8_t>(fact[4]), {fact[0], fact[2]}};
            column.step = rows_of(fact[0]);
            if (!fact[2].is_none()) column.final = rows_of(fact[2]);
            require(fact[2].is_none() || column.final.columns == column.step.columns,
                    "a large field: its final rows are of another size");
            large.push_back(static_cast<std::size_t>(column.step.columns));
            columns_.push_back(std::move(column));
        }
        for (nb::handle one : states) {
            states_.push_back(rows_of(one));
            small.push_back(static_cast<std::size_t>(states_.back().columns));
            kept_states_.append(one);
        }
        require(large == fields_->apart && small == facts_->apart && small == weighed_->apart,
                "large fields: expected one for each field that lies apart, of as many bytes");
    }

    // The tensors [T, B, ...], or [B, T, ...], of a draw, or of places (int64 [B]), and facts [B]; the places of the
    // rows 0; and those of all rows, and of the steps before them, or None. Or the position of the first place that no
    // window ends at.
    nb::object sample(nb::handle what, double gamma) {
        Anchors anchors(what, true);
        auto count = anchors.count(), width = static_cast<std::int64_t>(fields_->width);
        require(layout_.fits(width, ring_->width), "the ring was bound to rows of another width");
        require_all();
        auto known_at = Anchors::bytes({count, total_, width});  // a multiple of 16: facts lie behind the rows
        auto states_at = fields_->apart_bytes(count * total_), large = states_at;
        if (__builtin_add_overflow(large, facts_->apart_bytes(count), &large)) throw std::bad_alloc();
        Target block(anchors.standing(), pool_, known_at + Anchors::bytes({count, sizeof(WindowFacts)}), large);
        auto memory = scratch<Place>(static_cast<std::size_t>(2 * count));
        auto *known = reinterpret_cast<WindowFacts *>(block->rows() + known_at);
        std::span<WindowFacts> facts{known, static_cast<std::size_t>(count)};
        auto across = layout_.time_first;
        std::int64_t sizes[] = {across ? total_ : count, across ? count : total_};
        std::int64_t strides[] = {sizes[1] * width, width};
        SequencePlaces found;
        auto rows = tabled_ ? new_array({sizes[0], sizes[1]}, found.rows) : nb::none();
        auto before = tabled_ ? new_array({sizes[0], sizes[1]}, found.before) : nb::none();
        Vector<Place> first{memory.get() + count, count};
        auto asked = columns_.empty() ? 0 : count * total_;
        auto table = scratch<Place>(static_cast<std::size_t>(3 * asked));
        if (asked) found = {{table.get(), asked}, {table.get() + asked, asked}};
        SequenceRewards rewards(total_, layout_, *ring_);
        bool some;
        std::int64_t bad = -1;
        {
            LongWork hold(count * total_ * width + static_cast<std::int64_t>(large) > LONG_WORK || in_files_);
            auto stride = static_cast<std::ptrdiff_t>(sizeof(WindowFacts));
            auto *facts_at = block->rows() + known_at;
            some = anchors.into({memory.get(), facts.size()},
                                {facts_at + offsetof(WindowFacts, probability), stride, count},
                                {facts_at + offsetof(WindowFacts, weight), stride, count});
            Rows out{block->rows(), width, count * total_, width};
            if (some) bad = read_sequences(*ring_, layout_, gamma, {memory.get(), count}, out,
                                           reinterpret_cast<const std::byte *>(blank_.data), facts, found, rewards);
            if (some && bad < 0) {
                for (std::int64_t b = 0; b < count; ++b) first[b] = facts[b].first;
                read_large(found, {table.get() + 2 * asked, asked}, {first.data, count}, block.apart.first);
            }
        }
        anchors.require(some, bad);
        if (bad >= 0) return nb::int_(bad);
        nb::dict into;
        fields_->put(*block, PackedRows{block->rows(), sizes, strides, block.apart}, into, block.slot);
        auto &known_fields = anchors.weighed() ? weighed_ : facts_;
        std::int64_t step = sizeof(WindowFacts);
        Apart behind{block.apart.memory, block.apart.first + states_at};
        known_fields->put(*block, PackedRows{block->rows() + known_at, {&count, 1}, {&step, 1}, behind}, into,
                          block.slot);
        Vector<Place> copied;
        auto firsts = new_array({count}, copied);
        std::copy(first.begin(), first.end(), copied.begin());
        return nb::make_tuple(into, firsts, rows, before);
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

    static Bytes rows_of(nb::handle given) {
        Bytes rows;
        if (!nb::try_cast(given, rows)) throw nb::type_error("a large field: expected rows of bytes");
        return rows;
    }
    void require_all() const {
        auto all = ring_->places();
        bool right = true;
        for (auto &column : columns_)
            right &= column.step.rows >= all && (!column.final.first || column.final.rows >= all);
        for (auto &state : states_) right &= state.rows >= all;
        require(right, "the ring was bound to more rows");
    }
    // Columns of large fields, and then of states, one after another from `to` on.
    void read_large(const SequencePlaces &found, Vector<Place> memory, Places first, std::byte *to) const {
        for (auto &column : columns_) {
            auto size = column.step.columns;
            column.read(found, memory, {to, size, memory.size(), size});
            to += Fields::to_next(static_cast<std::size_t>(memory.size() * size));
        }
        for (auto &state : states_) {
            gather_rows(state, first, {to, state.columns, first.size(), state.columns}, 0, state.columns);
            to += Fields::to_next(static_cast<std::size_t>(first.size() * state.columns));
        }
    }

    const Ring *ring_;
    SequenceLayout layout_;
    std::int64_t total_;
    const Fields *fields_, *facts_, *weighed_;
    KeptVector<const std::uint8_t> blank_;
    bool tabled_, in_files_;  // rows may have to be read from a disk first
    std::vector<SequenceColumn> columns_;
    std::vector<Bytes> states_;  // of the first rows
    nb::list kept_states_;
    Pool pool_;
    std::array<nb::object, 4> kept_;
};

}  // namespace

void bind_sequences(nb::module_ &module) {
    using Word = std::int64_t;
    nb::class_<SequenceLayout>(module, "SequenceLayout",
                               "Where a row of a batch of sequences has what, in bytes, and how windows are cut.")
        .def("__init__",
             [](SequenceLayout *self, Word mask, Word is_start, Word timestep, Word reward, Word terminated,
                Word truncated, Word discount, Word steps, Word next, Word is_last, Word is_terminal, Word step_bytes,
                Word obs_bytes, Word own_at, Word burn_in, Word n, bool time_first, bool across,
                const std::vector<std::tuple<Word, Word, Word, bool>> &lasts) {
                 new (self) SequenceLayout{mask, is_start, timestep, reward, terminated, truncated, discount, steps,
                                           next, is_last, is_terminal, step_bytes, obs_bytes, own_at, burn_in, n,
                                           time_first, across, {}};
                 for (auto [from, to, bytes, stored] : lasts) self->lasts.push_back({from, to, bytes, stored});
             },
             nb::kw_only(), nb::arg("mask"), nb::arg("is_start"), nb::arg("timestep") = -1, nb::arg("reward") = -1,
             nb::arg("terminated") = -1, nb::arg("truncated") = -1, nb::arg("discount") = -1, nb::arg("steps") = -1,
             nb::arg("next") = -1, nb::arg("is_last") = -1, nb::arg("is_terminal") = -1, nb::arg("step_bytes"),
             nb::arg("obs_bytes"), nb::arg("own_at") = -1, nb::arg("burn_in") = 0, nb::arg("n") = 1,
             nb::arg("time_first"), nb::arg("across") = false, nb::arg("lasts"))
        .def_ro("mask", &SequenceLayout::mask)
        .def_ro("is_start", &SequenceLayout::is_start)
        .def_ro("timestep", &SequenceLayout::timestep)
        .def_ro("reward", &SequenceLayout::reward)
        .def_ro("terminated", &SequenceLayout::terminated)
        .def_ro("truncated", &SequenceLayout::truncated)
        .def_ro("discount", &SequenceLayout::discount)
        .def_ro("steps", &SequenceLayout::steps)
        .def_ro("next", &SequenceLayout::next)
        .def_ro("is_last", &SequenceLayout::is_last)
        .def_ro("is_terminal", &SequenceLayout::is_terminal)
        .def_ro("step_bytes", &SequenceLayout::step_bytes)
        .def_ro("obs_bytes", &SequenceLayout::obs_bytes)
        .def_ro("own_at", &SequenceLayout::own_at)
        .def_ro("burn_in", &SequenceLayout::burn_in)
        .def_ro("n", &SequenceLayout::n)
        .def_ro("time_first", &SequenceLayout::time_first)
        .def_ro("across", &SequenceLayout::across)
        .def_prop_ro("lasts", [](const SequenceLayout &layout) {
            std::vector<std::tuple<Word, Word, Word, bool>> lasts;
            for (auto [from, to, bytes, stored] : layout.lasts) lasts.emplace_back(from, to, bytes, stored);
            return lasts;
        });
    nb::class_<SequenceWindows>(module, "SequenceWindows", "Reads sequences of a ring as batches of one form.")
        .def(nb::init<nb::object, SequenceLayout, Word, nb::object, nb::object, nb::object,
                      KeptVector<const std::uint8_t>, bool, bool, nb::handle, nb::handle>(),
             nb::arg("ring"), nb::arg("layout"), nb::arg("total"), nb::arg("fields"), nb::arg("facts"),
             nb::arg("weighed"), nb::arg("blank"), nb::arg("tabled") = false, nb::arg("in_files") = false,
             nb::arg("columns") = nb::make_tuple(), nb::arg("states") = nb::make_tuple(),
             "Each of `columns` is one of `fields` that lies apart, in their order: its rows (uint8 [R, W]), whether a\n"
             "step has that of the step before, those of observations that an episode ended on or None, whether these\n"
             "have that of the step before, and each byte where there is none. `states` are the rows of the fields of\n"
             "`facts` that lie apart, which are those of the first row.")
        .def("sample", &SequenceWindows::sample, nb::arg("draw"), nb::arg("gamma"),
             "The tensors by path of a draw or of places, the places of rows 0, and those of all rows and of the steps\n"
             "before them, or None; or the position of the first place that no window ends at.");
}

}  // namespace relive
