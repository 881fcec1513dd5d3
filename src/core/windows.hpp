// Reading a ring by places: n-step windows as the packed rows of a batch, rows, and stacks of frames.
//
// Nothing here allocates, raises, or touches Python. A place that is not a row's is answered by its position, and then
// nothing was written, or only rows before that position.
#pragma once
#include <vector>

#include "arrays.hpp"
#include "copies.hpp"
#include "ring.hpp"

namespace relive {

using Places = Vector<const Place>;
using Rows = Matrix<std::uint8_t>;         // packed rows [B, W]
using Bytes = Matrix<const std::uint8_t>;  // rows that are read

// True if so many bytes from `at` on lie within a row of `size` bytes.
inline bool lies_within(std::int64_t at, std::int64_t bytes, std::int64_t size) {
    return at >= 0 && bytes >= 0 && bytes <= size && at <= size - bytes;
}

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

// A step of a window: what it was rewarded with, and whether it ended its episode.
struct WindowStep {
    double reward;
    std::uint8_t terminated, truncated;
};

// An n-step window.
struct Window {
    double value = 0.0;     // the sum of its rewards, r_t + gamma r_{t+1} + ...
    double discount = 1.0;  // gamma**steps, as a product of so many factors
    std::int32_t steps = 0;
    std::uint8_t terminated = 0, truncated = 0;  // of its last step

    // The factor of the value that follows it.
    double bootstrap() const { return terminated ? 0.0 : discount; }
};

// The window of up to `most` steps whose step j is `step(j)`. It stops at a done, and where `follows(k)` says that no
// step comes after its first k.
//
// Windows of a ring, of a sequence and of other goals are all summed here, so each sum has the same bits. Both functions
// are the caller's own lambdas, which compile into its loop. `follows` is asked only for a step that would be read: it
// may look at a row that is not loaded.
template <typename Step, typename Follows>
inline Window sum_window(std::int64_t most, double gamma, Step step, Follows follows) {
    Window window;
    bool going = most > 0;
    while (going) {
        WindowStep next = step(window.steps);
        window.value += window.discount * next.reward;
        window.discount *= gamma;
        window.terminated = next.terminated;
        window.truncated = next.truncated;
        ++window.steps;
        going = !(next.terminated | next.truncated) && window.steps != most && follows(window.steps);
    }
    return window;
}

// What a batch's row has of its window, wherever the layout of the batch says.
template <typename Layout> inline void write_window(const Layout &to, std::byte *row, const Window &window) {
    put(row + to.discount, static_cast<float>(window.bootstrap()));
    put(row + to.steps, window.steps);
    put(row + to.reward, static_cast<float>(window.value));
    put(row + to.terminated, window.terminated);
    put(row + to.truncated, window.truncated);
}

// The windows that start at anchors, r_t + gamma r_{t+1} + ... with up to `steps` rewards, as the rows `out`.
//
// A window stops at a done, at the newest row, and where the next row is not complete or does not go on from it. `last`
// gets the place of the row that holds the observation it bootstraps from; where rows have next observations of their
// own, that is the row of its last step.
std::int64_t read_windows(const Ring &ring, const WindowLayout &layout, Places places, std::int64_t steps, double gamma,
                          Rows out, Vector<Place> last);

// The first `bytes` bytes of rows to successive rows of `out`, from byte `start` on. A negative place gives zeros.
std::int64_t gather_rows(Bytes source, Places places, Rows out, std::int64_t start, std::int64_t bytes);

// Whole rows for places [2 B, depth] of `stack_places`, those of item i to `now`, and those of item B + i, right after
// them, to `then`: the stacks before and after a step share all but one frame. Rows of the source follow one another, as
// do those of `now` and of `then`, and it has all of the ring.
void gather_pairs(Bytes source, Matrix<const Place> places, std::byte *now, std::byte *then);

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
