// Counters that processes share, with the atomic instructions that keep their order on every processor.
//
// `publish` is a release: who sees the counter by `published`, an acquire, sees all that was written before it. An
// aligned int64 is written in one piece, so nobody sees half of it. A full fence lies between a change and the look at
// the mark of a bell, and setting the mark is a full fence too. So of two processes, one that changes and looks for the
// mark, and one that marks and looks for the change, at least one sees what the other did: no wake-up is lost.
//
// A bell is an int32 that a process sleeps on. Its lowest bit is 1 while somebody may sleep, the others count how often
// it rang. It wraps around.
#include <atomic>
#include <string>

#include "arrays.hpp"
#include "bindings.hpp"

namespace relive {

namespace {

using Count = std::atomic_ref<std::int64_t>;
using Bell = std::atomic_ref<std::int32_t>;
// a lock would be of one process
static_assert(Count::is_always_lock_free && Bell::is_always_lock_free);
static_assert(Count::required_alignment <= alignof(std::int64_t) && Bell::required_alignment <= alignof(std::int32_t));

template <typename T> T &at(Vector<T> words, std::int64_t place, const char *name) {
    if (place < 0 || place >= words.size())
        throw nb::index_error((std::string(name) + " has no such place").c_str());
    return words[place];
}

// A counter, after all that was read before it, and before all that is read after it.
std::int64_t seen(std::int64_t &counter) {
    // the fence holds back what was read before by plain loads: a copy of what is overwritten next
    std::atomic_thread_fence(std::memory_order_acquire);
    return Count(counter).load(std::memory_order_acquire);
}

// Count a ring and clear the mark, if the bell is marked; true if it was.
bool rung(Bell bell) {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // what changed before has reached all processors
    auto value = bell.load();
    while (value & 1) {
        // 2 for the ring, less 1 for the mark; only the largest odd value overflows, and wraps to the smallest
        auto after = static_cast<std::int32_t>(static_cast<std::uint32_t>(value) + 1);
        if (bell.compare_exchange_strong(value, after)) return true;
    }
    return false;
}

bool publish(Vector<std::int64_t> counters, std::int64_t place, std::int64_t value, Vector<std::int32_t> bells,
             std::int64_t bell) {
    auto &counter = at(counters, place, "counters");
    auto &sleepers = at(bells, bell, "bells");
    Count(counter).store(value, std::memory_order_release);
    return rung(Bell(sleepers));
}

std::int64_t published(Vector<std::int64_t> counters, std::int64_t place) {
    return seen(at(counters, place, "counters"));
}

std::int32_t mark_bell(Vector<std::int32_t> bells, std::int64_t place) {
    return Bell(at(bells, place, "bells")).fetch_or(1) | 1;
}

bool ring_bell(Vector<std::int32_t> bells, std::int64_t place) { return rung(Bell(at(bells, place, "bells"))); }

void add_count(Vector<std::int64_t> counts, std::int64_t place, std::int64_t amount) {
    Count(at(counts, place, "counts")).fetch_add(amount);
}

// The counts of a limit, at the start of a vector in shared memory. All together stay below 2**53.
constexpr std::int64_t INSERTS = 0, SAMPLES = 1;  // the sides
constexpr std::int64_t PENDING = 2;  // inserts that are counted and not in the replay yet: no sample passes for them
constexpr std::int64_t OTHERS = 3;   // inserts that others made, or may make, without counting them here
constexpr std::int64_t COUNTS = 4;
constexpr std::int64_t MOST = std::int64_t{1} << 53;

// Samples per insert, inserts before the first sample, and the least and the largest difference of
// inserts * ratio - samples.
struct Rule {
    double ratio;
    std::int64_t min_size;
    double low, high;
};

std::int64_t *limit_of(Vector<std::int64_t> counts) {
    if (counts.size() < COUNTS) throw nb::value_error("a limit has four counts");
    return counts.data;
}

std::int64_t &note_of(Vector<std::int64_t> note) {
    if (note.size() < 1) throw nb::value_error("a note of inserts has one count");
    return note[0];
}

void require_number(std::int64_t count) {
    if (count < 0 || count >= MOST) throw nb::value_error("counts stay below 2**53");
}

bool admitted(std::int64_t *counts, std::int64_t side, std::int64_t count, const Rule &rule) {
    auto &mine = counts[side], &other = counts[INSERTS + SAMPLES - side];
    auto before = seen(mine);
    while (true) {
        auto across = seen(other), after = before + count;
        bool allowed;
        if (side == SAMPLES) {
            // inserts were read first: one that is counted by then is pending until it is in
            auto ready = across - seen(counts[PENDING]);
            allowed = ready >= rule.min_size &&
                      static_cast<double>(ready) * rule.ratio - static_cast<double>(after) >= rule.low;
        } else {
            auto total = after + seen(counts[OTHERS]);
            allowed = total <= rule.min_size ||
                      static_cast<double>(total) * rule.ratio - static_cast<double>(across) <= rule.high;
        }
        if (!allowed) return false;
        if (Count(mine).compare_exchange_strong(before, after)) return true;
    }
}

bool admit(Vector<std::int64_t> counts, std::int64_t side, std::int64_t count, double ratio, std::int64_t min_size,
           double low, double high) {
    auto *limit = limit_of(counts);
    require_number(count);
    if (side != INSERTS && side != SAMPLES) throw nb::value_error("a side is INSERTS or SAMPLES");
    return admitted(limit, side, count, {ratio, min_size, low, high});
}

// A signal's handler runs before or after this call, so it finds the counts and the note in agreement.
bool admit_noted(Vector<std::int64_t> counts, Vector<std::int64_t> note, std::int64_t count, double ratio,
                 std::int64_t min_size, double low, double high) {
    auto *limit = limit_of(counts);
    auto &noted = note_of(note);
    require_number(count);
    Count pending(limit[PENDING]);
    pending.fetch_add(count);  // before the insert counts, so that no sample passes because of it
    if (!admitted(limit, INSERTS, count, {ratio, min_size, low, high})) {
        pending.fetch_sub(count);
        return false;
    }
    noted += count;
    return true;
}

void confirm(Vector<std::int64_t> counts, Vector<std::int64_t> note) {
    auto *limit = limit_of(counts);
    auto &noted = note_of(note);
    Count(limit[PENDING]).fetch_sub(noted);
    noted = 0;
}

void take_back(Vector<std::int64_t> counts, Vector<std::int64_t> note) {
    auto *limit = limit_of(counts);
    auto &noted = note_of(note);
    Count(limit[INSERTS]).fetch_sub(noted);  // first: in the other order, samples could pass in between
    Count(limit[PENDING]).fetch_sub(noted);
    noted = 0;
}

// Marks of a step.
constexpr int CUT = 1;         // it starts new episodes: those under way are interrupted before it
constexpr int FOLLOWED = 2;    // it came with its next observations
constexpr int MASKED = 4;      // some of its rows are left out
constexpr int LANE_ALONE = 8;  // a row that is left out interrupts an episode: a replay takes the step in one piece
constexpr int FINISHED = 16;   // it is none: its observations are what the newest steps led to, which become truncated
// Entries of a lane's counters, each in a cache line of its own, since each has another writer.
constexpr int COMMITTED = 0;       // how many steps the writer has committed
constexpr int DRAINED = 8;         // how many of them the owner has taken
constexpr int LANE_COUNTERS = 16;  // all entries
// The entry of the owner's bell that says how many steps a lane has to hold.
constexpr int WANTED = 1;

// A ring of S vector steps of N envs. Step `number` lies in row number % S; the writer is at most S ahead of the owner,
// so steps never overlap.
class Lane {
  public:
    // `arrays` is a relive.core.words.LaneArrays; every length is held to the others here.
    explicit Lane(nb::object arrays)
        : counters_(member<Vector<std::int64_t>>(arrays, "counters", "a lane's")),
          bell_(member<Vector<std::int32_t>>(arrays, "bell", "a lane's")),
          marks_(member<Vector<std::uint8_t>>(arrays, "marks", "a lane's")),
          terminated_(member<Matrix<const std::uint8_t>>(arrays, "terminated", "a lane's")),
          truncated_(member<Matrix<const std::uint8_t>>(arrays, "truncated", "a lane's")),
          mask_(member<Matrix<const std::uint8_t>>(arrays, "mask", "a lane's")), kept_(arrays) {
        auto alike = [&](const auto &flags) { return flags.rows == marks_.size() && flags.columns == mask_.columns; };
        if (counters_.size() != LANE_COUNTERS || bell_.size() != 2 || marks_.size() == 0 || !alike(terminated_) ||
            !alike(truncated_) || !alike(mask_))
            throw nb::value_error("the arrays of a lane do not fit each other");
    }

    int commit(std::int64_t number, int marks) {
        if (number < 0 || number >= MOST) throw nb::value_error("steps are numbered from 0 on, below 2**53");
        auto size = marks_.size();
        auto row = number % size, before = (number % size + size - 1) % size;
        int before_marks = marks_[before];
        for (std::int64_t n = 0; n < mask_.columns; ++n) {
            bool kept = is_kept(marks, row, n);
            if (kept && !(marks & FOLLOWED) && ends(row, n)) return static_cast<int>(-1 - n);
            // where a row is left out there is a step before, unless the step is CUT
            if (!kept && !(marks & CUT) && is_kept(before_marks, before, n) && !ends(before, n)) marks |= LANE_ALONE;
        }
        marks_[row] = static_cast<std::uint8_t>(marks);
        // the marks and the fields come first: who sees this count reads them
        Count(counters_[COMMITTED]).store(number + 1, std::memory_order_release);
        // what the owner wants is read after the fence, since it sets that before it marks the bell
        std::atomic_thread_fence(std::memory_order_seq_cst);
        auto wanted = Bell(bell_[WANTED]).load();
        auto held = number + 1 - Count(counters_[DRAINED]).load(std::memory_order_relaxed);
        return held >= wanted && rung(Bell(bell_[0]));
    }

  private:
    bool is_kept(int marks, std::int64_t row, std::int64_t n) const { return !(marks & MASKED) || mask_[row][n]; }
    bool ends(std::int64_t row, std::int64_t n) const { return terminated_[row][n] | truncated_[row][n]; }

    Vector<std::int64_t> counters_;
    Vector<std::int32_t> bell_;
    Vector<std::uint8_t> marks_;
    Matrix<const std::uint8_t> terminated_, truncated_, mask_;
    nb::object kept_;
};

}  // namespace

void bind_counters(nb::module_ &module) {
    using namespace nb::literals;
    RELIVE_EXPORT(INSERTS, SAMPLES, PENDING, OTHERS);
    RELIVE_EXPORT(CUT, FOLLOWED, MASKED, LANE_ALONE, FINISHED, COMMITTED, DRAINED, LANE_COUNTERS, WANTED);
    module.def("publish", &publish, "counters"_a, "place"_a, "value"_a, "bells"_a, "bell"_a,
               "Set a counter, after all that was written before, and ring a bell.\n\n"
               "``counters`` are an int64 vector and ``bells`` an int32 vector. Returns whether to wake those who "
               "sleep on the bell.");
    module.def("published", &published, "counters"_a, "place"_a,
               "A counter. What is read afterwards is at least as new, and what was read before is no newer.");
    module.def("mark_bell", &mark_bell, "bells"_a, "place"_a,
               "Note that somebody may sleep on a bell; returns its value, which any ring from now on changes.");
    module.def("ring_bell", &ring_bell, "bells"_a, "place"_a,
               "Count a ring and clear the mark, if the bell is marked; returns whether it was.");
    module.def("add_count", &add_count, "counts"_a, "place"_a, "amount"_a, "Add to a count.");
    module.def("admit", &admit, "counts"_a, "side"_a, "count"_a, "ratio"_a, "min_size"_a, "low"_a, "high"_a,
               "Count ``count`` more inserts or samples, if the limit allows them; returns whether it did.\n\n"
               "``counts`` is an int64 vector: inserts and samples so far, then pending inserts and those of others; "
               "all together below 2**53. ``side`` is INSERTS or SAMPLES. Samples pass after ``min_size`` inserts and "
               "while ``inserts * ratio - samples`` stays at least ``low``, inserts while it is at most ``high``.");
    module.def("admit_noted", &admit_noted, "counts"_a, "note"_a, "count"_a, "ratio"_a, "min_size"_a, "low"_a,
               "high"_a,
               "Count ``count`` more inserts as ``admit`` does, and as pending; ``note``, int64 ``[1]``, gets as many "
               "more.\n\nOnce they are in, ``confirm`` them. If they do not go in, ``take_back``.");
    module.def("confirm", &confirm, "counts"_a, "note"_a, "The inserts of ``note`` are in: clear it.");
    module.def("take_back", &take_back, "counts"_a, "note"_a, "The inserts of ``note`` do not go in: clear it.");
    nb::class_<Lane>(module, "Lane", "The arrays of a lane (`LaneArrays`), as compiled code holds them.")
        .def(nb::init<nb::object>(), "arrays"_a)
        .def("commit", &Lane::commit, "number"_a, "marks"_a,
             "Let others see step ``number``, which was written to its row, with the marks CUT, FOLLOWED and MASKED, "
             "as far as they hold; LANE_ALONE is found here.\n\nReturns 1 if somebody sleeps on the bell and the lane "
             "holds as many steps as it rings for, else 0. Or ``-1 - n``, if the episode of env n ended and the step "
             "is not FOLLOWED; then nothing is committed.");
}

}  // namespace relive
