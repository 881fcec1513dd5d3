// Draws: random numbers of a stream, and rows of a ring that are drawn equally often.
#pragma once
#include <memory>
#include <new>
#include <span>

#include "random.hpp"
#include "ring.hpp"

namespace relive {

// Memory for one call, not yet written; or std::bad_alloc, also where a system would promise what it does not have.
template <typename T> std::unique_ptr<T[]> scratch(std::size_t count) {
    if (count > (std::size_t{1} << 40) / sizeof(T)) throw std::bad_alloc();
    return std::make_unique_for_overwrite<T[]>(count);
}

// Numbers 1, 2, ... of a stream as masses in [0, total), one from each of B equal parts if `stratified`.
void masses(std::uint64_t stream, bool stratified, double total, std::span<double> out);

// Places of rows that can be drawn, with replacement, from the `newest` completed ones (0: from all). False if there
// are none; then `out` has no meaning. Draw i, attempt a, is number 1 + i + a * B of the stream. `out` is for all B
// draws, or for those from number `low` on.
bool draw_uniform(const Ring &ring, std::uint64_t stream, std::int64_t newest, std::span<Place> out, std::size_t low,
                  std::size_t all);
inline bool draw_uniform(const Ring &ring, std::uint64_t stream, std::int64_t newest, std::span<Place> out) {
    return draw_uniform(ring, stream, newest, out, 0, out.size());
}

// The rows from the `newest` transitions on (0: from all). The range is good until the ring changes, or is asked for
// another one.
//
// Of transitions those count that can be drawn; where windows are longer, every complete one. Newest is in the order of
// completion, over all envs. Some of these rows cannot be drawn: boundary rows, the newest.
const DrawRange &draw_range_of(const Ring &ring, std::int64_t newest);

// How many transitions are complete, of the rows that are live; where windows have one step, of those with history.
std::int64_t count_complete(const Ring &ring);

}  // namespace relive
