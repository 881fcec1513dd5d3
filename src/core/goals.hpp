// Windows with other goals: which rows of a batch get one, which goal, and what their windows are with it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "arrays.hpp"
#include "ring.hpp"
#include "windows.hpp"

namespace relive {

// Where a goal may come from: the steps from the anchor on, the last, all of the episode, those before the anchor; or
// any step of the whole ring.
enum Strategy : int { FUTURE, FINAL, EPISODE, PAST, RANDOM };

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

// A row of a batch that may get another goal.
struct Candidate {
    std::int64_t row;  // of the batch
    Number number;     // of the ring's row that it was read from
    std::int64_t env;
    Place noted;  // where `ends` has the last row of its episode
};

// A row of a batch that gets another goal. Its steps are `begin` up to the next row's `begin`.
struct RelabelledRow {
    std::int64_t row;    // of the batch
    Number first, end;   // of the episode's first and last live rows
    Place aim;           // of the goal
    std::int64_t begin;  // of its steps
    std::int64_t used;   // the last step of its window with the new goal
};

// A step in the window of such a row.
struct RelabelledStep {
    Place now, after;  // its place, and that of the row that follows it
    float reward;      // as recorded, and then with the new goal, as the flags
    std::uint8_t terminated, truncated;
};

// Which rows of a batch may get another goal; how many. `found` has room for all rows. The notes of where their
// episodes end are asked for. The ring notes them; else there are no candidates.
std::int64_t candidates(const Ring &ring, Places places, std::uint64_t key, double ratio, Candidate *found);

// Which of `count` candidates get another goal, and which. `out` is as `read_windows` left it. Answers how many rows;
// `chosen` has room for all candidates, and one more, whose `begin` is the number of all their steps.
//
// Row i of the batch is relabelled if number 2**32 + 2 i of the stream `key` is below `ratio`, it has a step to choose
// from, and, if only episodes that are over count, its own is over. The next number of the stream chooses among these
// steps. `others` are the places of transitions drawn for RANDOM.
std::int64_t choose_goals(const Ring &ring, const GoalLayout &layout, Places places, std::uint64_t key, Places others,
                          Rows out, const Candidate *candidates, std::int64_t count, RelabelledRow *chosen);

// The steps of `count` chosen rows, the goals that were achieved after them (`reached`), and the new ones (`wanted`):
// `goal_bytes` a step each. The new goals are written into `out`.
void list_steps(const Ring &ring, const GoalLayout &layout, Places places, Rows out, const RelabelledRow *chosen,
                std::int64_t count, RelabelledStep *steps, std::byte *reached, std::byte *wanted);

// Rewrites and marks the windows of `count` chosen rows: they end where a step terminates or is truncated, or with the
// last.
void relabel_windows(const Ring &ring, const GoalLayout &layout, double gamma, Rows out, Vector<Place> last,
                     RelabelledRow *chosen, std::int64_t count, const RelabelledStep *steps);

}  // namespace relive
