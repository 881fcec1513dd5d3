// A sum tree: weights to change one by one and to draw in proportion, in O(log n).
//
// Each node has 8 children, one cache line of doubles, and is their sum, added from left to right from 0 on. So a node
// depends on the leaves alone: after a million updates a tree equals, bit for bit, one that is built anew or loaded. So
// it has no state of its own to save. Adding differences would drift for as long as training goes on. Level 0 holds the
// leaves, filled up with zeros to whole blocks.
//
// To find and set 256 leaves takes 25.3 µs with 2 children, 16.4 with 4, 15.2 with 8, 25.0 with 16 and 54.2 with 32.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <span>
#include <vector>

#include "arrays.hpp"

namespace relive {

// Some leaves, as the fewest nodes that cover them from left to right, and the running sums of their weights.
struct Cover {
    std::span<const std::int64_t> places;
    std::span<const double> until;
    double total() const { return until.empty() ? 0.0 : until.back(); }
};

class Tree {
  public:
    static constexpr std::int64_t WIDTH = 8;

    // Throws unless the arrays have the lengths that so many leaves need.
    Tree(KeptVector<double> nodes, std::int64_t leaves, KeptVector<double> minima);
    void set_minima(KeptVector<double> array);

    // Where each level of a tree starts; the last is the place of the root. Throws if so many leaves make no tree.
    static std::vector<std::int64_t> levels(std::int64_t leaves);

    // The largest weight that all leaves can have without an infinite sum anywhere.
    double heaviest() const { return DBL_MAX / (2.0 * static_cast<double>(leaves)); }
    bool has(std::int64_t position) const { return 0 <= position && position < leaves; }
    double weight(std::int64_t position) const { return nodes[position]; }
    // All leaves. The sum is read where it lies, and changes with the tree.
    Cover whole() const { return {{&offsets.back(), 1}, {&nodes[offsets.back()], 1}}; }

    // Sum all nodes anew above leaves that changed; `walkers`, their places, is used up. Nothing fails.
    void propagate(std::span<std::int64_t> walkers);

    // Ask for the cache lines that a change of a leaf will change: the leaf, and two levels of nodes above.
    void expect(std::int64_t leaf) const {
        auto last = offsets.size() - 1;  // a tree of fewer levels gets a harmless request for a line near its root
        __builtin_prefetch(&nodes[leaf]);
        __builtin_prefetch(&nodes[offsets[std::min<std::size_t>(1, last)] + leaf / WIDTH]);
        __builtin_prefetch(&nodes[offsets[std::min<std::size_t>(2, last)] + leaf / (WIDTH * WIDTH)]);
    }

    // The leaf whose interval holds each mass, among those of a cover, whose intervals lie side by side and start at 0.
    // -1, or the first mass that is not in [0, among.total()); then nothing is written. No leaf of weight 0 is found,
    // and whatever the nodes and the cover hold, what is found is a leaf.
    std::int64_t find(const Cover &among, std::span<const double> masses, std::span<std::int64_t> out) const;

    // Called by Python alone, with arrays whose lengths are checked.

    // Sum every node anew from the leaves, and find the minima, if there are any.
    void build();
    // Give leaves their weights, in order; `values` has one entry for each position, or one for all. -1, or the first
    // entry that is no leaf or has a weight that is not in [0, heaviest()]; then nothing is written.
    std::int64_t set(Vector<const std::int64_t> positions, Vector<const double> values);
    // The weights of leaves; -1, or the first position that is none.
    std::int64_t get(Vector<const std::int64_t> positions, Vector<double> out) const;
    // Cut ranges of leaves, each from a begin up to its end, into as few nodes as possible, from left to right; how
    // many. Each range takes at most 2 * (WIDTH - 1) nodes of each level.
    std::int64_t cover(Vector<const std::int64_t> begins, Vector<const std::int64_t> ends,
                       Vector<std::int64_t> places, Vector<double> until) const;
    // The smallest positive weight among the leaves of ranges, or infinity. There are minima.
    double lowest(Vector<const std::int64_t> begins, Vector<const std::int64_t> ends) const;

    std::int64_t leaves;
    std::vector<std::int64_t> offsets;  // where each level starts
    KeptVector<double> nodes;           // one more than the place of the root
    KeptVector<double> minima;          // the smallest positive leaf below each node that is none itself, or infinity;
                                        // empty until it is asked for

  private:
    void require_ranges(Vector<const std::int64_t> begins, Vector<const std::int64_t> ends) const;
    // How many nodes of a level have children, or are leaves: a level is filled up to whole blocks.
    std::int64_t count(std::size_t level) const {
        return level ? (offsets[level] - offsets[level - 1]) / WIDTH : leaves;
    }
    // The smallest positive weight below a node of a level, or infinity.
    double low_of(std::size_t level, std::int64_t node) const;
    bool note_minimum(std::size_t level, std::int64_t node);
};

}  // namespace relive
