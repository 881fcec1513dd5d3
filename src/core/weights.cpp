// Sets the weights of windows, as the ring's rule says what is drawn equally often, and draws within an episode.
#include "weights.hpp"

#include "bindings.hpp"
#include "draws.hpp"
#include "gil.hpp"

namespace relive {

namespace {

enum Weigh : std::int64_t { WINDOWS, STEPS, EPISODES };  // counters->weigh, as files have it

// The first step of the last whole window before the one that ends at step `at` >= length of an episode.
std::int64_t whole_before(const Counters &rule, std::int64_t at) { return rule.window_start(at - rule.positive_stride()); }

// Where the window before the one that ends at a place ends, in the same episode; -1 if there is none, or no more.
Place window_before(const Ring &ring, Place place) {
    const auto &rule = *ring.counters;
    std::int64_t at = ring.step[place];
    if (at < rule.length) return -1;
    auto [env, begin, number] = ring.owner_of(place);
    auto back = at - (whole_before(rule, at) + rule.length - 1);
    return number - back >= ring.oldest(env) ? ring.place_of(number - back, env) : -1;
}

}  // namespace

std::int64_t weigh_windows(Tree &tree, const Ring &ring, Vector<const Place> places,
                           Vector<const std::uint8_t> drawable) {
    require(places.size() == drawable.size(), "weigh_windows: expected a flag for each place");
    require(tree.leaves == ring.places(), "weigh_windows: expected a leaf for each row of the ring");
    LongWork hold(places.size() > MANY_ITEMS);
    auto count = static_cast<std::size_t>(places.size());
    auto memory = scratch<Place>(3 * count);
    std::span<Place> given{memory.get(), count}, walkers{memory.get() + count, 2 * count};
    for (std::size_t i = 0; i < count; ++i) {
        given[i] = places[static_cast<std::int64_t>(i)];  // a copy: other threads may change the array
        if (!tree.has(given[i])) return static_cast<std::int64_t>(i);
    }
    const auto &rule = *ring.counters;
    std::size_t changed = 0;
    auto weigh = [&](Place place, double weight) {
        walkers[changed] = place;
        changed += tree.nodes[place] != weight;
        tree.nodes[place] = weight;
    };
    for (std::size_t i = 0; i < count; ++i) {
        std::int64_t at = ring.step[given[i]];
        auto weight = rule.weigh == STEPS ? static_cast<double>(at + 1 - rule.window_start(at)) : 1.0;
        weigh(given[i], drawable[static_cast<std::int64_t>(i)] ? weight : 0.0);
    }
    // in order, so that each takes the weight of the one before it: a place is in turn when its own window is opened,
    // not when that of a row which lay there before is closed
    for (std::size_t i = 0; rule.weigh == EPISODES && i < count; ++i)
        if (drawable[static_cast<std::int64_t>(i)] && tree.nodes[given[i]] > 0.0)
            if (auto before = window_before(ring, given[i]); before >= 0) weigh(before, 0.0);
    tree.propagate(walkers.first(changed));
    return -1;
}

Place window_of_episode(const Ring &ring, Place newest, Number oldest, double random) {
    const auto &rule = *ring.counters;
    auto [env, place, number] = ring.owner_of(newest);
    std::int64_t at = ring.step[newest], begins = number - at, others = 0, last = 0;
    if (at >= rule.length) {
        // the first row that can end a window: the episode's first, or the first whose history is still stored
        auto low = begins >= ring.oldest(env) ? begins : ring.oldest(env) + rule.history;
        // whole windows of the episode, the newest apart: from the one that ends at row `low` or next after it
        auto first = rule.window_start(std::max(low, oldest) - begins);
        last = whole_before(rule, at);
        if (last >= first) others = (last - first) / rule.positive_stride() + 1;
    }
    auto chosen = static_cast<std::int64_t>(random * static_cast<double>(1 + others));
    if (chosen == 0) return newest;  // 1 is the one before it, and so on
    auto end = last - (chosen - 1) * rule.positive_stride() + rule.length - 1;
    return ring.place_of(begins + end, env);
}

void bind_weights(nb::module_ &module) {
    using namespace nb::literals;
    module.def("weigh_windows", &weigh_windows, "tree"_a, "ring"_a, "places"_a, "drawable"_a,
               "Note that the windows that end at ``places`` can be drawn from now on (1) or no more (0), in order.\n\n"
               "``tree`` has their weights, as the ring's rule says. -1, or the first entry that is no place; then "
               "nothing is written.");
}

}  // namespace relive
