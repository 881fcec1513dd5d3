// A ring of packed rows per env: where rows lie, which of them can be drawn.
//
// A row's id is (env, number). Numbers only grow; row `number` of env e lies at place e * rows + number % rows. The
// memory is NumPy's, over RAM, a map or shared memory; this object keeps the arrays, and none of them moves.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "arrays.hpp"
#include "draw_ranges.hpp"

namespace relive {

using Place = std::int64_t;
using Number = std::int64_t;

// A row of `state`; saves hold these words in this order.
struct Env {
    Number head;         // the number that the env's next row will have
    Number tail;         // the number of its first row that was not cleared
    std::int64_t next;   // the index that its next row has within its episode; 0 starts an episode
    std::int64_t count;  // how many transitions were completed
};

// The words of `counters`; saves hold them in this order.
struct Counters {
    static constexpr std::int64_t TAILS = 1, ACROSS = 2;  // bits of the word `tails`

    std::int64_t completed;   // transitions ever completed, in all envs
    std::int64_t drawable;    // rows that can be drawn now
    std::int64_t episodes;    // episodes that ended
    std::int64_t history;     // how many rows before a window's last must be live
    std::int64_t length;      // steps of a window
    std::int64_t stride;      // steps between the starts of two windows
    std::int64_t tails;       // TAILS if a last window that is shorter counts, plus ACROSS if rows of any episode do
    std::int64_t not_finite;  // rewards that were NaN or infinite
    std::int64_t weigh;       // what is drawn equally often

    // The first step of the window whose last is step `at` of an episode: a full window, or a tail.
    std::int64_t window_start(std::int64_t at) const {
        auto beyond = at + 1 - length;
        return beyond > 0 ? ((beyond - 1) / positive_stride() + 1) * positive_stride() : 0;
    }
    // The stride, whatever a file holds.
    std::int64_t positive_stride() const { return std::max<std::int64_t>(stride, 1); }
    bool has_tails() const { return tails & TAILS; }
    bool across() const { return tails & ACROSS; }
};
inline constexpr int COUNTERS = sizeof(Counters) / sizeof(std::int64_t);

// number % size for 0 <= number < 2**52 without a division; `inverse` is 1.0 / size.
inline std::int64_t remainder_of(std::int64_t number, std::int64_t size, double inverse) {
    auto rest = number - static_cast<std::int64_t>(static_cast<double>(number) * inverse) * size;
    return rest < 0 ? rest + size : rest >= size ? rest - size : rest;
}

inline constexpr std::uintptr_t LINE = 64;

// Ask for the cache lines of some bytes, which need not exist.
inline void fetch(const std::byte *start, std::size_t bytes) {
    auto line = reinterpret_cast<std::uintptr_t>(start) & ~(LINE - 1);
    for (auto end = reinterpret_cast<std::uintptr_t>(start) + bytes; line < end; line += LINE) {
        __builtin_prefetch(reinterpret_cast<const void *>(line));
        asm volatile("");  // else GCC takes this for a function without effect, and drops calls of it
    }
}

// The stores before it come first in the program. A kill is seen only after all of a thread's stores, in their order,
// so it is the compiler alone that must not move any.
// Tests mix words from before and after at random instead of relying on an order.
inline void in_order() { std::atomic_signal_fence(std::memory_order_seq_cst); }

class Ring {
  public:
    // Where rows lie
    Place place_of(Number number, std::int64_t e) const { return e * rows + remainder_of(number, rows, inverse); }
    Place after(Place place, Place begin) const { return place + 1 < begin + rows ? place + 1 : begin; }
    Place before(Place place, Place begin) const { return place > begin ? place - 1 : begin + rows - 1; }
    Number oldest(std::int64_t e) const { return std::max(envs[e].tail, envs[e].head - rows); }
    std::byte *row(Place place) const { return memory + place * width; }
    std::int64_t num_envs() const { return envs.size(); }
    std::int64_t places() const { return rows * envs.size(); }

    struct Owner {
        std::int64_t env;
        Place begin;    // the env's first place
        Number number;  // of the newest row that was written at the place; negative if there was none
    };
    Owner owner_of(Place place) const {
        auto offset = remainder_of(place, rows, inverse);
        auto begin = place - offset;
        // begin * inverse is within a rounding of the env's whole number
        auto e = static_cast<std::int64_t>(static_cast<double>(begin) * inverse + 0.5);
        auto newest = envs[e].head - 1;  // -1 in an empty env
        auto back = (newest < 0 ? rows - 1 : remainder_of(newest, rows, inverse)) - offset;
        return {e, begin, newest - (back >= 0 ? back : back + rows)};
    }

    // Which rows can be drawn
    bool ends_full(std::int64_t at) const {
        return at + 1 >= counters->length &&
               (counters->stride == 1 || (at + 1 - counters->length) % counters->positive_stride() == 0);
    }
    // True if a complete row ends a window: a full one or, where tails count, the last of an episode that ended or was
    // interrupted. `head` is the number of the env's next row, which will have the index `following`.
    bool ends_window(Place place, Number number, Place begin, Number head, std::int64_t following) const {
        if (ends_full(step[place])) return true;
        auto next = after(place, begin);
        if (!counters->has_tails() || stamp[next] >= 0) return false;
        if (number + 2 == head) return following == 0;  // the row after is the newest
        return step[after(next, begin)] == 0;
    }
    // True if the rows before an anchor that are read with it are there: `history` of them, or as many as its episode
    // has. Where they may be of any episode, the earliest is read only if the one after it does not begin an episode.
    bool has_history(Place place, Number number, std::int64_t e) const {
        auto history = counters->history;
        if (history == 0) return true;
        if (counters->across()) return has_rows(number, history, e);
        return number - std::min<std::int64_t>(step[place], history) >= oldest(e);
    }
    // The same where they may be of any episode.
    bool has_rows(Number number, std::int64_t history, std::int64_t e) const {
        auto begins = number - history + 1;
        return begins > oldest(e) || (begins == oldest(e) && step[place_of(begins, e)] == 0);
    }
    bool can_draw(Place place, Number number, std::int64_t e) const {
        if (stamp[place] < 0 || !has_history(place, number, e)) return false;
        return ends_window(place, number, e * rows, envs[e].head, envs[e].next);
    }

    // Rows were added to an env: its range goes on. Defined in draw_ranges.cpp.
    void note_added(std::int64_t e);

    Place rows = 0;              // per env
    double inverse = 0;          // 1.0 / rows
    std::size_t step_bytes = 0;  // of a row, at its start: a step; bookkeeping follows
    std::size_t obs_bytes = 0;   // of a row, at its start: its observation, all that a final observation has
    std::byte *memory = nullptr;
    std::int64_t width = 0;  // bytes of a row
    Vector<Env> envs;
    Counters *counters = nullptr;
    Column<std::int32_t> step;      // a row's index within its episode
    Column<std::int64_t> stamp;     // the number of a complete transition, in the order of completion; else negative
    Column<std::int32_t> order;     // how many transitions of the env are older, modulo 2**32
    Column<float> reward;
    Column<std::uint8_t> terminated, truncated;
    Vector<std::int32_t> ends;      // the last rows of episodes, by their ordinal in the env; may be empty
    Vector<std::int64_t> seen;      // up to which number each env's rows are noted in `ends`; may be empty
    Vector<std::int64_t> undo;      // how to take back a change that a kill broke off; may be empty
    Vector<std::int64_t> reserve;   // rows of lower numbers may be overwritten before the next flush; may be empty
    mutable DrawRanges ranges;      // what draws have found out; no part of the ring's state
    nb::object kept;                // the arrays
};

}  // namespace relive
