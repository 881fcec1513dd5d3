// Reading a ring by places: n-step windows as the packed rows of a batch, rows, and stacks of frames.
//
// Nothing here allocates, raises, or touches Python. A place that is not a row's is answered by its position, and then
// nothing was written, or only rows before that position.
#pragma once
#include <vector>

#include "arrays.hpp"
#include "ring.hpp"

namespace relive {

using Places = Vector<const Place>;
using Rows = Matrix<std::uint8_t>;         // packed rows [B, W]
using Bytes = Matrix<const std::uint8_t>;  // rows that are read

// Where a batch's row has what, in bytes.
struct WindowLayout {
    // What is known of a window
    std::int64_t index;       // int64: the public index of the anchor, number * N + env
    std::int64_t next_index;  // int64: that of the row with the next observation
    std::int64_t discount;    // float32: gamma**k, or 0 after a terminal
    std::int64_t steps;       // int32: k, the number of rewards
    std::int64_t reward;      // float32: their discounted sum
    std::int64_t terminated;  // uint8: whether the last step terminated
    std::int64_t truncated;   // uint8: whether it was truncated
    // What is copied
    std::int64_t step_bytes;  // the step, to the start of the row
    std::int64_t next_at;     // where the next observation goes
    std::int64_t next_bytes;  // how much of the row that has it; -1 if each row of the ring has one of its own
    std::int64_t own_at;      // where that lies in a row of the ring
    std::int64_t own_bytes;   // and its size

    bool own() const { return next_bytes < 0; }
    // True if everything lies within a batch's row and a ring's row of so many bytes.
    bool fits(std::int64_t row, std::int64_t ring_row) const;
};

// One more reward of a window: its sum and gamma**k, which start at 0 and 1.
inline void add_reward(double &value, double &discount, float reward, double gamma) {
    value += discount * static_cast<double>(reward);
    discount *= gamma;
}

// The factor of the value that follows a window.
inline double bootstrap(double discount, bool terminal) { return terminal ? 0.0 : discount; }

// All that is known of a window but its anchor's index; `discount` is what `bootstrap` made of it.
void write_window(const WindowLayout &layout, std::byte *row, std::int64_t next_index, std::int32_t k, double value,
                  double discount, std::uint8_t terminal, std::uint8_t cut);

// The windows that start at anchors, r_t + gamma r_{t+1} + ... with up to `steps` rewards, as the rows `out`.
//
// A window stops at a done, at the newest row, and where the next row is not complete or does not go on from it. `last`
// gets the place of the row that holds the observation it bootstraps from; where rows have next observations of their
// own, that is the row of its last step.
std::int64_t read_windows(const Ring &ring, const WindowLayout &layout, Places places, std::int64_t steps, double gamma,
                          Rows out, Vector<Place> last);

// The first `bytes` bytes of rows to successive rows of `out`, from byte `start` on. A negative place gives zeros.
std::int64_t gather_rows(Bytes source, Places places, Rows out, std::int64_t start, std::int64_t bytes);

// Whole rows for places [2 B, depth], item B + i right after item i: the stacks before and after a step share all but
// one frame. Rows of `source` and of `out` follow one another. The answer is an item of `places`.
std::int64_t gather_pairs(Bytes source, Matrix<const Place> places, Rows out);

// Places [B, depth] of the frames that end at `places`, the oldest first, within their episode. Frames from before the
// episode are its first one if `repeat`, else -1.
std::int64_t stack_places(const Ring &ring, Places places, std::int64_t depth, bool repeat, Matrix<Place> out);

// Stacks of frames in a batch's rows: how many frames each has, and where the fields are that are stacked.
struct StackLayout {
    struct Field {
        std::int64_t from, bytes;  // of a frame, in a row of the ring
        std::int64_t now, then;    // where the stacks before and after the step begin in a batch's row
    };
    std::vector<Field> fields;
    std::int64_t depth = 0;
    bool repeat = false;     // frames from before the episode are its first one, else zeros

    bool fits(std::int64_t row, std::int64_t ring_row) const;
};

// The stacks of windows that `read_windows` read: those that start at `places`, from number `low` on, and bootstrap from
// `last`. Unlike all else here it allocates a little.
void read_stacks(const Ring &ring, const StackLayout &layout, Places places, std::int64_t low, Places last, Rows out);

}  // namespace relive
