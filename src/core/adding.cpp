// Adds rows to a ring, one env after another, and notes beforehand how a change that a kill breaks off is taken back.
#include "adding.hpp"

#include <cmath>

#include "bindings.hpp"
#include "copies.hpp"
#include "gil.hpp"

namespace relive {

namespace {

// The words of a note of how to undo a change; files hold them in this order.
constexpr std::int64_t UNDO_KIND = 0;                           // written last, and cleared first
constexpr std::int64_t UNDO_ENVS = 1;                           // how many envs have an entry
constexpr std::int64_t UNDO_ROWS = 2;                           // how many rows have one
constexpr std::int64_t UNDO_COUNTERS = 3;                       // the counters from before the change
constexpr std::int64_t UNDO_START = UNDO_COUNTERS + COUNTERS;   // entries of envs; those of rows after room for N
constexpr std::int64_t UNDO_ENV = 6;                            // the env, its four words before, its head after
constexpr std::int64_t UNDO_AFTER = 5;
constexpr std::int64_t UNDO_ROW = 3;                            // a row's place, its stamp, its step and order
constexpr std::int64_t UNDO_NONE = 0;
constexpr std::int64_t UNDO_ADDING = 1;
constexpr std::int64_t UNDO_REBUILD = 2;                         // all that can be drawn changes, and is found anew

// The kind of each row, and the first row that ended its episode, or -1.
std::int64_t note_kinds(const Ring &ring, StagedRows &given, int mode) {
    std::int64_t first = -1;
    for (std::int64_t i = given.size(); i-- > 0;) {
        bool done = given.ended(i);
        if (given.leaves_out(i)) {
            // what ended it is hidden, but the row before it needs its observation: stored as a step without an end
            bool hidden = mode < ALONE && given.truncated[i] && ring.envs[given.envs[i]].next > 0;
            given.kinds[i] = hidden ? Kind::GoesOn : Kind::LeftOut;
            continue;
        }
        given.kinds[i] = mode == ALONE ? Kind::Alone
                         : mode == LINKED ? (done ? Kind::Last : Kind::Linked) : done ? Kind::Ended : Kind::GoesOn;
        if (done) first = i;
    }
    return first;
}

// A row's bookkeeping in three words; returns the word after them.
std::int64_t note_row(const Ring &ring, std::int64_t at, Place place) {
    auto &undo = ring.undo;
    undo[at] = place;
    undo[at + 1] = ring.stamp[place];
    // the step in the upper 32 bits, the order in the lower ones, whatever their signs
    undo[at + 2] = static_cast<std::int64_t>(static_cast<std::uint64_t>(ring.step[place]) << 32 |
                                             static_cast<std::uint32_t>(ring.order[place]));
    return at + UNDO_ROW;
}

// Note what will change when rows of these kinds are added; a note that is there is kept, of the same rows. True if
// rows would be overwritten that are not in reserve, or there is no room for the entries: then nothing is noted.
//
// A kill at any instant leaves a note that counts, of everything that may have changed, or none and nothing changed.
//
// Checking a step and storing it are two calls for a replay in files: the second lets go of the GIL however small the
// step is, as a row may have to come from the disk.
bool note_undo(const Ring &ring, StagedRows &given) {
    auto &undo = ring.undo;
    auto envs = ring.num_envs(), count = given.size();
    if (undo[UNDO_KIND] != UNDO_NONE) return false;
    auto row_start = UNDO_START + UNDO_ENV * envs;
    // a row and its final observation take two entries; the row before the first one of each env takes one more
    if (undo.size() < row_start + UNDO_ROW * (2 * count + std::min(envs, count))) return true;
    auto &heads = given.heads;
    for (auto e : given.envs) heads[e] = ring.envs[e].head;
    auto at = UNDO_START, row_at = row_start;
    for (std::int64_t i = 0; i < count; ++i) {
        auto e = given.envs[i];
        auto number = heads[e];
        const Env &env = ring.envs[e];
        if (number == env.head) {  // its first row in the call, as each raises the head
            undo[at] = e;
            undo[at + 1] = env.head;
            undo[at + 2] = env.tail;
            undo[at + 3] = env.next;
            undo[at + 4] = env.count;
            at += UNDO_ENV;
            // the row before: this call completes it, so its stamp and order change
            if (number > 0) row_at = note_row(ring, row_at, ring.place_of(number - 1, e));
        }
        row_at = note_row(ring, row_at, ring.place_of(number, e));
        bool ended = given.kinds[i] == Kind::Ended;
        if (ended) row_at = note_row(ring, row_at, ring.place_of(number + 1, e));
        heads[e] = number + 1 + ended;
    }
    for (auto entry = UNDO_START; entry < at; entry += UNDO_ENV) {
        auto e = undo[entry];
        // rows below head - rows are overwritten; a power cut may bring back only those that are not in reserve
        if (e >= ring.reserve.size() || heads[e] - ring.rows > ring.reserve[e]) return true;
        undo[entry + UNDO_AFTER] = heads[e];
    }
    auto *counters = reinterpret_cast<const std::int64_t *>(ring.counters);
    std::copy(counters, counters + COUNTERS, &undo[UNDO_COUNTERS]);
    undo[UNDO_ENVS] = (at - UNDO_START) / UNDO_ENV;
    undo[UNDO_ROWS] = (row_at - row_start) / UNDO_ROW;
    in_order();  // first the entries are whole, then the kind says that they count
    undo[UNDO_KIND] = UNDO_ADDING;
    in_order();  // and the kind is written before anything else changes
    return false;
}

// The bookkeeping of rows that are added. What is counted stays in this object until the end: reading it back at once
// would wait for the rows written before, one by one.
class Adding {
  public:
    Adding(const Ring &ring, StagedRows &given)
        : ring_(ring), given_(given), rows_(ring.rows), inverse_(ring.inverse), step_(ring.step), stamp_(ring.stamp),
          order_(ring.order), together_(together(ring)), completed_(ring.counters->completed),
          drawable_(ring.counters->drawable), episodes_(ring.counters->episodes), history_(ring.counters->history),
          stamps_(ring.ranges.stamps), tails_(ring.counters->has_tails()), across_(ring.counters->across()),
          listed_(given.where.size() > 0) {}

    // Issue an id for a new row of each env in turn, and one for the final observation where the episode ended. A row
    // completes the transition before it, if that belongs to the same episode; the final observation of an Ended row
    // completes that row; Alone, Linked and Last ones complete themselves. Returns the number of events.
    std::int64_t add(const RowBytes &store) {
        auto count = given_.size();
        if (count > 1)
            for (std::int64_t i = 0; i < std::min(count, together_); ++i) expect(i);
        for (std::int64_t low = 0; low < count; low += together_) {
            auto end = std::min(low + together_, count);
            for (auto i = low; i < end; ++i) {
                if (i + together_ < count) expect(i + together_);
                add_row(i);
            }
            store(low, end - low);
        }
        for (std::int64_t i = 0; given_.mask && i < given_.size(); ++i)
            if (given_.leaves_out(i)) interrupt(given_.envs[i]);
        auto &counters = *ring_.counters;
        counters.completed = completed_;
        counters.drawable = drawable_;
        counters.episodes = episodes_;
        ring_.ranges.stamps = stamps_;
        return events_;
    }

  private:
    // Ask for row i, so that it comes while the `together_` rows before it are written.
    void expect(std::int64_t i) const {
        auto e = given_.envs[i];
        // a guess, which is right if all envs come in turn, as they do most often: rows of env e that come before it
        auto turn = given_.size() > ring_.num_envs() ? std::min(i, together_) / ring_.num_envs() : 0;
        auto number = ring_.envs[e].head + turn;
        auto begin = e * rows_, place = ring_.place_of(number, e);
        fetch(ring_.row(place), static_cast<std::size_t>(ring_.width));
        __builtin_prefetch(&stamp_[(place > begin ? place : begin + rows_) - 1]);  // of the row that it completes
        // the next row that has its history
        if (history_ > 0 && history_ < rows_) __builtin_prefetch(&step_[ring_.place_of(number + 1 + history_, e)]);
    }

    // The first rows of an env: an episode of two steps, its final observation, and the first step of the next one.
    //
    //   number   0    1    2    3
    //   step     0    1    2    0     of a boundary row, the length of its episode
    //   stamp    0    1   -3   -3     of a row that is not complete, -1 - 2: two were complete before it
    //   order    0    1    2    2     of the boundary row as well: row 1 counts as complete before it
    //
    // Row 1 completes row 0, and its final observation completes row 1. Row 3 waits for the next step.
    void add_row(std::int64_t i) {
        auto &stamp = stamp_;
        auto &step = step_, &order = order_;
        auto e = given_.envs[i];
        auto kind = given_.kinds[i];
        if (kind == Kind::LeftOut) return void(given_.places[i] = given_.finals[i] = -1);
        Env env = ring_.envs[e];
        auto begin = e * rows_;
        auto number = env.head, count = env.count;
        auto index = env.next < LONGEST ? env.next : 0;  // so index + 1 still fits the int32 of `step`
        bool cut = index + 1 >= LONGEST && kind == Kind::GoesOn;
        auto place = begin + remainder_of(number, rows_, inverse_);
        write(place, number, env.tail, begin, index);
        // the number of the oldest row which is live once `number` is written
        auto oldest = std::max(env.tail, number + 1 - rows_);
        // negative until it is complete: -1 - s for s completed before it, so the order of time stays
        step[place] = static_cast<std::int32_t>(index);
        stamp[place] = -1 - completed_;
        if (index > 0 && kind < Kind::Alone) {  // the row before is of the same episode, and is complete now
            auto before = (place > begin ? place : begin + rows_) - 1;
            stamp[before] = completed_++;
            order[before] = lower(count++);
            bool opens = has_history(e, number - 1, index - 1, oldest);
            open(before, opens && ((cut && tails_) || ring_.ends_full(index - 1)));
        }
        order[place] = lower(count);
        ++number;
        index = cut ? 0 : index + 1;
        given_.finals[i] = -1;
        auto own = number - 1;
        if (kind == Kind::Ended) {
            auto final = place + 1 < begin + rows_ ? place + 1 : begin;
            write(final, number, env.tail, begin, index);
            oldest = std::max(env.tail, number + 1 - rows_);
            // the transition at `place` counts as complete before it: one more than `completed` and `count`. A boundary
            // row has the length of its episode as `step`, and never a stamp of its own
            step[final] = static_cast<std::int32_t>(index);
            stamp[final] = -2 - completed_;
            order[final] = lower(count + 1);
            ++number;
            given_.finals[i] = final;
            ++episodes_;
        }
        if (kind != Kind::GoesOn) {
            stamp[place] = completed_++;
            ++count;
            open(place, has_history(e, own, index - 1, oldest) && (tails_ || ring_.ends_full(index - 1)));
            index = kind == Kind::Linked && index < LONGEST ? index : 0;
            episodes_ += kind == Kind::Last;
        }
        given_.places[i] = place;
        Env &stored = ring_.envs[e];
        stored.head = number;
        stored.next = index;
        stored.count = count;
    }

    // The episode of an env does not go on: the last complete row may then end a window, although that is shorter.
    void interrupt(std::int64_t e) {
        auto &env = ring_.envs[e];
        auto last = env.head - 2;  // the newest row waits for its next observation
        bool same = ring_.counters->length > 1 && env.next > 1 && last >= ring_.oldest(e);
        auto place = same ? ring_.place_of(last, e) : -1;
        same = same && !ring_.can_draw(place, last, e);
        env.next = 0;
        open(place, same && ring_.can_draw(place, last, e));
    }

    // Ring::has_history of row `number`, the `index`-th of its episode, while `oldest` is the oldest row.
    bool has_history(std::int64_t e, Number number, std::int64_t index, Number oldest) const {
        if (!across_) return number - std::min(index, history_) >= oldest;
        auto begins = number - history_ + (history_ > 0);
        return begins > oldest || (begins == oldest && (history_ == 0 || step_[ring_.place_of(begins, e)] == 0));
    }

    // Row `number` comes to `place`: the row that lies there makes way, if it is live.
    void write(Place place, Number number, Number tail, Place begin, std::int64_t following) {
        if (auto old = number - rows_; old >= tail) close(place, old, number, begin, following);
    }

    // Row `old` makes way for `number`. The rows that can no longer be drawn are itself and those it was history of:
    // the row `history` after it; or, if it is the first of its episode, all of its episode up to that one.
    // `following` is the index of row `number` in its episode.
    //
    // With a history of 2 and 8 rows: when row 8 overwrites row 0, the first of its episode, rows 0, 1 and 2 can be
    // drawn no longer. When row 9 overwrites row 1, only row 3 follows: rows 1 and 2 could not be drawn any more.
    void close(Place place, Number old, Number number, Place begin, std::int64_t following) {
        if (history_ == 0) return close_one(place, old, number, begin, following);  // nothing waits for its index then
        if (across_) return close_across(place, old, number, begin, following);
        auto last = std::min(old + history_, number - 1);
        for (auto other = step_[place] == 0 ? old : old + history_; other <= last; ++other) {
            auto at = place + (other - old);  // other - old < rows, so one turn brings it back
            at = at < begin + rows_ ? at : at - rows_;
            if (other - std::min<std::int64_t>(step_[at], history_) != old) break;
            close_one(at, other, number, begin, following);
        }
    }

    // The same where rows before an anchor may be of any episode: the anchor that is read from row `old` on, if that
    // begins an episode, and the one that is read from the row after it on, if that does not.
    void close_across(Place place, Number old, Number number, Place begin, std::int64_t following) {
        auto after = ring_.after(place, begin);
        bool first = step_[place] == 0, second = old + 1 < number && step_[after] != 0;
        for (auto back : {history_ - 1, history_})
            if (auto other = old + back; (back == history_ ? second : first) && other < number) {
                auto at = place + back;  // back < rows, so one turn brings it back
                close_one(at < begin + rows_ ? at : at - rows_, other, number, begin, following);
            }
    }

    void close_one(Place place, Number number, Number head, Place begin, std::int64_t following) {
        auto stamp = stamp_[place];
        if (stamp < 0 || !ring_.ends_window(place, number, begin, head, following)) return;
        --drawable_;
        stamps_ -= static_cast<std::uint64_t>(stamp);
        list(place, 0);
    }

    // A transition is complete, and can be drawn now or not.
    void open(Place place, bool opens) {
        if (!opens) return;
        ++drawable_;
        stamps_ += static_cast<std::uint64_t>(stamp_[place]);
        list(place, 1);
    }

    void list(Place place, std::uint8_t opens) {
        if (listed_) {
            given_.where[events_] = place;
            given_.opens[events_++] = opens;
        }
    }

    static std::int32_t lower(std::int64_t count) { return static_cast<std::int32_t>(count); }  // the lower 32 bits

    const Ring &ring_;
    StagedRows &given_;
    // of the ring, which any store might change as far as the compiler knows
    Place rows_;
    double inverse_;
    Column<std::int32_t> step_;
    Column<std::int64_t> stamp_;
    Column<std::int32_t> order_;
    std::int64_t together_, completed_, drawable_, episodes_, history_, events_ = 0;
    std::uint64_t stamps_;
    bool tails_, across_, listed_;
};

}  // namespace

void require_mode(int mode) {
    if (mode < NO_FINALS || mode > LINKED) throw nb::value_error("there is no such way of adding rows");
}

void prepare(const Ring &ring, StagedRows &given) {
    auto count = given.size(), envs = ring.num_envs();
    if (given.width != ring.width || count != given.envs.size())
        throw nb::value_error("staged rows: these are not rows of this ring");
    for (auto e : given.envs)
        if (e < 0 || e >= envs) throw nb::index_error("staged rows: there is no such env");
    // every row that is written closes its own history at most, and all together no more than there is
    if (auto room = given.where.size(); room) {
        auto most = ring.places() + 4 * count;
        if (room < most && room < count * (2 * ring.counters->history + 4))
            throw nb::value_error("staged rows: there is no room for all events");
    }
    given.kinds.resize(count);
    if (ring.undo.size()) given.heads.resize(envs);
}

std::int64_t append_rows(Ring &ring, StagedRows &given, int mode, const RowBytes &store) noexcept {
    auto count = given.size();
    auto ended = note_kinds(ring, given, mode);
    if (mode == NO_FINALS && ended >= 0) return -1 - ended;
    if (ring.undo.size() && note_undo(ring, given)) return USED_UP;
    auto events = Adding(ring, given).add(store);
    ++ring.ranges.version;
    if (ring.ranges.known)
        for (auto e : given.envs) ring.note_added(e);
    std::int64_t not_finite = 0;
    // counted, not refused: a reward that is not finite is a fact of the environment
    for (std::int64_t i = 0; i < count; ++i) not_finite += given.places[i] >= 0 && !std::isfinite(given.reward[i]);
    ring.counters->not_finite += not_finite;
    return events;
}

void scatter(const std::byte *source, std::int64_t pitch, const Vector<std::int64_t> &places, std::byte *target,
             std::int64_t width, std::size_t bytes) {
    with_size(bytes, [=](auto size) {
        for (std::int64_t i = 0; i < places.size(); ++i)
            if (places[i] >= 0) copy_bytes(target + places[i] * width, source + i * pitch, size);
    });
}

namespace {

// Append rows and store them.
std::int64_t add_rows(Ring &ring, StagedRows &given, int mode) noexcept {
    return append_rows(ring, given, mode, [&](std::int64_t low, std::int64_t count) {
        auto first = low * given.width;
        auto part = [&](const Vector<std::int64_t> &all) { return Vector<std::int64_t>{all.data + low, count}; };
        scatter(given.staged + first, given.width, part(given.places), ring.memory, ring.width, ring.step_bytes);
        if (mode == FINALS)
            scatter(given.final + first, given.width, part(given.finals), ring.memory, ring.width, ring.obs_bytes);
    });
}

// Plan where `add_rows` will store rows and their final observations: `places`, `finals`, `tails`. Of the ring, only
// `undo` is changed, where there is one. What it returns is negative if `add_rows` will refuse the rows, and the same.
std::int64_t plan_rows(const Ring &ring, StagedRows &given, int mode) {
    auto count = given.size();
    auto ended = note_kinds(ring, given, mode);
    given.heads.resize(ring.num_envs());
    auto &heads = given.heads;
    for (auto e : given.envs) heads[e] = ring.envs[e].head;
    bool refused = mode == NO_FINALS && ended >= 0;
    for (std::int64_t i = 0; i < (refused ? ended : count); ++i) {
        auto e = given.envs[i];
        given.places[i] = ring.place_of(heads[e]++, e);
        given.finals[i] = given.kinds[i] == Kind::Ended ? ring.place_of(heads[e]++, e) : -1;
    }
    if (refused) return -1 - ended;
    // rows of lower numbers make way, whichever of the call's rows takes their place
    for (std::int64_t i = 0; i < count; ++i) given.tails[i] = heads[given.envs[i]] - ring.rows;
    return ring.undo.size() && note_undo(ring, given) ? USED_UP : 0;
}

void take_envs(StagedRows &given, nb::object envs) {
    Vector<const std::int64_t> taken;
    if (!nb::try_cast(envs, taken)) throw nb::type_error("staged rows: envs are int64 [K]");
    if (taken.size() != given.size()) throw nb::value_error("staged rows: as many envs as before");
    std::swap(given.kept_envs, envs);
    given.envs = taken;
}

// All arrays of `relive.core.words.StagedRows`; every length is held to the others here: nothing checks them later.
StagedRows staged_rows_of(nb::object arrays) {
    StagedRows given;
    auto staged = member<Matrix<const std::uint8_t>>(arrays, "staged", "staged rows:");
    auto final = member<Matrix<const std::uint8_t>>(arrays, "final", "staged rows:");
    given.reward = member<Column<const float>>(arrays, "reward", "staged rows:");
    given.terminated = member<Column<const std::uint8_t>>(arrays, "terminated", "staged rows:");
    given.truncated = member<Column<const std::uint8_t>>(arrays, "truncated", "staged rows:");
    given.places = member<Vector<std::int64_t>>(arrays, "places", "staged rows:");
    given.finals = member<Vector<std::int64_t>>(arrays, "finals", "staged rows:");
    given.tails = member<Vector<std::int64_t>>(arrays, "tails", "staged rows:");
    given.where = member<Vector<std::int64_t>>(arrays, "where", "staged rows:");
    given.opens = member<Vector<std::uint8_t>>(arrays, "opens", "staged rows:");
    auto count = given.places.size();
    auto whole = [&](const Matrix<const std::uint8_t> &rows) {
        return rows.rows == count && rows.columns == staged.columns && (count < 2 || rows.stride == rows.columns);
    };
    bool right = whole(staged) && whole(final) && given.reward.size() == count && given.terminated.size() == count &&
                 given.truncated.size() == count && given.finals.size() == count && given.tails.size() == count &&
                 given.opens.size() == given.where.size();
    if (!right) throw nb::value_error("staged rows: the arrays do not fit each other");
    given.staged = staged.first;
    given.final = final.first;
    given.width = staged.columns;
    take_envs(given, arrays.attr("envs"));
    given.kept = arrays;
    return given;
}

void scatter_rows(Matrix<const std::uint8_t> source, Vector<std::int64_t> places, Matrix<std::uint8_t> target,
                  std::int64_t bytes) {
    if (source.rows < places.size() || bytes < 0 || source.columns < bytes || target.columns < bytes)
        throw nb::value_error("scatter_rows: there are fewer rows or bytes than places ask for");
    for (auto place : places)
        if (place >= target.rows) throw nb::index_error("scatter_rows: a place is beyond the last row");
    LongWork hold(places.size() * bytes > LONG_WORK);
    scatter(source.first, source.stride, places, target.first, target.stride, static_cast<std::size_t>(bytes));
}

}  // namespace

void bind_adding(nb::module_ &module) {
    RELIVE_EXPORT(NO_FINALS, FINALS, ALONE, LINKED);
    RELIVE_EXPORT(LONGEST, USED_UP, UNFIT, UNDO_KIND, UNDO_ENVS, UNDO_ROWS, UNDO_COUNTERS, UNDO_START, UNDO_ENV,
                  UNDO_AFTER, UNDO_ROW, UNDO_NONE, UNDO_ADDING, UNDO_REBUILD);
    nb::class_<StagedRows>(module, "StagedRows",
                           "The arrays of rows on their way into a ring (`relive.core.words.StagedRows`).")
        .def("__init__", [](StagedRows *self, nb::object arrays) { new (self) StagedRows(staged_rows_of(arrays)); },
             nb::arg("arrays"))
        .def("take_envs", take_envs, nb::arg("envs"), "Add to these envs from now on, int64 `[K]`, as many as before.");
    module.def("plan_rows", [](const Ring &ring, StagedRows &staged, int mode) {
        require_mode(mode);
        prepare(ring, staged);
        return plan_rows(ring, staged, mode);
    }, nb::arg("ring"), nb::arg("staged"), nb::arg("mode"),
       "Plan where `add_rows` will store rows and final observations: `places`, `finals` and `tails` of `staged`.\n\n"
       "Of the ring, only `undo` is changed, where there is one. Up to the number `tails[i]` rows of env i will\n"
       "have made way for all of them. Negative if `add_rows` will refuse the rows, and then the same.");
    module.def("add_rows", [](Ring &ring, StagedRows &staged, int mode) {
        require_mode(mode);
        prepare(ring, staged);
        LongWork hold(staged.size() * ring.width > LONG_WORK || ring.undo.size());
        return add_rows(ring, staged, mode);
    }, nb::arg("ring"), nb::arg("staged"), nb::arg("mode"),
       "Append one staged row per env in turn, and store it; other threads run while many are stored.\n\n"
       "`mode` is NO_FINALS, FINALS, ALONE or LINKED. The ring's `step_bytes` of each row are stored, and its\n"
       "`obs_bytes` of a final observation where an episode ended.\n\n"
       "Returns the number of events; or, if an episode ended and its final observation is not given, -1 - i for the\n"
       "first such row i; or USED_UP, if rows would be overwritten that are not in reserve. In both cases nothing is\n"
       "changed.");
    module.def("scatter_rows", scatter_rows, nb::arg("source"), nb::arg("places"), nb::arg("target"), nb::arg("nbytes"),
               "Copy the first `nbytes` bytes of successive rows of `source` to rows of `target`; a negative place to\n"
               "none.");
}

}  // namespace relive
