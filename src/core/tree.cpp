// Changes the weights of a sum tree level by level, and walks down from its root to draw.
#include "tree.hpp"

#include <limits>
#include <utility>

#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "draws.hpp"
#include "gil.hpp"

namespace relive {

namespace {

constexpr std::int64_t AHEAD = 16;  // so many leaves or nodes are loaded before they are used
constexpr double INFINITE = std::numeric_limits<double>::infinity();

double sum_of(const double *children) {
    auto sum = 0.0;
    for (std::int64_t k = 0; k < Tree::WIDTH; ++k) sum += children[k];
    return sum;
}

}  // namespace

std::vector<std::int64_t> Tree::levels(std::int64_t leaves) {
    require(0 <= leaves && leaves < std::int64_t{1} << 56, "no tree has so many leaves");
    std::vector<std::int64_t> starts{0};
    do {
        leaves = (leaves + WIDTH - 1) / WIDTH;
        starts.push_back(starts.back() + leaves * WIDTH);
    } while (leaves > 1);
    return starts;
}

Tree::Tree(KeptVector<double> nodes_, std::int64_t leaves_, KeptVector<double> minima_)
    : leaves(leaves_), offsets(levels(leaves_)), nodes(std::move(nodes_)) {
    require(leaves > 0 && nodes.size() == offsets.back() + 1, "a tree's nodes: expected another number");
    set_minima(std::move(minima_));
}

void Tree::set_minima(KeptVector<double> array) {
    require(array.size() == 0 || array.size() == nodes.size() - offsets[1],
            "a tree's minima: expected none, or one for each node that is not a leaf");
    minima = std::move(array);
}

double Tree::low_of(std::size_t level, std::int64_t node) const {
    if (level) return minima[offsets[level] - offsets[1] + node];
    return nodes[node] > 0.0 ? nodes[node] : INFINITE;
}

// Find the minimum of a node above `level` from its children; whether it is another now.
bool Tree::note_minimum(std::size_t level, std::int64_t node) {
    auto low = INFINITE;
    for (std::int64_t k = 0; k < WIDTH; ++k) low = std::min(low, low_of(level, node * WIDTH + k));
    return std::exchange(minima[offsets[level + 1] - offsets[1] + node], low) != low;
}

void Tree::build() {
    LongWork hold(nodes.count > MANY_ITEMS);
    for (std::size_t level = 0; level + 1 < offsets.size(); ++level)
        for (std::int64_t node = 0; node < count(level + 1); ++node) {
            nodes[offsets[level + 1] + node] = sum_of(&nodes[offsets[level] + node * WIDTH]);
            if (minima.count) note_minimum(level, node);
        }
}

// A walker goes from a node to its parent. One whose node keeps its value ends there, and so do all but the first of
// those that meet in one node.
void Tree::propagate(std::span<std::int64_t> walkers) {
    auto coming = std::ssize(walkers);
    for (std::size_t level = 0; level + 1 < offsets.size(); ++level) {
        auto *below = &nodes[offsets[level]], *above = &nodes[offsets[level + 1]];
        std::int64_t staying = 0;
        for (std::int64_t i = 0; i < coming; ++i) {
            if (i + AHEAD < coming) {
                __builtin_prefetch(&below[walkers[i + AHEAD] / WIDTH * WIDTH]);
                __builtin_prefetch(&above[walkers[i + AHEAD] / WIDTH]);
            }
            auto node = walkers[staying] = walkers[i] / WIDTH;
            auto sum = sum_of(&below[node * WIDTH]);
            auto changed = std::exchange(above[node], sum) != sum;
            if (minima.count) changed |= note_minimum(level, node);
            staying += changed;
        }
        coming = staying;
    }
}

std::int64_t Tree::set(Vector<const std::int64_t> positions, Vector<const double> values) {
    require(values.size() == positions.size() || values.size() == 1, "Tree.set: expected a value for each position");
    LongWork hold(positions.size() > MANY_ITEMS);
    auto each = values.size() > 1;  // one value for all: i * 0 reads it again and again
    auto limit = heaviest();
    auto memory = scratch<std::int64_t>(static_cast<std::size_t>(positions.size()));
    std::span walkers(memory.get(), static_cast<std::size_t>(positions.size()));
    for (std::int64_t i = 0; i < positions.size(); ++i) {
        auto place = walkers[i] = positions[i];  // a copy: other threads may change the array
        if (auto value = values[i * each]; !(has(place) && 0.0 <= value && value <= limit)) return i;
    }
    std::size_t changed = 0;
    auto *weights = nodes.data;
    for (std::int64_t i = 0; i < positions.size(); ++i) {
        if (i + AHEAD < positions.size()) __builtin_prefetch(&weights[walkers[i + AHEAD]]);
        auto place = walkers[changed] = walkers[i];
        auto weight = values[i * each] + 0.0;  // -0.0 becomes 0.0
        changed += weights[place] != weight;
        weights[place] = weight;
    }
    propagate(walkers.first(changed));
    return -1;
}

std::int64_t Tree::get(Vector<const std::int64_t> positions, Vector<double> out) const {
    require(positions.size() == out.size(), "Tree.get: expected room for a weight of each position");
    LongWork hold(positions.size() > MANY_ITEMS);
    for (std::int64_t i = 0; i < positions.size(); ++i) {
        if (!has(positions[i])) return i;
        out[i] = weight(positions[i]);
    }
    return -1;
}

void Tree::require_ranges(Vector<const std::int64_t> begins, Vector<const std::int64_t> ends) const {
    require(begins.size() == ends.size(), "ranges of leaves: expected as many ends as begins");
    for (std::int64_t i = 0; i < begins.size(); ++i)
        require(0 <= begins[i] && begins[i] <= leaves && ends[i] <= leaves,
                "ranges of leaves: expected begins and ends within the tree");
}

// The weights of a range are summed over its own nodes. The difference of two prefix sums loses digits: with an alpha
// of 2, four errors of 0 behind errors of 1,000 had a sum of 0.
std::int64_t Tree::cover(Vector<const std::int64_t> begins, Vector<const std::int64_t> ends,
                         Vector<std::int64_t> places, Vector<double> until) const {
    require_ranges(begins, ends);
    auto room = 2 * (WIDTH - 1) * std::ssize(offsets) * begins.size();
    require(places.size() >= room && until.size() >= room, "Tree.cover: expected more room for the nodes");
    std::int64_t count = 0;
    auto total = 0.0;
    for (std::int64_t i = 0; i < begins.size(); ++i) {
        auto begin = begins[i], end = ends[i];
        std::size_t level = 0;
        std::int64_t size = 1;
        while (begin < end) {
            // up while a larger node begins here and ends within the range, then down on its right
            while (level + 1 < offsets.size() && begin % (size * WIDTH) == 0 && begin + size * WIDTH <= end) {
                ++level;
                size *= WIDTH;
            }
            while (begin + size > end) {
                --level;
                size /= WIDTH;
            }
            places[count] = offsets[level] + begin / size;
            total += nodes[places[count]];
            until[count++] = total;
            begin += size;
        }
    }
    return count;
}

// Each level is a cache miss that the next one waits for. 256 draws of 1 M leaves take 58 µs walk by walk, 23 level by
// level, and 9.4 where the next level is asked for. A table of the upper levels would save 1.2 µs of a draw, and is not
// worth 40 lines.
// One level for all walkers before the next one: their cache misses overlap.
std::int64_t Tree::find(const Cover &among, std::span<const double> masses, std::span<std::int64_t> out) const {
    auto total = among.total();
    for (std::size_t i = 0; i < masses.size(); ++i)
        if (!(0.0 <= masses[i] && masses[i] < total)) return static_cast<std::int64_t>(i);
    auto memory = scratch<double>(masses.size());
    auto levels = scratch<std::size_t>(masses.size());
    auto top = offsets.size() - 1;
    auto *starts = memory.get();  // where the interval of each walker's node begins
    for (std::size_t i = 0; i < masses.size(); ++i) {
        // the mass is below the last sum
        auto k = std::upper_bound(among.until.begin(), among.until.end() - 1, masses[i]) - among.until.begin();
        auto level = top;
        for (out[i] = among.places[k]; level && offsets[level] > out[i];) --level;
        out[i] = std::clamp<std::int64_t>(out[i] - offsets[level], 0, count(level) - 1);
        starts[i] = k ? among.until[k - 1] : 0.0;
        levels[i] = level;
    }
    for (auto level = top; level-- > 0;) {
        auto here = &nodes[offsets[level]], next = &nodes[offsets[level ? level - 1 : 0]];
        auto most = count(level) - 1;  // nodes from a file may hold anything: no walker leaves what is in use
        for (std::size_t i = 0; i < masses.size(); ++i) {
            if (level >= levels[i]) continue;  // it starts further below
            auto children = here + out[i] * WIDTH;
            // Where each child's share begins. The child is counted, and its share looked up, rather than jumped to:
            // nobody can predict which one it is, and gcc makes jumps of plainer forms.
            double edges[WIDTH + 1] = {starts[i]};
            std::int64_t child = 0;
            for (std::int64_t k = 0; k < WIDTH; ++k) {
                edges[k + 1] = edges[k] + children[k];
                child += edges[k + 1] <= masses[i];
            }
            if (child == WIDTH) [[unlikely]]  // rounding left the mass beyond all: the last positive child
                for (std::int64_t k = child = 0; k < WIDTH; ++k) child = children[k] > 0.0 ? k : child;
            starts[i] = edges[child];
            out[i] = std::min(out[i] * WIDTH + child, most);
            __builtin_prefetch(next + out[i] * WIDTH);
        }
    }
    return -1;
}

// Whole blocks are looked up in the levels above.
double Tree::lowest(Vector<const std::int64_t> begins, Vector<const std::int64_t> ends) const {
    require_ranges(begins, ends);
    require(minima.count > 0, "Tree.lowest: expected a tree with minima");
    auto lowest = INFINITE;
    for (std::int64_t i = 0; i < begins.size(); ++i) {
        auto low = begins[i], high = ends[i];
        for (std::size_t level = 0; low < high; low /= WIDTH, high /= WIDTH, ++level) {
            for (; low < high && low % WIDTH; ++low) lowest = std::min(lowest, low_of(level, low));
            while (low < high && high % WIDTH) lowest = std::min(lowest, low_of(level, --high));
        }
    }
    return lowest;
}

void bind_tree(nb::module_ &module) {
    using namespace nb::literals;
    using Nodes = KeptVector<double>;
    module.attr("FANOUT") = Tree::WIDTH;
    nb::class_<Tree>(module, "Tree", "The nodes of a sum tree, as compiled code holds them.")
        .def(nb::init<Nodes, std::int64_t, Nodes>(), "nodes"_a, "leaves"_a, "minima"_a)
        .def_prop_rw("minima", [](const Tree &tree) { return tree.minima.array; }, &Tree::set_minima,
                     nb::for_setter(nb::arg("array")), "Of the nodes above the leaves; empty if none are kept.")
        .def("__reduce__", [](nb::handle self) {
            auto &tree = nb::cast<const Tree &>(self);
            return nb::make_tuple(self.type(), nb::make_tuple(tree.nodes.array, tree.leaves, tree.minima.array));
        })
        .def("build", &Tree::build, "Sum every node anew from the leaves; find the minima too, if they are kept.")
        .def("set", &Tree::set, "positions"_a, "values"_a, "Give leaves weights; -1, or the first entry that is wrong.")
        .def("get", &Tree::get, "positions"_a, "out"_a, "The weights of leaves; -1, or the first position of none.")
        .def("cover", &Tree::cover, "begins"_a, "ends"_a, "places"_a, "until"_a,
             "Cut ranges of leaves into as few nodes as possible; how many.")
        .def("find", [](const Tree &tree, Vector<const std::int64_t> places, Vector<const double> until,
                        Vector<const double> masses, Vector<std::int64_t> out) {
            require(places.size() == until.size(), "a cover: expected a sum for each node");
            require(masses.size() == out.size(), "Tree.find: expected room for a leaf of each mass");
            LongWork hold(masses.size() > MANY_ITEMS);
            return tree.find({places, until}, masses, out);
        }, "places"_a, "until"_a, "masses"_a, "out"_a, "Who owns each mass, in a cover; -1, or the first of nobody.")
        .def("lowest", &Tree::lowest, "begins"_a, "ends"_a, "The smallest positive weight of some ranges, or inf.");
    module.def("tree_offsets", &Tree::levels, "leaves"_a, "Where each level of a tree starts; last, its root.");
}

}  // namespace relive
