// Reading a ring by places: windows of steps as the packed rows of a batch of sequences.
#pragma once
#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "arrays.hpp"
#include "ring.hpp"
#include "windows.hpp"

namespace relive {

// Where a row of a batch of sequences has what, in bytes, and how they are cut: windows of an episode, or chunks, whose
// rows run over the ends of episodes. What is negative is not written.
struct SequenceLayout {
    // What is written for each row
    std::int64_t mask;      // uint8: whether it is a step of the window; of a chunk, always
    std::int64_t is_start;  // uint8: whether it begins its episode
    std::int64_t timestep;  // int64: its number in its episode
    // and for each step of a window,
    std::int64_t reward;      // float32: the sum of its n-step window
    std::int64_t terminated;  // uint8
    std::int64_t truncated;   // uint8
    std::int64_t discount;    // float32
    std::int64_t steps;       // int32: how many rewards were summed
    std::int64_t next;        // int64: the row of the sequence after them; -1 behind the last step
    // or for each row of a chunk
    std::int64_t is_last;      // uint8: whether its episode ended or was interrupted there
    std::int64_t is_terminal;  // uint8: whether the step before it terminated
    // What is copied to the start of a row, multiples of 16
    std::int64_t step_bytes;  // of a step
    std::int64_t obs_bytes;   // of an observation that an episode ended on
    std::int64_t own_at;      // where a ring's row has the one after its step; negative: the row after it has that
    // The cut
    std::int64_t burn_in;  // steps before a window
    std::int64_t n;        // rewards of an n-step sum
    bool time_first;       // rows are [T, B], not [B, T]
    bool across;           // chunks

    // A field of the step before each row, of so many bytes from `from` of a ring's row to `to`. It is that of `blank`
    // before an episode's first step.
    struct Last {
        std::int64_t from, to, bytes;
        bool stored;  // every step has it already, and only the observation that an episode ended on lacks it
    };
    std::vector<Last> lasts;

    bool own() const { return own_at >= 0; }
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
    Place first;         // of row 0; -2 - place for an observation that an episode ended on
    double probability;  // of its draw by priority
    float weight;
};

// Memory for the rewards of the windows that are written side by side, made before a batch's first byte is written.
class SequenceRewards {
  public:
    static constexpr std::int64_t GROUP = 8;  // windows that are written side by side

    // For windows of up to `total` rows of a ring.
    SequenceRewards(std::int64_t total, const SequenceLayout &layout, const Ring &ring);
    double *of(std::int64_t g) { return rewards_.get() + g * room_; }

  private:
    std::int64_t room_;
    std::unique_ptr<double[]> rewards_;
};

// Where the rows of a batch come from, int64 [T, B] or [B, T], if that is asked for: else both are empty.
struct SequencePlaces {
    Vector<Place> rows;    // -1 where there is none, and -2 - place for an observation that an episode ended on
    Vector<Place> before;  // of the step before each row; -1 before an episode's first, and where there is no row
};

// A large field of sequences: a column of its own, for each row of a batch.
struct SequenceColumn {
    Bytes step;          // the rows of the ring that have it, of those of steps,
    bool before;         // which are those of the steps before the rows of the batch, or their own;
    Bytes final;         // and of those of observations that an episode ended on, if they have it
    bool final_before;
    std::uint8_t fill;   // each byte of rows that do not have it
    std::array<nb::object, 2> kept;

    // Copies the column of these rows to `out`, a row each.
    void read(const SequencePlaces &found, Vector<Place> memory, Rows out) const;
};

// The windows, or chunks, that end at anchors, as packed rows [T, B], or [B, T], flattened.
//
// A window comes after up to `burn_in` steps before it, as far as its episode goes, and before as many rows as its
// n-step rewards reach beyond it. A chunk has the row after its anchor, and those before it whatever episode they are
// of. The row after an episode's last step is `blank` with the observation that it ended on, and with the fields of
// `lasts`; `blank` is the row that stands where there is nothing. `facts` [B] gets what is known of each window but its
// draw.
//
// Returns -1; or the first of `places` that is not a row's, or whose window would not be among the rows or not fit.
// Then no row was written. Raises nothing.
std::int64_t read_sequences(const Ring &ring, const SequenceLayout &layout, double gamma, Places places, Rows out,
                            const std::byte *blank, std::span<WindowFacts> facts, SequencePlaces found,
                            SequenceRewards &rewards);

}  // namespace relive
