// How often each window of a ring is drawn: weights in a sum tree, each at the window's last row.
#pragma once
#include <cstdint>

#include "arrays.hpp"
#include "ring.hpp"
#include "tree.hpp"

namespace relive {

// Note that the windows that end at `places` can be drawn from now on (1) or no more (0), in order.
//
// A window weighs 1, or as much as it has steps, as the ring's rule says. If that weighs episodes, only the newest
// window of each weighs 1. -1, or the first entry that is no place; then nothing is written.
std::int64_t weigh_windows(Tree &tree, const Ring &ring, Vector<const Place> places,
                           Vector<const std::uint8_t> drawable);

// One of the windows of the episode whose newest ends at a place, chosen by a random number in [0, 1): those count that
// end at row `oldest` of the env or later.
Place window_of_episode(const Ring &ring, Place newest, Number oldest, double random);

}  // namespace relive
