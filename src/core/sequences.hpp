// Reading a ring by places: windows of steps as the packed rows of a batch of sequences.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "arrays.hpp"
#include "ring.hpp"
#include "windows.hpp"

namespace relive {

// Where a row of a batch of sequences has what, in bytes, and how windows are cut.
struct SequenceLayout {
    // What is written for each step
    std::int64_t reward;      // float32: the sum of its n-step window
    std::int64_t terminated;  // uint8
    std::int64_t truncated;   // uint8
    std::int64_t discount;    // float32
    std::int64_t steps;       // int32: how many rewards were summed
    std::int64_t next;        // int64: the row of the sequence after them; -1 behind the last step
    std::int64_t mask;        // uint8: whether the step belongs to the window
    std::int64_t is_start;    // uint8: whether it begins its episode
    // What is copied to the start of a row, multiples of 16
    std::int64_t step_bytes;  // of a step
    std::int64_t obs_bytes;   // of an observation that an episode ended on
    // The cut
    std::int64_t burn_in;  // steps before a window
    std::int64_t n;        // rewards of an n-step sum
    bool time_first;       // rows are [T, B], not [B, T]

    // A field of the step before each row, of so many bytes from `from` of a ring's row to `to`. It is that of `blank`
    // before an episode's first step.
    struct Last {
        std::int64_t from, to, bytes;
        bool stored;  // every step has it already, and only the observation that an episode ended on lacks it
    };
    std::vector<Last> lasts;

    // True if everything lies within a batch's row and a ring's row of so many bytes.
    bool fits(std::int64_t row, std::int64_t ring_row) const;
};

// What is known of a window, as a row of a batch's facts.
struct WindowFacts {
    std::int64_t index;    // the public index of its anchor
    std::int64_t lengths;  // its number of rows
    std::int64_t burn_in;  // how many of them are burn-in
    std::int64_t env;
    std::int64_t start;  // the number of its first step within the env
    Place first;         // of row 0
    double probability;  // of its draw by priority
    float weight;
};

// What is noted of windows while they are read. It is made before a batch's first byte is written.
class SequenceNotes {
  public:
    static constexpr std::int64_t GROUP = 8;  // windows that are written side by side

    // For windows of up to `total` rows of a ring.
    SequenceNotes(std::int64_t total, const SequenceLayout &layout, const Ring &ring);

    struct Mark {
        Place place, begin;  // of the next row, and of the env's first
        Place before;        // of the step before the next row; -1 before an episode's first
        std::int64_t own;    // steps up to the anchor
        std::int64_t known;  // steps with those that their rewards reach to; the row after them has an observation
        bool opens;          // whether the first begins its episode
        std::uint8_t terminated, truncated;  // of the last of all
    };
    Mark marks[GROUP];
    double *rewards(std::int64_t g) { return rewards_.get() + g * room_; }
    std::int64_t room() const { return room_; }

  private:
    std::int64_t room_;
    std::unique_ptr<double[]> rewards_;
};

// The windows that end at anchors, as packed rows [T, B], or [B, T], flattened.
//
// A window comes after up to `burn_in` steps before it, as far as its episode goes, and before as many rows as its
// n-step rewards reach beyond it. The row after an episode's last step is `blank` with the observation that it ended
// on, and with the fields of `lasts`; `blank` is the row that stands where there is nothing. `facts` [B] gets what is
// known of each window but its draw. `table`, if not empty, gets the place of each row; -1 where there is none, and
// -2 - place for an observation that an episode ended on.
//
// Returns -1; or the first of `places` that is not a row's, or whose window would not be among the rows or not fit.
// Then no row was written. Raises nothing.
std::int64_t read_sequences(const Ring &ring, const SequenceLayout &layout, double gamma, Places places, Rows out,
                            const std::byte *blank, std::span<WindowFacts> facts, Vector<std::int64_t> table,
                            SequenceNotes &notes);

}  // namespace relive
