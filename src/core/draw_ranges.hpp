// DrawRanges: the rows that draws point at, env by env, and how they are kept up to date.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace relive {

// Rows of all envs, one env after another: of each from `first` up to its head. Both vectors have one entry an env.
struct DrawRange {
    std::vector<std::int64_t> first;  // numbers
    std::vector<std::int64_t> until;  // running sums of how many rows they are

    std::int64_t total() const { return until.back(); }

    struct Spot {
        std::int64_t env, number;
    };
    // By random number `nth` of a stream. It is below 1, so what it chooses is below the total.
    Spot at(std::uint64_t stream, std::uint64_t nth) const;
};

// The ranges that a ring keeps, so that no draw walks through all envs if few of them have changed.
// 256 of 16,384 envs take about as long to draw as of 8. The newest transitions are a function of the stamps of every
// env, so `Recent` passes over all of them once for each new window, 0.3 ms at 16,384 envs. Whatever changes cursors,
// stamps or the rule from Python has to say so.
struct DrawRanges {
    explicit DrawRanges(std::size_t envs = 0) : whole{std::vector<std::int64_t>(envs), std::vector<std::int64_t>(envs)},
                                           recent(whole), stale(envs) {}

    // Anything of the ring may have changed, its cursors and its rule as well.
    void forget() {
        known = false;
        added_up = false;
        ++version;
    }

    DrawRange whole;                 // of all rows
    DrawRange recent;                // of those from the `newest` transitions on; at first, and later, a guess
    bool known = false;         // the first rows of `whole` are right
    std::size_t stale;          // sums of `whole` are right for the envs before this one
    std::int64_t newest = 0;    // of `recent`; 0 if it is only a guess
    std::uint64_t version = 0;  // of the ring
    std::uint64_t seen = 0;     // the version for which `recent` is right
    std::int64_t complete = 0;  // transitions of `whole`
    std::uint64_t counted = ~std::uint64_t{0};  // the version for which that is right
    bool added_up = false;      // `stamps` is right
    std::uint64_t stamps = 0;   // the sum of the stamps of all rows that can be drawn, modulo 2**64
};

}  // namespace relive
