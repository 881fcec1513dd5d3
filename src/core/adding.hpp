// Adding rows: where they go, what they complete, which rows can be drawn afterwards, and how to take that back.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "ring.hpp"

namespace relive {

// Modes of adding rows. Of the first two, the next row, or a final observation, holds a row's next observation; of the
// others, each row has one of its own.
enum Mode : int {
    NO_FINALS,  // no final observations are given, so no row may end its episode
    FINALS,     // final observations are given, and stored where an episode ended
    ALONE,      // a row is an episode of one step
    LINKED,     // the env's next row goes on where a row did not end its episode
};

// Kinds of rows. Those before Alone have no next observation of their own.
enum class Kind : std::uint8_t {
    GoesOn,   // the next row holds its next observation
    Ended,    // its final observation takes the row after it
    Alone,    // an episode of one step
    Linked,   // the env's next row goes on
    Last,     // as Linked, but it ended its episode
    LeftOut,  // it is not stored
};

// Steps after which an episode is cut, as if it had been interrupted: a row's index within it is an int32.
inline constexpr std::int64_t LONGEST = (std::int64_t{1} << 31) - 1;

// Answers of adding rows; nothing is changed then. -1 - i: row i ended an episode and has no final observation.
inline constexpr std::int64_t USED_UP = -(std::int64_t{1} << 62);  // rows that are not in reserve would be overwritten
inline constexpr std::int64_t UNFIT = USED_UP - 1;                 // a step cannot be read here

// K rows on their way into a ring, and what is noted while they are added. The arrays are NumPy's and do not move.
struct StagedRows {
    Vector<const std::int64_t> envs;
    const std::byte *staged = nullptr, *final = nullptr;  // rows of `width` bytes, packed as in the ring
    std::int64_t width = 0;
    Column<const float> reward;
    Column<const std::uint8_t> terminated, truncated;
    Vector<std::int64_t> places;  // where the rows go
    Vector<std::int64_t> finals;  // where the final observations go, or -1
    Vector<std::int64_t> tails;   // the number up to which rows of the env make way
    Vector<std::int64_t> where;   // the places of events, rows that can be drawn now or no longer; empty: not listed
    Vector<std::uint8_t> opens;   // 1 if such a row can be drawn from now on, 0 if no longer
    nb::object kept, kept_envs;   // the arrays
    const std::byte *mask = nullptr;  // [K], 0 for rows that are left out, and break off their envs' episodes; or null
    // memory of a call, taken before it changes anything
    std::vector<Kind> kinds;      // [K]
    std::vector<Number> heads;    // [N]

    std::int64_t size() const { return places.size(); }
    bool ended(std::int64_t i) const { return terminated[i] | truncated[i]; }
    bool leaves_out(std::int64_t i) const { return mask && mask[i] == std::byte{0}; }
};

void require_mode(int mode);

// Refuse rows that do not fit a ring, and take the memory that adding them needs. Throws; nothing is changed.
void prepare(const Ring &ring, StagedRows &given);

// How many rows' bookkeeping and bytes are written together, while they stay in a near cache. They are few if the rows
// of all envs lie a multiple of 1 kB apart, as with a power of two of rows each: those share a few lines of each cache,
// and of 64 most were gone before they were written, 76 ns a row of 4,096 envs instead of 28.
inline std::int64_t together(const Ring &ring) { return ring.rows * ring.width % 1024 ? 64 : 8; }

// Stores the bytes of `count` rows from row `low` on at their `places` and `finals`. It throws nothing.
using RowBytes = std::function<void(std::int64_t low, std::int64_t count)>;

// Issue ids for one row of each env in turn, note what it completes, and store it, some rows after others. Of the
// staged rows, rewards and flags are read. `prepare` was called; nothing throws.
// Returns the number of events, or a negative answer: nothing is changed then, and `store` is not called.
std::int64_t append_rows(Ring &ring, StagedRows &given, int mode, const RowBytes &store) noexcept;

// The first `bytes` bytes of successive rows of `source`, `pitch` bytes apart, to rows of `target`; a negative place
// to none.
void scatter(const std::byte *source, std::int64_t pitch, const Vector<std::int64_t> &places, std::byte *target,
             std::int64_t width, std::size_t bytes);

}  // namespace relive
