// Reads n-step windows, rows and stacks of frames into the packed rows of a batch.
#include "windows.hpp"

#include "bindings.hpp"
#include "copies.hpp"
#include "draws.hpp"
#include "gil.hpp"

namespace relive {

namespace {

// Bytes of a window, or of a row, that are loaded ahead; the processor itself loads what follows.
constexpr std::int64_t FORESEEN = 1024;

// How many items are on their way while one is read: as many as fill a part of the first cache.
// N-step windows are loaded ahead whole, up to 1 KiB: 43 µs instead of 52. Rows of the next batch are not: that made
// every case slower, uniform 33 µs instead of 28 in a loop and 92 instead of 81 after a learner's step.
std::int64_t on_their_way(std::int64_t bytes) {
    return std::clamp<std::int64_t>((std::int64_t{1} << 13) / std::max<std::int64_t>(bytes, 1), 8, 32);
}

// The rest of a division that is never negative.
std::int64_t wrapped(std::int64_t offset, std::int64_t rows) {
    if (offset >= 0) return offset;
    if (offset >= -rows) return offset + rows;
    auto rest = offset % rows;
    return rest < 0 ? rest + rows : rest;
}

// Copies bytes, and meanwhile asks for as many at `ahead`, into all caches but the first. `ahead` is never read.
#ifdef RELIVE_CLONES
__attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#endif
// Stacks of frames load the next stack while one is copied: 128 µs instead of 133.
void copy_and_prefetch(std::byte *to, const std::byte *from, std::size_t bytes, std::uintptr_t ahead) {
    struct Half {
        std::uint64_t words[4];
    };
    static_assert(LINE == 2 * sizeof(Half));
    constexpr std::size_t turn = 4 * LINE;
    auto whole = bytes / turn * turn;
    for (std::size_t k = 0; k < whole; k += turn) {
        for (std::size_t line = 0; line < turn; line += LINE)
            __builtin_prefetch(reinterpret_cast<const void *>(ahead + k + line), 0, 2);
        for (std::size_t at = k; at < k + turn; at += sizeof(Half)) move_as<Half>(to + at, from + at);
    }
    copy_bytes(to + whole, from + whole, bytes - whole);
}

// True if these places follow one another. Places of frames from before an episode are negative.
// Frames lie next to each other unless an episode or the ring begins between them. Then a stack is one copy of 28 KB
// instead of four of 7 KB.
bool is_run(const Place *places, std::int64_t depth) {
    bool together = places[0] >= 0;
    for (std::int64_t k = 1; k < depth; ++k) together &= places[k] == places[0] + k;
    return together;
}

}  // namespace

bool WindowLayout::fits(std::int64_t row, std::int64_t ring_row) const {
    bool known = lies_within(index, 8, row) && lies_within(next_index, 8, row) && lies_within(discount, 4, row) &&
                 lies_within(steps, 4, row) && lies_within(reward, 4, row) && lies_within(terminated, 1, row) &&
                 lies_within(truncated, 1, row);
    bool following = own() ? lies_within(next_at, own_bytes, row) && lies_within(own_at, own_bytes, ring_row)
                           : lies_within(next_at, next_bytes, row) && next_bytes <= ring_row;
    return known && following && lies_within(0, step_bytes, row) && step_bytes <= ring_row;
}

std::int64_t read_windows(const Ring &ring, const WindowLayout &layout, Places places, std::int64_t steps, double gamma,
                          Rows out, Vector<Place> last) {
    auto all = ring.places();
    for (std::int64_t i = 0; i < places.size(); ++i)
        if (places[i] < 0 || places[i] >= all) return i;
    steps = std::min(steps, ring.rows);  // no window is longer; without it, rows altered in files could have no end
    // the rows of a window are neighbours, so one run of bytes loads all of it, up to FORESEEN
    auto ahead = std::max(2 * ring.width, std::min((std::min(steps, FORESEEN) + 1) * ring.width, FORESEEN));
    auto soon = on_their_way(ahead);
    for (std::int64_t i = 0; i < std::min(soon, places.size()); ++i) fetch(ring.row(places[i]), ahead);
    // copies, since the compiler has to expect that a store to a row changes the ring itself
    auto reward = ring.reward;
    auto terminated = ring.terminated, truncated = ring.truncated;
    auto stamp = ring.stamp;
    auto step = ring.step;
    auto to = layout;
    auto num_envs = ring.num_envs(), rows = ring.rows;
    auto own = to.own();
    for (std::int64_t i = 0; i < places.size(); ++i) {
        auto place = places[i];
        if (i + soon < places.size()) fetch(ring.row(places[i + soon]), ahead);
        auto *row = out.first + i * out.stride;
        copy_bytes(row, ring.row(place), to.step_bytes);
        auto owner = ring.owner_of(place);
        auto e = owner.env, begin = owner.begin, number = owner.number;  // clang before 16 captures no binding
        auto newest = ring.envs[e].head - 1;
        Place before = place;  // of the last step; `place` is then that of the row after it
        auto read = [&](std::int64_t) -> WindowStep {
            before = place;
            place = before + 1 < begin + rows ? before + 1 : begin;
            return {reward[before], terminated[before], truncated[before]};
        };
        auto follows = [&](std::int64_t k) {
            // the newest row is not complete, unless rows have next observations of their own: so k stays below rows
            if (stamp[place] < 0) return false;
            return !own || (number + k <= newest && step[place] != 0);
        };
        auto window = sum_window(steps, gamma, read, follows);
        last[i] = own ? before : place;
        put(row + to.index, number * num_envs + e);
        put(row + to.next_index, (number + window.steps - own) * num_envs + e);
        write_window(to, row, window);
        if (!own)
            copy_bytes(row + to.next_at, ring.row(place), to.next_bytes);
        else if (window.steps > 1)  // else it came with the anchor
            copy_bytes(row + to.next_at, ring.row(before) + to.own_at, to.own_bytes);
    }
    return -1;
}

std::int64_t gather_rows(Bytes source, Places places, Rows out, std::int64_t start, std::int64_t bytes) {
    // a place that is no row's may be asked for
    auto first = reinterpret_cast<std::uintptr_t>(source.first);
    auto ask = [&, ahead = std::min(bytes, FORESEEN)](std::int64_t i) {
        auto row = first + static_cast<std::uintptr_t>(places[i]) * source.stride;
        fetch(reinterpret_cast<const std::byte *>(row), ahead);
    };
    auto soon = on_their_way(bytes);
    for (std::int64_t i = 0; i < std::min(soon, places.size()); ++i) ask(i);
    for (std::int64_t i = 0; i < places.size(); ++i) {
        auto *to = out.first + i * out.stride + start;
        if (i + soon < places.size()) ask(i + soon);
        auto place = places[i];  // once: another thread may write another number after the check
        if (place >= source.rows) return i;
        if (place >= 0)
            copy_bytes(to, source.first + place * source.stride, bytes);
        else
            std::memset(to, 0, bytes);
    }
    return -1;
}

void gather_pairs(Bytes source, Matrix<const Place> places, std::byte *now, std::byte *then) {
    auto count = places.rows / 2, depth = places.columns, width = source.columns;
    for (std::int64_t i = 0; i < count; ++i) {
        for (auto j : {i, count + i}) {
            auto *to = (j == i ? now : then) + i * depth * width;
            if (!is_run(places[j], depth)) {
                gather_rows(source, {places[j], depth}, {to, width, depth, width}, 0, width);
                continue;
            }
            // most often the frames of a stack follow one another; meanwhile the next stack is loaded
            auto next = places[std::min(j + 1, 2 * count - 1)][0];
            auto ahead = reinterpret_cast<std::uintptr_t>(source.first) + static_cast<std::uintptr_t>(next) * width;
            copy_and_prefetch(to, source.first + places[j][0] * width, depth * width, ahead);
        }
    }
}

namespace {

// Give `take` the places of the frames of a stack that ends at a place, the newest first.
template <typename Take>
void each_frame(const Ring &ring, Place place, std::int64_t depth, bool repeat, Take take) {
    auto offset = remainder_of(place, ring.rows, ring.inverse), begin = place - offset;
    // so many frames of its episode lie before it; a file may hold any number, and no frame is one of another env
    auto index = std::max<std::int64_t>(ring.step[place], 0);
    for (std::int64_t back = 0; back < depth; ++back) {
        auto reach = std::min(back, index);  // no further than the first row of the episode
        // negative before the division: the frame lies across the ring's seam
        take(depth - 1 - back, reach == back || repeat ? begin + wrapped(offset - reach, ring.rows) : -1);
    }
}

}  // namespace

std::int64_t stack_places(const Ring &ring, Places places, std::int64_t depth, bool repeat, Matrix<Place> out) {
    for (std::int64_t i = 0; i < places.size(); ++i) {
        if (places[i] < 0 || places[i] >= ring.places()) return i;
        auto *frames = out[i];
        each_frame(ring, places[i], depth, repeat, [&](std::int64_t k, Place frame) { frames[k] = frame; });
    }
    return -1;
}

bool StackLayout::fits(std::int64_t row, std::int64_t ring_row) const {
    bool right = fields.empty() || depth > 0;
    for (auto &field : fields) {
        std::int64_t size;
        right = right && field.bytes > 0 && !__builtin_mul_overflow(depth, field.bytes, &size);
        right = right && lies_within(field.from, field.bytes, ring_row) && lies_within(field.now, size, row) &&
                lies_within(field.then, size, row);
    }
    return right;
}

void read_stacks(const Ring &ring, const StackLayout &layout, Places places, std::int64_t low, Places last, Rows out) {
    auto depth = layout.depth, width = ring.width;
    auto behind = std::min(depth, FORESEEN) * width;
    auto near = static_cast<std::size_t>(std::min(behind, FORESEEN)), number = layout.fields.size();
    auto soon = on_their_way(behind);
    // the rows before a step are its neighbours, but for those across the ring's seam
    auto ask = [&](std::int64_t i) {
        auto begin = reinterpret_cast<std::uintptr_t>(ring.memory);
        auto row = begin + static_cast<std::uintptr_t>(places[i] * width - behind);
        fetch(reinterpret_cast<const std::byte *>(row), near);
    };
    auto frames = scratch<const std::byte *>(static_cast<std::size_t>(2 * depth));
    auto *now = frames.get(), *then = now + depth;
    auto note = [&](const std::byte **into, Place place) {
        each_frame(ring, place, depth, layout.repeat,
                   [&](std::int64_t k, Place frame) { into[k] = frame < 0 ? nullptr : ring.row(frame); });
    };
    auto copy = [depth](std::byte *to, const std::byte *const *from, std::int64_t at, std::size_t bytes) {
        for (std::int64_t k = 0; k < depth; ++k, to += bytes)
            if (from[k]) copy_bytes(to, from[k] + at, bytes);
            else std::memset(to, 0, bytes);
    };
    for (std::int64_t i = low; low == 0 && i < std::min(soon, places.size()); ++i) ask(i);
    for (std::int64_t i = 0; i < last.size(); ++i) {
        if (low + i + soon < places.size()) ask(low + i + soon);
        auto *row = out.first + i * out.stride;
        note(now, places[low + i]), note(then, last[i]);
        for (std::size_t f = 0; f < number; ++f) {
            auto field = layout.fields[f];  // a copy, since any store might change the layout itself
            auto bytes = static_cast<std::size_t>(field.bytes);
            copy(row + field.now, now, field.from, bytes), copy(row + field.then, then, field.from, bytes);
        }
    }
}

namespace {

[[noreturn]] void refuse(const char *what) { throw nb::value_error(what); }

std::int64_t windows(const Ring &ring, const WindowLayout &layout, Places places, std::int64_t steps, double gamma,
                     Rows out, Vector<Place> last) {
    if (steps < 1) refuse("read_windows: `steps` is at least 1");
    if (out.rows != places.size() || last.size() != places.size())
        refuse("read_windows: one row and one `last` a place");
    if (!layout.fits(out.columns, ring.width)) refuse("read_windows: the layout reaches beyond a row");
    LongWork hold(places.size() * 2 * (ring.width + out.columns) > LONG_WORK);
    return read_windows(ring, layout, places, steps, gamma, out, last);
}

std::int64_t gather(Bytes source, Places places, Rows out, std::int64_t start, std::int64_t bytes) {
    bool inside = start >= 0 && bytes >= 0 && bytes <= source.columns && bytes <= out.columns - start;
    if (out.rows != places.size() || !inside) refuse("gather_rows: `out` has no room for these bytes of each row");
    LongWork hold(places.size() * bytes > LONG_WORK);
    return gather_rows(source, places, out, start, bytes);
}

std::int64_t stacks(const Ring &ring, Places places, std::int64_t depth, bool repeat, Matrix<Place> out) {
    if (out.rows != places.size() || out.columns != depth) refuse("stack_places: `out` is [B, depth]");
    return stack_places(ring, places, depth, repeat, out);
}

}  // namespace

void bind_windows(nb::module_ &module) {
    nb::class_<WindowLayout>(module, "WindowLayout",
                             "Where a batch's row has what is known of its n-step window, and what is copied.")
        .def(nb::init<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                      std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>(),
             nb::kw_only(), nb::arg("index"), nb::arg("next_index"), nb::arg("discount"), nb::arg("steps"),
             nb::arg("reward"), nb::arg("terminated"), nb::arg("truncated"), nb::arg("step_bytes"), nb::arg("next_at"),
             nb::arg("next_bytes"), nb::arg("own_at"), nb::arg("own_bytes"))
        .def_ro("index", &WindowLayout::index)
        .def_ro("next_index", &WindowLayout::next_index)
        .def_ro("discount", &WindowLayout::discount)
        .def_ro("steps", &WindowLayout::steps)
        .def_ro("reward", &WindowLayout::reward)
        .def_ro("terminated", &WindowLayout::terminated)
        .def_ro("truncated", &WindowLayout::truncated)
        .def_ro("step_bytes", &WindowLayout::step_bytes)
        .def_ro("next_at", &WindowLayout::next_at)
        .def_ro("next_bytes", &WindowLayout::next_bytes)
        .def_ro("own_at", &WindowLayout::own_at)
        .def_ro("own_bytes", &WindowLayout::own_bytes);
    module.def("read_windows", &windows, nb::arg("ring"), nb::arg("layout"), nb::arg("places"), nb::arg("steps"),
               nb::arg("gamma"), nb::arg("out"), nb::arg("last"),
               "Read the n-step windows that start at places (int64 [B]) into packed rows (uint8 [B, W]).");
    module.def("gather_rows", &gather, nb::arg("source"), nb::arg("places"), nb::arg("out"), nb::arg("start"),
               nb::arg("nbytes"), "Copy the first bytes of rows at places (int64 [B]) into the rows of `out`.");
    module.def("stack_places", &stacks, nb::arg("ring"), nb::arg("places"), nb::arg("depth"), nb::arg("repeat"),
               nb::arg("out"), "The places (int64 [B, depth]) of the frames that end at places, oldest first.");
}

}  // namespace relive
