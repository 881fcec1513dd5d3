// Keeps up to date which rows of each env draws may point at, without a walk through all envs.
#include "draw_ranges.hpp"

#include <algorithm>
#include <limits>

#include "draws.hpp"
#include "random.hpp"
#include "ring.hpp"

namespace relive {

namespace {

constexpr std::int64_t AHEAD = 16;  // envs whose rows are on their way while one is looked at

// The first of low, ..., high - 1 for which `holds` is true, or `high`; it is true for all that follow. It takes few
// steps if `guess` is close.
template <typename Holds>
std::int64_t first_near(std::int64_t low, std::int64_t high, std::int64_t guess, Holds holds) {
    guess = std::clamp(guess, low, high);
    if (guess < high && !holds(guess)) {
        low = guess + 1;
        for (std::int64_t step = 0; low + step < high; step = 2 * step + 1) {
            if (holds(low + step)) high = low + step;
            else low += step + 1;
        }
    } else {
        high = guess;
        for (std::int64_t step = 1; high - step >= low; step *= 2) {
            if (holds(high - step)) high -= step;
            else low = high - step + 1;
        }
    }
    while (low < high) {
        auto middle = low + (high - low) / 2;
        if (holds(middle)) high = middle;
        else low = middle + 1;
    }
    return low;
}

std::int64_t history_of(const Ring &ring) { return ring.counters->length == 1 ? ring.counters->history : 0; }

// The first row from `number` on that has its history.
Number with_history(const Ring &ring, std::int64_t e, Number number, std::int64_t history) {
    if (history == 0) return number;
    auto head = ring.envs[e].head;
    // where rows of any episode count, so many are passed over at once; the walk then takes two steps at most
    if (ring.counters->across()) number = std::min(head, std::max(number, ring.oldest(e) + history - 1));
    while (number < head && !ring.has_history(ring.place_of(number, e), number, e)) ++number;
    return number;
}

// How many transitions of an env begin at row `number` or later.
std::int64_t transitions_since(const Ring &ring, std::int64_t e, Number number) {
    const auto &env = ring.envs[e];
    // at most `rows` lie between, so the difference of two counts fits 32 bits
    return number < env.head ? static_cast<std::uint32_t>(env.count - ring.order[ring.place_of(number, e)]) : 0;
}

void add_up(const Ring &ring, DrawRange &range, std::size_t from) {
    auto total = from > 0 ? range.until[from - 1] : 0;
    for (auto e = from; e < range.until.size(); ++e) range.until[e] = total += ring.envs[e].head - range.first[e];
}

const DrawRange &whole_of(const Ring &ring, DrawRanges &ranges) {
    if (!ranges.known) {
        auto history = history_of(ring);
        for (std::int64_t e = 0; e < ring.num_envs(); ++e)
            ranges.whole.first[e] = with_history(ring, e, ring.oldest(e), history);
        ranges.known = true;
        ranges.stale = 0;
    }
    add_up(ring, ranges.whole, ranges.stale);
    ranges.stale = ranges.whole.until.size();
    return ranges.whole;
}

// Moves `first` to the rows stamped since `threshold` that have their history: how many transitions there are.
std::int64_t move_to(const Ring &ring, std::int64_t threshold, std::vector<std::int64_t> &first) {
    auto history = history_of(ring), envs = ring.num_envs();
    auto guess = [&](std::int64_t e) { return std::clamp(first[e], ring.oldest(e), ring.envs[e].head); };
    std::int64_t count = 0;
    for (std::int64_t e = 0; e < envs; ++e) {
        if (e + AHEAD < envs) {
            auto number = guess(e + AHEAD);
            __builtin_prefetch(&ring.stamp[ring.place_of(number, e + AHEAD)]);
            if (number > 0) __builtin_prefetch(&ring.stamp[ring.place_of(number - 1, e + AHEAD)]);
        }
        auto since = [&](Number number) {
            auto stamp = ring.stamp[ring.place_of(number, e)];
            // a row that is not complete has the number of those completed before it, as -1 - stamp
            return (stamp >= 0 ? stamp : -1 - stamp) >= threshold;
        };
        auto number = first_near(ring.oldest(e), ring.envs[e].head, first[e], since);  // stamps grow with the number
        first[e] = with_history(ring, e, number, history);
        count += transitions_since(ring, e, first[e]);
    }
    return count;
}

// Moves `first` to the `newest` transitions, of which there are more.
void move_to_newest(const Ring &ring, std::int64_t newest, std::vector<std::int64_t> &first) {
    // The stamp of the first of them lies from `low` to `high`. Most often none of the newest has gone, and they have
    // the last stamps; else they begin earlier, by at least as many stamps as are missing.
    std::int64_t low = 0, high = ring.counters->completed - newest, at = high;
    for (auto before = std::numeric_limits<std::int64_t>::max();;) {
        auto missing = newest - move_to(ring, at, first);
        if (missing <= 0) low = at;
        else high = at - missing;
        if (low >= high) break;
        at = missing > 0 && missing <= before / 2 ? high : low + (high - low + 1) / 2;
        before = missing;
    }
    if (at != low) move_to(ring, low, first);
}

}  // namespace

DrawRange::Spot DrawRange::at(std::uint64_t stream, std::uint64_t nth) const {
    auto u = uniform(stream, nth);
    auto spot = static_cast<std::int64_t>(u * static_cast<double>(total()));
    // most often all envs have about as many rows, so that it is clear where the spot lies
    auto last = std::ssize(until) - 1, guess = static_cast<std::int64_t>(u * static_cast<double>(until.size()));
    auto e = first_near(0, last, guess, [&](std::int64_t env) { return spot < until[env]; });
    // a number is never negative, whatever others have made of the ring meanwhile
    return {e, std::max<std::int64_t>(first[e] + spot - (e > 0 ? until[e - 1] : 0), 0)};
}

void Ring::note_added(std::int64_t e) {
    auto env = static_cast<std::size_t>(e);
    auto &[first, until] = ranges.whole;
    first[env] = with_history(*this, e, std::max(first[env], oldest(e)), history_of(*this));
    auto added = envs[e].head - first[env];
    if (added != until[env] - (env > 0 ? until[env - 1] : 0)) ranges.stale = std::min(ranges.stale, env);
}

std::int64_t count_complete(const Ring &ring) {
    auto &ranges = ring.ranges;
    if (ranges.counted == ranges.version) return ranges.complete;
    auto &whole = whole_of(ring, ranges);
    ranges.complete = 0;
    for (std::int64_t e = 0; e < ring.num_envs(); ++e) ranges.complete += transitions_since(ring, e, whole.first[e]);
    ranges.counted = ranges.version;
    return ranges.complete;
}

const DrawRange &draw_range_of(const Ring &ring, std::int64_t newest) {
    auto &ranges = ring.ranges;
    auto &whole = whole_of(ring, ranges);
    auto single = ring.counters->length == 1;
    if (newest <= 0 || (single && newest >= ring.counters->drawable)) return whole;
    if (ranges.newest == newest && ranges.seen == ranges.version) return ranges.recent;
    if (!single && newest >= count_complete(ring)) return whole;
    ranges.newest = 0;
    move_to_newest(ring, newest, ranges.recent.first);
    add_up(ring, ranges.recent, 0);
    ranges.newest = newest;
    ranges.seen = ranges.version;
    return ranges.recent;
}

}  // namespace relive
