// Draws rows that can be drawn by trying random ones, and counts them out where they are rare.
#include "draws.hpp"

#include <cmath>
#include <functional>
#include <queue>
#include <tuple>
#include <vector>

#include "bindings.hpp"
#include "gil.hpp"

namespace relive {

void masses(std::uint64_t stream, bool stratified, double total, std::span<double> out) {
    auto below = std::nextafter(total, 0.0);
    auto count = std::ssize(out);
    for (std::int64_t i = 0; i < count; ++i) {
        auto u = uniform(stream, static_cast<std::uint64_t>(i + 1));
        if (stratified) u = (static_cast<double>(i) + u) / static_cast<double>(count);
        out[i] = std::min(below, u * total);  // rounding may reach the total
    }
}

namespace {

// So many draws may miss before the rows that can be drawn are counted out one by one.
constexpr std::uint64_t MOST_ATTEMPTS = 100;

// Where rows that can be drawn are rare: count them, and walk to one drawn by its number. -1 if there is none.
Place draw_by_counting(const Ring &ring, std::uint64_t stream, std::uint64_t i, const std::vector<Number> &first) {
    std::int64_t found = 0, wanted = -1;
    for (int round = 0; round < 2; ++round, found = 0) {
        for (std::int64_t e = 0; e < ring.num_envs(); ++e)
            for (auto number = first[e]; number < ring.envs[e].head; ++number)
                if (auto place = ring.place_of(number, e); ring.can_draw(place, number, e) && found++ == wanted)
                    return place;
        if (found == 0) return -1;
        // another stream than that of the attempts, so that the row is not one that has missed
        wanted = static_cast<std::int64_t>(uniform(mix(stream) + i, 0) * static_cast<double>(found));
    }
    return -1;
}

}  // namespace

bool draw_uniform(const Ring &ring, std::uint64_t stream, std::int64_t newest, std::span<Place> out, std::size_t low,
                  std::size_t all) {
    auto &range = draw_range_of(ring, newest);
    if (range.total() <= 0) return false;
    auto count = out.size();
    auto numbers = scratch<Number>(count);
    for (std::size_t i = 0; i < count; ++i) {
        auto [e, number] = range.at(stream, 1 + low + i);
        numbers[i] = number;
        out[i] = ring.place_of(number, e);
        fetch(ring.row(out[i]), static_cast<std::size_t>(2 * ring.width));
    }
    // By now all of those rows are on their way, rather than one after another.
    auto every = ring.counters->history == 0 && ring.counters->length == 1;  // complete row can be drawn
    for (std::size_t i = 0; i < count; ++i) {
        if (every && ring.stamp[out[i]] >= 0) continue;
        DrawRange::Spot spot{out[i] / ring.rows, numbers[i]};
        for (std::uint64_t attempt = 1; !ring.can_draw(out[i], spot.number, spot.env); ++attempt) {
            if (attempt == MOST_ATTEMPTS) {
                if ((out[i] = draw_by_counting(ring, stream, low + i, range.first)) < 0) return false;
                break;
            }
            spot = range.at(stream, 1 + low + i + all * attempt);
            out[i] = ring.place_of(spot.number, spot.env);
        }
    }
    return true;
}

namespace {

std::int64_t bound_window(const Ring &ring, std::int64_t newest, Vector<Number> first, Vector<std::int64_t> until) {
    require(first.size() == ring.num_envs() && until.size() == ring.num_envs(),
            "window: expected an entry for each env");
    LongWork hold(ring.num_envs() > MANY_ITEMS);
    auto &range = draw_range_of(ring, newest);
    std::copy(range.first.begin(), range.first.end(), first.begin());
    std::copy(range.until.begin(), range.until.end(), until.begin());
    return range.total();
}

// The places of a window's rows: of each env at most two runs, up to its last place and from its first one on.
void window_runs(const Ring &ring, std::int64_t newest, Vector<Place> begins, Vector<Place> ends) {
    require(begins.size() == 2 * ring.num_envs() && ends.size() == begins.size(),
            "window_runs: expected two entries for each env");
    LongWork hold(ring.num_envs() > MANY_ITEMS);
    auto &range = draw_range_of(ring, newest);
    for (std::int64_t e = 0; e < ring.num_envs(); ++e) {
        auto base = e * ring.rows, end = ring.place_of(range.first[e], e) + ring.envs[e].head - range.first[e];
        auto beyond = std::max<std::int64_t>(end - (base + ring.rows), 0);
        begins[2 * e] = ring.place_of(range.first[e], e);
        ends[2 * e] = end - beyond;
        begins[2 * e + 1] = base;
        ends[2 * e + 1] = base + beyond;
    }
}

bool bound_draw(const Ring &ring, Word stream, std::int64_t newest, Vector<Place> places) {
    LongWork hold(places.size() > MANY_ITEMS);
    return draw_uniform(ring, stream.value, newest, places);
}

// 0..n-1 in an order that (seed, counter) determines (Fisher-Yates).
// 17 µs for 16,384 rows, against 49 for torch.randperm. Indices in int32 instead of int64 saved nothing.
void permute(Word seed, Word counter, Vector<std::int64_t> order) {
    LongWork hold(order.size() > MANY_ITEMS);
    for (std::int64_t i = 0; i < order.size(); ++i) order[i] = i;
    auto stream = key(seed.value, counter.value);
    auto count = order.size();
    for (auto left = count; left > 1; --left) {  // places to be swapped, the last one first
        auto u = uniform(stream, static_cast<std::uint64_t>(count - left + 1));
        std::swap(order[left - 1], order[static_cast<std::int64_t>(u * static_cast<double>(left))]);  // u is below 1
    }
}

// The public index, number * N + env, of the rows at live places. The first that is no place of a row, or -1.
std::int64_t ids_of(const Ring &ring, Vector<const Place> places, Vector<std::int64_t> index) {
    require(places.size() == index.size(), "ids_of: expected as many indices as places");
    LongWork hold(places.size() > MANY_ITEMS);
    for (std::int64_t i = 0; i < places.size(); ++i) {
        auto place = places[i];  // once: another thread may write another one after the check
        if (place < 0 || place >= ring.places()) return i;
        auto owner = ring.owner_of(place);
        // the public index: it stays the same however often the ring wraps
        index[i] = owner.number * ring.num_envs() + owner.env;
    }
    return -1;
}

// Places of public indices, -1 for those that can no longer be drawn. The first that was never issued, or -1; from that
// one on all places are -1.
std::int64_t find_live(const Ring &ring, Vector<const std::int64_t> index, Vector<Place> places) {
    require(places.size() == index.size(), "live: expected as many places as indices");
    LongWork hold(places.size() > MANY_ITEMS);
    auto envs = static_cast<std::uint64_t>(ring.num_envs());
    for (std::int64_t i = 0; i < index.size(); ++i) {
        auto given = index[i];
        auto number = static_cast<std::int64_t>(static_cast<std::uint64_t>(given) / envs);
        auto e = static_cast<std::int64_t>(static_cast<std::uint64_t>(given) % envs);
        if (given < 0 || number >= ring.envs[e].head) {
            std::fill(places.begin() + i, places.end(), -1);
            return i;
        }
        auto place = ring.place_of(number, e);
        places[i] = number >= ring.oldest(e) && ring.can_draw(place, number, e) ? place : -1;
    }
    return -1;
}

// The places of all rows that can be drawn, env by env in the order of time; how many there are.
std::int64_t anchors(const Ring &ring, Vector<Place> out) {
    std::int64_t live = 0, found = 0;
    for (std::int64_t e = 0; e < ring.num_envs(); ++e) live += ring.envs[e].head - ring.oldest(e);
    require(live <= out.size(), "anchors: expected room for the places of all live rows");
    LongWork hold(live > MANY_ITEMS);
    for (std::int64_t e = 0; e < ring.num_envs(); ++e)
        for (auto number = ring.oldest(e); number < ring.envs[e].head; ++number)
            if (auto place = ring.place_of(number, e); ring.can_draw(place, number, e)) out[found++] = place;
    return found;
}

// The first row of an env, from `number` on, that can be drawn; its next number if there is none.
Number first_anchor(const Ring &ring, std::int64_t e, Number number) {
    number = std::max(number, ring.oldest(e));
    while (number < ring.envs[e].head && !ring.can_draw(ring.place_of(number, e), number, e)) ++number;
    return number;
}

// Of the rows that can be drawn, from row `next` of each env on, those that were completed first: as many as there are
// places. Moves `next` behind them; how many there were.
std::int64_t take_fresh(const Ring &ring, Vector<Number> next, Vector<Place> places) {
    require(next.size() == ring.num_envs(), "take_fresh: expected an entry for each env");
    LongWork hold(ring.num_envs() + places.size() > MANY_ITEMS);
    // the stamps of an env grow with the number, so the first of each env are all that can come next
    using First = std::tuple<std::int64_t, std::int64_t, Number>;  // its stamp, the env, its number
    std::priority_queue<First, std::vector<First>, std::greater<>> firsts;
    auto find = [&](std::int64_t e, Number from) {
        auto number = first_anchor(ring, e, from);
        if (number < ring.envs[e].head) firsts.emplace(ring.stamp[ring.place_of(number, e)], e, number);
    };
    for (std::int64_t e = 0; e < ring.num_envs(); ++e) find(e, next[e]);
    std::int64_t count = 0;
    for (; count < places.size() && !firsts.empty(); ++count) {
        auto [stamp, e, number] = firsts.top();
        firsts.pop();
        places[count] = ring.place_of(number, e);
        next[e] = number + 1;
        find(e, number + 1);
    }
    return count;
}

// How many rows can be drawn from row `next` of each env on.
std::int64_t count_fresh(const Ring &ring, Vector<const Number> next) {
    require(next.size() == ring.num_envs(), "count_fresh: expected an entry for each env");
    std::int64_t rows = 0, found = 0;
    for (std::int64_t e = 0; e < ring.num_envs(); ++e)
        rows += std::max<std::int64_t>(ring.envs[e].head - std::max(next[e], ring.oldest(e)), 0);
    LongWork hold(rows > MANY_ITEMS);
    for (std::int64_t e = 0; e < ring.num_envs(); ++e)
        for (auto number = next[e]; (number = first_anchor(ring, e, number)) < ring.envs[e].head; ++number) ++found;
    return found;
}

// The sum of the ages of all rows that can be drawn, and the age of the oldest of them. A row's age is how many
// transitions were completed after it. All rows are read only after changes that were not followed.
nb::tuple ages(const Ring &ring) {
    auto &ranges = ring.ranges;
    auto completed = ring.counters->completed, lowest = completed;
    bool walks = !ranges.added_up;
    {
        LongWork hold(walks || ring.num_envs() > MANY_ITEMS);
        std::uint64_t stamps = 0;
        for (std::int64_t e = 0; e < ring.num_envs(); ++e) {
            bool found = false;
            for (auto number = ring.oldest(e); number < ring.envs[e].head && (walks || !found); ++number) {
                auto place = ring.place_of(number, e);
                if (!ring.can_draw(place, number, e)) continue;
                auto stamp = ring.stamp[place];
                // stamps of an env grow with the number
                if (!found) lowest = std::min(lowest, stamp);
                found = true;
                stamps += static_cast<std::uint64_t>(stamp);
            }
        }
        if (walks) ranges.stamps = stamps;
    }
    ranges.added_up = true;
    auto drawable = static_cast<std::uint64_t>(ring.counters->drawable);
    auto oldest = drawable ? completed - 1 - lowest : 0;
    return nb::make_tuple(drawable * static_cast<std::uint64_t>(completed - 1) - ranges.stamps, oldest);
}

}  // namespace

void bind_draws(nb::module_ &module) {
    RELIVE_EXPORT(MOST_ATTEMPTS);
    using namespace nb::literals;
    module.def("mix", [](Word z) { return mix(z.value); }, "z"_a,
               "The finalizer of splitmix64 (Steele, Lea and Flood 2014). Ints count modulo 2**64 here and below.");
    module.def("key", [](Word seed, Word counter) { return key(seed.value, counter.value); }, "seed"_a, "counter"_a,
               "The stream of random numbers that belongs to draw number ``counter`` of a seed.");
    module.def("masses", [](Word stream, bool stratified, double total, Vector<double> out) {
        LongWork hold(out.size() > MANY_ITEMS);
        masses(stream.value, stratified, total, out);
    }, "stream"_a, "stratified"_a, "total"_a, "out"_a,
    "Numbers 1, 2, ... of a stream as masses in [0, total); if ``stratified``, one from each of B equal parts.");
    module.def("permute", permute, "seed"_a, "counter"_a, "order"_a,
               "Fisher-Yates over 0..n-1, a function of (seed, counter) alone.");
    module.def("window", bound_window, "ring"_a, "newest"_a, "first"_a, "until"_a,
               "The first number in each env of the ``newest`` transitions, and running sums; how many rows.");
    module.def("window_runs", window_runs, "ring"_a, "newest"_a, "begins"_a, "ends"_a,
               "The places of these rows, as two runs of each env: from the begins up to the ends, ``[2 N]``.");
    module.def("count_complete", [](const Ring &ring) {
        LongWork hold(ring.num_envs() > MANY_ITEMS);
        return count_complete(ring);
    }, "ring"_a, "How many transitions a window of the newest can have.");
    module.def("draw", bound_draw, "ring"_a, "stream"_a, "newest"_a, "places"_a,
               "Places of anchors, drawn uniformly from the ``newest`` (0: from all); False if there are none.");
    module.def("ids_of", ids_of, "ring"_a, "places"_a, "index"_a,
               "The public index of the rows at live places; the first that is no place of a row, or -1.");
    module.def("live", find_live, "ring"_a, "index"_a, "places"_a,
               "Places of indices, -1 for those that can no longer be drawn; the first that was never issued, or -1.");
    module.def("anchors", anchors, "ring"_a, "out"_a,
               "The places of all rows that can be drawn, env by env in the order of time; how many there are.");
    module.def("take_fresh", take_fresh, "ring"_a, "next"_a, "places"_a,
               "The places of anchors from row ``next`` of each env on, the first completed first; moves ``next`` on.");
    module.def("count_fresh", count_fresh, "ring"_a, "next"_a, "How many anchors there are from those rows on.");
    module.def("ages", ages, "ring"_a,
               "The sum of the ages of all rows that can be drawn, and the largest; 0 if there are none.");
}

}  // namespace relive
