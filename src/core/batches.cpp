// Makes the tensors of a batch in one call: draws its rows, reads their windows, and lays fields over them.
#include "batches.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include <nanobind/stl/array.h>

#include "bindings.hpp"
#include "gil.hpp"
#include "joined.hpp"
#include "tensors.hpp"
#include "weights.hpp"

namespace relive {

bool Draw::into(std::span<Place> places, Column<double> probability, Column<float> weight) const {
    if (by == By::Chance) return draw_uniform(*ring, stream, newest, places);
    auto whole = tree->whole();
    if (!(whole.total() > 0.0)) return false;  // cleared since a cover was made, as by a signal handler
    auto among = from_some ? Cover{tops, until} : whole;
    if (by == By::Weight) return leaves_into(among, places);
    return priorities->draw(stream, stratified, beta, lowest, among, places, probability, weight);
}

bool Draw::leaves_into(const Cover &among, std::span<Place> places) const {
    auto total = among.total();
    if (!(total > 0.0)) return false;
    auto memory = scratch<double>(places.size());
    std::span<double> wanted{memory.get(), places.size()};
    masses(stream, false, total, wanted);
    if (tree->find(among, wanted, places) >= 0) return false;
    for (std::size_t i = 0; episodes && i < places.size(); ++i) {
        auto env = static_cast<std::size_t>(places[i] / episodes->rows);
        auto low = oldest.empty() ? 0 : oldest[env];
        places[i] = window_of_episode(*episodes, places[i], low, uniform(mix(stream), i + 1));
    }
    return true;
}

void nothing_to_draw() { throw EmptyDraw(); }

Anchors::Anchors(nb::handle what, bool roomy) {
    if (!(nb::try_cast(what, draw_) && draw_) && !nb::try_cast(what, given_))
        throw nb::type_error("expected a draw, or places, int64 [B]");
    if (weighed() && !roomy) throw nb::value_error("these batches have no room for the weights of a draw by priority");
}

std::size_t Anchors::bytes(std::initializer_list<std::int64_t> sizes) {
    std::int64_t all = 2;  // so that what is computed of it does not overflow
    for (auto size : sizes)
        if (__builtin_mul_overflow(all, size, &all)) throw std::bad_alloc();
    return static_cast<std::size_t>(all / 2);
}

bool Anchors::into(std::span<Place> places, Column<double> probability, Column<float> weight) const {
    if (draw_) return draw_->into(places, probability, weight);
    std::copy(given_.begin(), given_.end(), places.begin());
    return true;
}

bool Anchors::part_into(std::span<Place> places, std::int64_t low) const {
    return draw_uniform(*draw_->ring, draw_->stream, draw_->newest, places, static_cast<std::size_t>(low),
                        static_cast<std::size_t>(draw_->count));
}

void Anchors::require(bool some, std::int64_t bad) const {
    if (!some) nothing_to_draw();
    if (bad >= 0 && draw_) throw nb::value_error("the draw is of another ring, which has more rows");
}

LargeFields::LargeFields(nb::handle facts, const Fields &fields, std::int64_t depth, bool repeat)
    : depth_(depth), repeat_(repeat) {
    std::vector<std::size_t> columns;
    for (nb::handle one : facts) {
        nb::tuple fact(one);
        require(fact.size() == 4, "a large field is (rows of bytes, now, then, stacked)");
        Field field{{}, nb::cast<bool>(fact[1]), nb::cast<bool>(fact[2]), nb::cast<bool>(fact[3]), fact[0]};
        auto &source = field.source;
        if (!nb::try_cast(fact[0], source)) throw nb::type_error("a large field: expected rows of bytes");
        std::size_t bytes;
        bool whole = source.stride == source.columns &&
                     !__builtin_mul_overflow(source.columns, field.stacked ? depth : 1, &bytes);
        if (!whole || (field.stacked && !(field.now && field.then && depth > 0)))
            throw nb::value_error("a large field: expected rows without gaps, or two stacks of them");
        auto number = int{field.now} + int{field.then};
        columns.insert(columns.end(), number, bytes);
        row_bytes_ += number * static_cast<std::int64_t>(bytes);
        fields_.push_back(std::move(field));
    }
    if (columns != fields.apart)
        throw nb::value_error("large fields: expected one for each field that lies apart, of as many bytes");
}

void LargeFields::require_all(const Ring &ring) const {
    for (auto &field : fields_) require(field.source.rows >= ring.places(), "the ring was bound to more rows");
}

void LargeFields::read(const Ring &ring, Places places, std::byte *to) const {
    auto count = places.size() / 2, depth = depth_;
    std::unique_ptr<Place[]> memory;
    Matrix<Place> frames{nullptr, depth * static_cast<std::ptrdiff_t>(sizeof(Place)), 2 * count, depth};
    for (auto &field : fields_) {
        auto width = field.source.columns;
        auto next = Fields::to_next(static_cast<std::size_t>(count * width * (field.stacked ? depth : 1)));
        if (field.stacked) {
            if (!memory) {
                memory = scratch<Place>(static_cast<std::size_t>(2 * count * depth));
                frames.first = reinterpret_cast<std::byte *>(memory.get());
                stack_places(ring, places, depth, repeat_, frames);
            }
            gather_pairs(field.source, {frames.first, frames.stride, frames.rows, frames.columns}, to, to + next);
            to += 2 * next;
            continue;
        }
        for (std::int64_t half : {0, 1}) {
            if (!(half ? field.then : field.now)) continue;
            gather_rows(field.source, {places.data + half * count, count}, {to, width, count, width}, 0, width);
            to += next;
        }
    }
}

namespace {

Draw draw_of(Draw::By by, std::int64_t count, Word key, nb::object kept) {
    if (count < 0) throw nb::value_error("a draw has no negative number of anchors");
    Draw draw;
    draw.by = by;
    draw.count = count;
    draw.stream = key.value;
    draw.kept = std::move(kept);
    return draw;
}

// Draw from the leaves of a cover alone, unless it is None. It is copied: arrays of Python may change until the draw.
void take_cover(Draw &draw, nb::handle places, nb::handle until) {
    if (places.is_none() && until.is_none()) return;
    Vector<const std::int64_t> nodes;
    Vector<const double> sums;
    if (!nb::try_cast(places, nodes) || !nb::try_cast(until, sums))
        throw nb::type_error("a cover: expected nodes, int64 [K], and the running sum of their weights, float64 [K]");
    require(nodes.size() == sums.size(), "a cover: expected a sum for each node");
    draw.from_some = true;
    draw.tops = {nodes.begin(), nodes.end()};
    draw.until = {sums.begin(), sums.end()};
}

void take_episodes(Draw &draw, nb::handle ring, nb::handle oldest) {
    Vector<const Number> rows;
    draw.episodes = held<Ring>(ring, "expected the compiled ring");
    if (!oldest.is_none() && !nb::try_cast(oldest, rows)) throw nb::type_error("oldest rows: expected int64 [N]");
    require(draw.tree->leaves == draw.episodes->places(), "a draw of episodes: expected a leaf for each row");
    require(oldest.is_none() || rows.size() == draw.episodes->num_envs(), "oldest rows: expected one for each env");
    draw.oldest = {rows.begin(), rows.end()};
}

// Make a draw: its places, int64 [B], and the further fields of a batch by name.
nb::tuple make_draw(const Draw &draw) {
    auto array = [&](int type) {
        npy_intp size = draw.count;
        return array_or_raise(PyArray_SimpleNew(1, &size, type));
    };
    auto places = array(NPY_INT64);
    std::span<Place> into{numbers_of<Place>(places), static_cast<std::size_t>(draw.count)};
    nb::dict extras;
    Column<double> chances;
    Column<float> weights;
    if (draw.weighed()) {
        auto weight = array(NPY_FLOAT32), probability = array(NPY_FLOAT64);
        weights = {numbers_of<std::byte>(weight), sizeof(float), draw.count};
        chances = {numbers_of<std::byte>(probability), sizeof(double), draw.count};
        extras["weight"] = weight;
        extras["probability"] = probability;
    }
    if (!draw.into(into, chances, weights)) nothing_to_draw();
    return nb::make_tuple(places, extras);
}

constexpr std::int64_t TOGETHER = 256;  // windows that are drawn together, then read, then get their stacks

// n-step windows of one ring as batches of one form: the packed rows of `fields`, drawn, read and handed out.
class Windows {
  public:
    Windows(nb::object ring, const WindowLayout &layout, nb::object fields, std::int64_t probability_at,
            std::int64_t weight_at, bool in_files, const StackLayout &stacks, nb::handle large)
        : ring_(held<Ring>(ring, "expected the compiled ring")), layout_(layout),
          fields_(held<Fields>(fields, "expected the fields of packed rows")),
          probability_at_(probability_at), weight_at_(weight_at), in_files_(in_files), stacks_(stacks),
          large_(large, *fields_, stacks.depth, stacks.repeat), kept_{ring, fields} {
        auto width = static_cast<std::int64_t>(fields_->width);
        auto within = [&](std::int64_t at, int size) { return 0 <= at && at <= width - size && at % size == 0; };
        bool weighed = probability_at >= 0;
        bool fits = layout.fits(width, ring_->width) && stacks.fits(width, ring_->width);
        if (!fits || weighed != (weight_at >= 0) || width % 16 ||
            (weighed && !(within(probability_at, 8) && within(weight_at, 4))))
            throw nb::value_error("the layout of a batch does not fit its rows, or those of the ring");
    }

    // The tensors [B, ...] of a draw, or of places (int64 [B]), by path, or as a batch of this kind unless it is None;
    // or the position of the first place that is no row's. `sums`, unless it is None, gives the rewards instead: of the
    // anchors' places and the numbers of their windows' steps (int32 [B]), float32 [B].
    nb::object sample(nb::handle what, std::int64_t steps, double gamma, nb::handle kind, nb::handle sums) {
        Anchors anchors(what, probability_at_ >= 0);
        auto count = anchors.count(), width = static_cast<std::int64_t>(fields_->width);
        if (steps < 1) throw nb::value_error("a window has at least 1 step");
        if (!layout_.fits(width, ring_->width) || !stacks_.fits(width, ring_->width))
            throw nb::value_error("the ring was bound to rows of another width");
        large_.require_all(*ring_);
        auto *joined = joined_rows(anchors.standing());
        if (joined && !large_.empty()) throw nb::value_error("joined rows have no large fields");
        Target block;
        if (!joined)
            block = Target(anchors.standing(), pool_, Anchors::bytes({count, width}), fields_->apart_bytes(count));
        auto out = joined ? joined->take(count, width) : Rows{block->rows(), width, count, width};
        auto memory = scratch<Place>(static_cast<std::size_t>(2 * count));
        std::span<Place> places{memory.get(), static_cast<std::size_t>(count)};
        Column<double> chances{out.first + probability_at_, out.stride, count};
        Column<float> weights{out.first + weight_at_, out.stride, count};
        bool some;
        std::int64_t bad = -1;
        {
            LongWork hold(count * (width + large_.row_bytes()) > LONG_WORK || in_files_);
            bool by_parts = anchors.by_parts();
            some = by_parts || anchors.into(places, chances, weights);
            // few rows at a time: those that a draw asked for, and batch rows that get stacks, stay in a near cache
            auto together = by_parts || !stacks_.fields.empty() ? std::min(TOGETHER, count) : count;
            for (std::int64_t low = 0; some && bad < 0 && low < count; low += together) {
                auto size = std::min(together, count - low);
                if (by_parts) some = anchors.part_into(places.subspan(low, size), low);
                if (!some) break;
                Vector<Place> first{places.data() + low, size}, last{places.data() + count + low, size};
                Rows rows{out.first + low * out.stride, out.stride, size, width};
                bad = read_windows(*ring_, layout_, {first.data, size}, steps, gamma, rows, last);
                if (bad < 0 && !stacks_.fields.empty())
                    read_stacks(*ring_, stacks_, {places.data(), count}, low, {last.data, size}, rows);
                if (bad >= 0) bad += low;
            }
            if (some && bad < 0) large_.read(*ring_, {memory.get(), 2 * count}, block.apart.first);
        }
        anchors.require(some, bad);
        if (bad >= 0) return nb::int_(bad);
        // last: a function of Python may use the ring, and even draw from it
        if (!sums.is_none()) put_sums(sums, {memory.get(), count}, out);
        if (joined) return nb::dict();  // the tensors are those of all parts, made once
        PackedRows rows{block->rows(), {&count, 1}, {&width, 1}, block.apart};
        if (!kind.is_none()) return fields_->batch(*block, rows, kind, block.slot);
        nb::dict found;
        fields_->put(*block, rows, found, block.slot);
        return found;
    }

  private:
    void put_sums(nb::handle sums, Places places, Rows out) const {
        npy_intp count = places.size();
        auto anchors = array_or_raise(PyArray_SimpleNew(1, &count, NPY_INT64));
        auto steps = array_or_raise(PyArray_SimpleNew(1, &count, NPY_INT32));
        std::copy(places.begin(), places.end(), numbers_of<Place>(anchors));
        for (std::int64_t i = 0; i < count; ++i)
            numbers_of<std::int32_t>(steps)[i] = get<std::int32_t>(out.first + i * out.stride + layout_.steps);
        nb::object given = sums(anchors, steps);
        Vector<const float> rewards;
        if (!nb::try_cast(given, rewards) || rewards.size() != count)
            throw nb::type_error("sums of rewards: expected one for each window, float32 [B]");
        for (std::int64_t i = 0; i < count; ++i)
            put(out.first + i * out.stride + layout_.reward, rewards[i]);
    }

    const Ring *ring_;
    WindowLayout layout_;
    const Fields *fields_;
    std::int64_t probability_at_, weight_at_;  // bytes of a row; -1: these batches have neither
    bool in_files_;                            // rows may have to be read from a disk first
    StackLayout stacks_;
    LargeFields large_;
    Pool pool_;
    std::array<nb::object, 2> kept_;
};

}  // namespace

void bind_batches(nb::module_ &module) {
    nb::exception<EmptyDraw>(module, "EmptyDraw", PyExc_ValueError);
    nb::class_<Draw>(module, "Draw",
                     "What a sampler draws, not made yet: a view reads it, or `places, extras = draw` makes it.")
        .def_ro("count", &Draw::count, "B.")
        .def_rw("standing", &Draw::standing, nb::for_setter(nb::arg("standing").none()),
                "The memory that a batch is written to; None: fresh memory.")
        .def_prop_ro("weighed", &Draw::weighed, "True if the batch gets `probability` and `weight`.")
        .def("__len__", [](const Draw &) { return 2; })
        .def("__iter__", [](const Draw &self) { return nb::iter(make_draw(self)); })
        .def("__getitem__", [](const Draw &self, nb::handle i) { return nb::object(nb::object(make_draw(self))[i]); });
    module.def(
        "draw_by_chance",
        [](nb::object ring, std::int64_t count, Word key, std::int64_t newest) {
            auto draw = draw_of(Draw::By::Chance, count, key, ring);
            draw.ring = held<Ring>(ring, "expected the compiled ring");
            draw.newest = newest;
            return draw;
        },
        nb::arg("ring"), nb::arg("count"), nb::arg("key"), nb::arg("newest") = 0,
        "Anchors of a ring, each equally often and with replacement, from the `newest` ones (0: from all).");
    module.def(
        "draw_by_weight",
        [](nb::object tree, std::int64_t count, Word key, nb::handle places, nb::handle until, nb::handle ring,
           nb::handle oldest) {
            auto draw = draw_of(Draw::By::Weight, count, key, nb::make_tuple(tree, ring));
            draw.tree = held<Tree>(tree, "expected the compiled tree");
            take_cover(draw, places, until);
            if (!ring.is_none()) take_episodes(draw, ring, oldest);
            return draw;
        },
        nb::arg("tree"), nb::arg("count"), nb::arg("key"), nb::arg("places") = nb::none(),
        nb::arg("until") = nb::none(), nb::arg("ring") = nb::none(), nb::arg("oldest") = nb::none(),
        "Leaves of a sum tree by their weight: all, or those of a cover. With a ring, each is the last row of an "
        "episode's newest window, and stands for all of them that end at row `oldest` (int64 [N]) or later.");
    module.def(
        "draw_by_priority",
        [](nb::object priorities, std::int64_t count, Word key, bool stratified, double beta, double lowest,
           nb::handle places, nb::handle until) {
            auto draw = draw_of(Draw::By::Priority, count, key, priorities);
            draw.priorities = held<Priorities>(priorities, "expected the compiled priorities");
            draw.tree = draw.priorities->tree;
            draw.stratified = stratified;
            draw.beta = beta;
            draw.lowest = lowest;
            take_cover(draw, places, until);
            return draw;
        },
        nb::arg("priorities"), nb::arg("count"), nb::arg("key"), nb::arg("stratified"), nb::arg("beta"),
        nb::arg("lowest"), nb::arg("places") = nb::none(), nb::arg("until") = nb::none(),
        "Rows by their priority, with probabilities and weights: all, or those of a cover.");
    nb::class_<Windows>(module, "Windows", "Reads n-step windows of a ring as batches of one form.")
        .def("__init__", [](Windows *self, nb::object ring, const WindowLayout &layout, nb::object fields,
                            std::int64_t probability_at, std::int64_t weight_at, bool in_files, nb::handle stacked,
                            std::int64_t depth, bool repeat, nb::handle large) {
            StackLayout stacks{{}, depth, repeat};
            for (nb::handle one : stacked) {
                auto [from, bytes, now, then] = nb::cast<std::array<std::int64_t, 4>>(one);
                if (bytes) stacks.fields.push_back({from, bytes, now, then});  // so that a row bounds the depth
            }
            new (self) Windows(ring, layout, fields, probability_at, weight_at, in_files, stacks, large);
        }, nb::arg("ring"), nb::arg("layout"), nb::arg("fields"), nb::arg("probability_at") = -1,
             nb::arg("weight_at") = -1, nb::arg("in_files") = false, nb::arg("stacked") = nb::make_tuple(),
             nb::arg("depth") = 0, nb::arg("repeat") = false,
             nb::arg("large") = nb::make_tuple(),
             "Each of `stacked` is a field: its first byte and its bytes in a row of the ring, and where the stacks\n"
             "before and after the step begin in a row of a batch. Each of `large` is one that lies apart, in the order\n"
             "of `fields`: its rows (uint8 [R, W]), and whether a batch has those of the anchors, those of the rows\n"
             "that windows bootstrap from, and, in place of single ones, the stacks that end there.")
        .def("sample", &Windows::sample, nb::arg("draw"), nb::arg("steps"), nb::arg("gamma"),
             nb::arg("kind") = nb::none(), nb::arg("sums") = nb::none(),
             "The tensors by path of a draw or of places, or nested as this kind of dict; or the position of the first\n"
             "place that is no row's. A function of the anchors' places and the windows' steps may give the rewards.");
}

}  // namespace relive
