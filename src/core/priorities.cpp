// Sets the weights of rows from their TD errors, and draws rows by them.
#include "priorities.hpp"

#include <cstddef>
#include <limits>

#include "bindings.hpp"
#include "draws.hpp"
#include "gil.hpp"
#include "power.hpp"
#include "tensors.hpp"

namespace relive {

namespace {

constexpr std::int64_t AHEAD = 64;  // so many rows are loaded before they are used
constexpr double LARGEST_ERROR = std::numeric_limits<float>::max();

// The words of `undo`; pairs of a place and its error before follow. Files hold them in this order.
enum Undo : std::int64_t {
    RATED,          // how many errors have to be put back, if a kill comes now; 0 for none, or ALL_RATED
    RATED_LARGEST,  // the largest error before
    RATED_START,    // where the pairs begin
};
constexpr double ALL_RATED = -1.0;  // there were more errors than `undo` has room for, and none was noted

}  // namespace

Priorities::Priorities(Tree &tree_, KeptVector<float> errors, KeptVector<double> facts, const Ring &ring_,
                       KeptVector<double> undo)
    : tree(&tree_), ring(&ring_), errors_(std::move(errors)), words_(std::move(facts)), undo_(std::move(undo)),
      facts_(reinterpret_cast<Facts *>(words_.data)) {
    require(errors_.size() == tree->leaves && words_.size() == FACTS && (!undo_.size() || undo_.size() >= RATED_START),
            "the arrays of priorities do not fit each other");
    require_fit();
}

// A ring may be bound again to other arrays.
void Priorities::require_fit() const {
    require(ring->places() == tree->leaves, "priorities do not fit the ring, which has other rows");
}

bool Priorities::draw(std::uint64_t stream, bool stratified, double beta, double lowest, const Cover &among,
                      std::span<Place> places, Column<double> probability, Column<float> weight) const {
    auto total = among.total();
    if (!(total > 0.0)) return false;
    auto memory = scratch<double>(places.size());
    std::span numbers(memory.get(), places.size());
    masses(stream, stratified, total, numbers);
    if (tree->find(among, numbers, places) >= 0) return false;
    // a view reads two rows of each next; they come while the weights are computed
    for (auto place : places) fetch(ring->row(place), static_cast<std::size_t>(2 * ring->width));
    auto least = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < places.size(); ++i) {
        numbers[i] = tree->weight(places[i]) / total;
        least = std::min(least, numbers[i]);
    }
    if (lowest > 0.0) least = lowest / total;
    for (std::size_t i = 0; i < places.size(); ++i) {
        probability[static_cast<std::int64_t>(i)] = numbers[i];
        numbers[i] /= least;
    }
    raise(numbers, -beta);
    for (std::size_t i = 0; i < places.size(); ++i)
        weight[static_cast<std::int64_t>(i)] = static_cast<float>(numbers[i]);
    return true;
}

// Note the errors of rows before they change, so that a change that a kill breaks off can be taken back.
void Priorities::note(std::span<const Rated> rated) {
    undo_[RATED_LARGEST] = facts_->largest;
    auto fits = RATED_START + 2 * std::ssize(rated) <= undo_.count;
    auto pair = &undo_[RATED_START];
    for (std::size_t i = 0; fits && i < rated.size(); ++i, pair += 2) {
        pair[0] = static_cast<double>(rated[i].place);  // a place is below 2**53
        pair[1] = errors_[rated[i].place];
    }
    in_order();  // the notes are whole before their number says that they count,
    undo_[RATED] = fits ? static_cast<double>(rated.size()) : ALL_RATED;
    in_order();  // and it does so before anything changes
}

// Write the errors of rows, their weights, and all sums that follow from them. False if one is too large.
bool Priorities::set(std::span<const Rated> rated) {
    auto memory = scratch<std::int64_t>(rated.size());
    std::span walkers(memory.get(), rated.size());
    auto numbers = scratch<double>(rated.size());
    std::span weights(numbers.get(), rated.size());
    for (std::size_t i = 0; i < rated.size(); ++i) weights[i] = static_cast<double>(rated[i].size) + facts_->eps;
    raise(weights, facts_->alpha);
    auto limit = tree->heaviest();
    for (auto weight : weights)
        if (!(weight <= limit)) return false;
    if (undo_.count) note(rated);
    std::size_t changed = 0;
    auto *nodes = tree->nodes.data;
    auto *stored = errors_.data;
    auto largest = facts_->largest;
    for (std::size_t i = 0; i < rated.size(); ++i) {
        auto [place, size] = rated[i];
        walkers[changed] = place;
        changed += nodes[place] != weights[i];
        nodes[place] = weights[i];
        stored[place] = size;
        largest = std::max<double>(largest, size);  // never lowered: new rows get the largest that was ever set
    }
    facts_->largest = largest;
    tree->propagate(walkers.first(changed));
    if (!undo_.count) return true;
    in_order();  // all is changed before the notes are given up
    undo_[RATED] = 0.0;
    return true;
}

void Priorities::note_drawable(Vector<const Place> places, Vector<const std::uint8_t> drawable, double error,
                               double weight) {
    require_fit();
    require(places.size() == drawable.size(), "note_drawable: expected a mark for each place");
    bool within = true;
    for (auto place : places) within &= tree->has(place);
    require(within, "places: expected those of rows");
    auto memory = scratch<std::int64_t>(static_cast<std::size_t>(places.size()));
    std::span walkers(memory.get(), static_cast<std::size_t>(places.size()));
    LongWork hold(places.size() > MANY_ITEMS);
    std::size_t changed = 0;
    auto *nodes = tree->nodes.data;
    auto *stored = errors_.data;
    for (std::int64_t i = 0; i < std::min(places.size(), AHEAD); ++i) expect(places[i]);
    for (std::int64_t i = 0; i < places.size(); ++i) {
        if (i + AHEAD < places.size()) expect(places[i + AHEAD]);
        auto place = walkers[changed] = places[i];
        auto given = static_cast<double>(drawable[i]) * weight;
        changed += nodes[place] != given;
        nodes[place] = given;
        stored[place] = static_cast<float>(error);
    }
    tree->propagate(walkers.first(changed));
}

namespace {

// The size of an error, as errors are kept; NaN if it is no float32.
float magnitude(double error) {
    auto size = std::abs(error);
    return size <= LARGEST_ERROR ? static_cast<float>(size) : std::numeric_limits<float>::quiet_NaN();
}

// Errors, float32 or float64.
struct Errors {
    const std::byte *first;
    std::ptrdiff_t stride;
    bool wide;
    double operator[](std::int64_t i) const {
        auto *place = first + i * stride;
        return wide ? *reinterpret_cast<const double *>(place) : *reinterpret_cast<const float *>(place);
    }
};

// The error of a sequence from those of its steps that count: eta times the largest, plus 1 - eta times their mean,
// summed from left to right; 0 if none counts (Kapturowski et al. 2019, section 2.3). NaN if one is no float32.
double reduced(const Errors &errors, Column<const std::uint8_t> counts, double eta) {
    auto largest = 0.0, total = 0.0;
    std::int64_t count = 0;
    auto bad = false;
    for (std::int64_t t = 0; t < counts.size(); ++t) {
        if (!counts[t]) continue;
        auto size = std::abs(errors[t]);
        bad |= !(size <= LARGEST_ERROR);
        largest = std::max(largest, size);
        total += size;
        ++count;
    }
    if (bad) return std::numeric_limits<double>::quiet_NaN();
    return eta * largest + (1 - eta) * (total / static_cast<double>(count ? count : 1));
}

}  // namespace

std::int64_t Priorities::rate(nb::handle index, nb::handle errors, nb::handle mask, bool time_first, double eta) {
    require_fit();
    Description where, given, real;
    auto axes = mask.is_none() ? 1 : 2, item = axes == 2 && time_first ? 1 : 0, time = axes - 1 - item;
    if (!describe(index.ptr(), where) || where.ndim != 1 || where.dtype != DType{INT, 64, 1}) return UNUSUAL;
    if (!describe(errors.ptr(), given) || given.dtype.code != FLOAT || given.dtype.bits < 32) return UNUSUAL;
    if (given.ndim != axes || given.shape[item] != where.shape[0]) return UNUSUAL;
    if (axes == 2 && (!describe(mask.ptr(), real) || real.dtype != DType{BOOL, 8, 1})) return UNUSUAL;
    if (axes == 2 && !real.has_shape({given.shape, 2})) return UNUSUAL;
    auto count = where.shape[0];
    LongWork hold(count * (axes == 2 ? given.shape[time] : 1) > MANY_ITEMS);
    auto rated = scratch<Rated>(static_cast<std::size_t>(count));  // the rows that are still there
    auto sizes = scratch<float>(static_cast<std::size_t>(count));
    Errors all{given.data, given.stride(item), given.dtype.bits == 64};
    if (axes == 1) for (std::int64_t i = 0; i < count; ++i) sizes[i] = magnitude(all[i]);
    else for (std::int64_t b = 0; b < count; ++b) {
        Errors steps{given.data + b * given.stride(item), given.stride(time), all.wide};
        Column<const std::uint8_t> counts{real.data + b * real.stride(item), real.stride(time), real.shape[time]};
        sizes[b] = magnitude(reduced(steps, counts, eta));
    }
    Column<const std::int64_t> wanted{where.data, where.stride(0), count};
    auto envs = static_cast<std::uint64_t>(ring->num_envs());
    std::size_t alive = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        auto public_index = wanted[i];
        auto number = static_cast<Number>(static_cast<std::uint64_t>(public_index) / envs);
        auto e = static_cast<std::int64_t>(static_cast<std::uint64_t>(public_index) % envs);
        if (public_index < 0 || number >= ring->envs[e].head || std::isnan(sizes[i])) return UNUSUAL;
        if (number < ring->oldest(e)) continue;
        rated[alive] = {ring->place_of(number, e), sizes[i]};
        expect(rated[alive++].place);
    }
    // exactly the rows that can be drawn have leaves above 0, and the number in an index shows that it is the same row:
    // so most often no row is read, which takes 10 µs for 256 errors instead of 30
    auto end = std::remove_if(rated.get(), rated.get() + alive, [&](const Rated &row) {
        if (tree->weight(row.place) > 0.0) return false;
        auto [e, begin, number] = ring->owner_of(row.place);
        return !ring->can_draw(row.place, number, e);
    });
    std::span rows(rated.get(), end);
    return set(rows) ? count - std::ssize(rows) : UNUSUAL;
}

void bind_priorities(nb::module_ &module) {
    using namespace nb::literals;
    // the entries of `facts`
    module.attr("ALPHA") = offsetof(Facts, alpha) / sizeof(double);
    module.attr("EPS") = offsetof(Facts, eps) / sizeof(double);
    module.attr("LARGEST") = offsetof(Facts, largest) / sizeof(double);
    module.attr("DRAWS") = offsetof(Facts, draws) / sizeof(double);
    RELIVE_EXPORT(FACTS);
    // the entries of `undo`
    RELIVE_EXPORT(RATED, RATED_LARGEST, RATED_START);
    RELIVE_EXPORT(ALL_RATED, LARGEST_ERROR);
    RELIVE_EXPORT(UNUSUAL);
    nb::class_<Priorities>(module, "Priorities", "The memory of the priorities of a ring's rows.")
        .def(nb::init<Tree &, KeptVector<float>, KeptVector<double>, const Ring &, KeptVector<double>>(),
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 5>(), "tree"_a, "errors"_a, "facts"_a, "ring"_a, "undo"_a)
        .def("note_drawable", &Priorities::note_drawable, "places"_a, "drawable"_a, "error"_a, "weight"_a,
             "Give rows that can be drawn from now on (1) this error and weight, and others (0) no weight.")
        .def("rate", &Priorities::rate, "index"_a.none(), "errors"_a.none(), "mask"_a.none() = nb::none(),
             "time_first"_a = false, "eta"_a = 0.0, "Set the errors of rows; how many are gone, or ``UNUSUAL``.");
    module.def("powers", [](Vector<const float> errors, double alpha, double eps, Vector<double> out) {
        require(errors.size() == out.size(), "powers: expected room for each error");
        LongWork hold(errors.size() > MANY_ITEMS);
        for (std::int64_t i = 0; i < errors.size(); ++i) out[i] = static_cast<double>(errors[i]) + eps;
        raise({out.begin(), out.end()}, alpha);
    }, "errors"_a, "alpha"_a, "eps"_a, "out"_a, "(error + eps)^alpha of each error.");
}

}  // namespace relive
