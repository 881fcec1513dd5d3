// Windows with other goals: which rows of a batch get one, which goal, and what their windows are with it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "arrays.hpp"
#include "ring.hpp"
#include "windows.hpp"

namespace relive {

// Where a goal may come from: the steps from the anchor on, the last, all of the episode, those before the anchor; or
// any step of the whole ring.
enum class Strategy : int { FUTURE, FINAL, EPISODE, PAST, RANDOM };

// The number of a batch's further stream, by which the goals of RANDOM are drawn.
inline constexpr std::uint64_t OTHERS = (std::uint64_t{1} << 32) + 1;

// Where goals are, in bytes, and how they are chosen.
struct GoalLayout {
    WindowLayout window;
    std::int64_t goal_at;     // the achieved goal, in a row of the ring
    std::int64_t goal_bytes;  // its size; 0 if compiled code cannot read it
    std::int64_t into_obs;    // the desired goal of the observation, in a batch's row
    std::int64_t into_next;   // and that of the next observation
    std::int64_t mark;        // the flag of relabelled rows, in a batch's row
    Strategy strategy;
    bool finished;  // only episodes that are over count

    // True if everything lies within a batch's row and a ring's row of so many bytes.
    bool fits(std::int64_t row, std::int64_t ring_row) const;
};

// The steps in the windows of relabelled rows: of a batch of B rows at most B rows, and M = B * n steps.
//
// The steps of the m-th such row are entries begin[m] to begin[m + 1] of all that is [M]. The memory is that of NumPy's
// arrays, which Python reads and writes between the two calls.
class RelabelledSteps {
  public:
    RelabelledSteps(std::int64_t rows, std::int64_t n);

    std::int64_t rows() const { return rows_; }
    std::int64_t steps() const { return steps_; }

    Vector<std::int64_t> which;  // [B]: the rows of the batch
    Vector<std::int64_t> begin;  // [B + 1]
    Vector<Place> now;           // [M]: the places of the steps
    Vector<Place> after;         // [M]: the places of the rows that follow them
    Place *first, *end, *aim;    // [B] each: the places of the episode's first and last live rows, and of the goal
    Vector<float> rewards;       // [M]: as recorded
    std::uint8_t *terminated, *truncated;  // [M] each: as recorded, and then with the new goal
    Vector<std::int64_t> used;             // [B]: the last step of each window with its new goal

    std::int64_t found = 0;  // how many rows were relabelled last,
    Place of = 0;            // in a ring of so many places

    struct Arrays {
        nb::object which, begin, now, after, spans, rewards, flags, used;
    };
    Arrays arrays;

  private:
    std::int64_t rows_, steps_;
};

// A batch of windows, which of its rows get another goal, which goal, and the steps of these rows' windows.
//
// Answers the number of rows with another goal, or -1 - i if `places[i]` is not that of a row. `out` and `last` become
// those of `read_windows`, with no row marked. Row i of the batch is relabelled if number 2**32 + 2 i of the stream
// `key` is below `ratio`, it has a step to choose from, and, if only episodes that are over count, its own is over. The
// next number of the stream chooses among these steps. `others` are the places of transitions drawn for RANDOM. The new
// goals are written into `out`. `pairs`, 2 * M * goal_bytes bytes, become the goals that were achieved after the steps,
// and the new goals. The ring notes the ends of its episodes; else no row gets another goal.
std::int64_t plan_goals(const Ring &ring, const GoalLayout &layout, Places places, std::int64_t n, double gamma,
                        std::uint64_t key, double ratio, Places others, Rows out, Vector<Place> last,
                        RelabelledSteps &steps, std::byte *pairs);

// Rewrites the windows of relabelled rows: they end where a step terminates or is truncated, or with the last.
//
// `out`, `last` and `steps` are as `plan_goals` left them, but `steps` has the flags of the new goals. `rewards` [M]
// are those of the new goals. These rows are marked. If the rewards were `judged` by the new goals, they have to be
// finite. Answers -1, or the first step with another reward; then nothing is written.
std::int64_t relabel_windows(const Ring &ring, const GoalLayout &layout, double gamma, bool judged, Rows out,
                             Vector<Place> last, RelabelledSteps &steps, const float *rewards);

}  // namespace relive
