// Rollouts: where episodes start, and windows of their steps. A rollout is T steps of N envs, time first.
#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "gil.hpp"
#include "ring.hpp"
#include "tensors.hpp"

namespace relive {

namespace {

using Flags = Matrix<const std::uint8_t>;

template <typename A, typename B> bool alike(const A &a, const B &b) {
    return a.rows == b.rows && a.columns == b.columns;
}

// The address of a row that need not exist: it is only loaded ahead.
const std::byte *foreseen(Matrix<const std::uint8_t> rows, std::int64_t row) {
    auto offset = static_cast<std::uintptr_t>(row) * static_cast<std::uintptr_t>(rows.stride);
    return reinterpret_cast<const std::byte *>(reinterpret_cast<std::uintptr_t>(rows.first) + offset);
}

void episode_starts(Flags done, Flags real, Vector<std::uint8_t> ended, Matrix<std::uint8_t> starts) {
    if (!alike(done, real) || !alike(done, starts) || ended.size() != done.columns)
        throw nb::value_error("the flags of episodes do not fit each other");
    LongWork hold(done.rows * done.columns > LONG_WORK);
    for (std::int64_t t = 0; t < done.rows; ++t) {
        const auto *is_done = done[t], *is_real = real[t];
        auto *starting = starts[t];
        for (std::int64_t env = 0; env < done.columns; ++env) {
            starting[env] = is_real[env] & ended[env];
            ended[env] = is_done[env] | (ended[env] & (1 - is_real[env]));
        }
    }
}

// The env, the window's first step, how many steps it has, the episode's first step in this rollout or 0, and 1 if the
// episode begins there.
using Window = std::array<std::int64_t, 5>;
using Windows = std::vector<Window>;

// The index of the first step of the last window of `run` steps: a full one, or a tail.
std::int64_t last_window(std::int64_t run, std::int64_t length, std::int64_t stride) {
    auto beyond = run - length;
    return beyond > 0 ? (beyond + stride - 1) / stride * stride : 0;
}

struct Cut {
    std::int64_t length, stride;
    bool tails, complete;
};

// Add the windows of one env.
void cut_env(std::int64_t env, Flags done, Flags real, Flags starts, Cut cut, Windows &windows) {
    std::int64_t origin = 0, begins = 0;
    for (std::int64_t t = 0; t < done.rows;) {
        if (starts[t][env]) {
            origin = t;
            begins = 1;
        }
        if (!real[t][env]) { ++t; continue; }
        auto end = t;
        while (end + 1 < done.rows && !done[end][env] && real[end + 1][env]) ++end;
        auto run = end + 1 - t;
        if (!cut.complete || (starts[t][env] && done[end][env]))
            for (std::int64_t first = 0, last = last_window(run, cut.length, cut.stride); first <= last;
                 first += cut.stride) {
                auto size = std::min(cut.length, run - first);
                if (size == cut.length || cut.tails) windows.push_back({env, t + first, size, origin, begins});
            }
        t = end + 1;
    }
}

// `windows` as an array int64 `[K, 5]` that owns them.
nb::object table_of(std::unique_ptr<Windows> windows) {
    npy_intp shape[2] = {static_cast<npy_intp>(windows->size()), 5};
    auto *table = windows.get();
    if (table->empty()) return array_or_raise(PyArray_SimpleNew(2, shape, NPY_INT64));
    nb::capsule owner(table, [](void *memory) noexcept { delete static_cast<Windows *>(memory); });
    windows.release();
    auto array = array_or_raise(PyArray_SimpleNewFromData(2, shape, NPY_INT64, table->data()));
    set_base(array, owner);
    return array;
}

nb::object plan_windows(Flags done, Flags real, Flags starts, std::int64_t length, std::int64_t stride, bool tails,
                        bool complete) {
    if (!alike(done, real) || !alike(done, starts))
        throw nb::value_error("the flags of episodes do not fit each other");
    // so long that no sum of it and of a step overflows
    constexpr std::int64_t LONGEST = std::int64_t{1} << 32;
    if (length < 1 || stride < 1 || length > LONGEST || stride > LONGEST)
        throw nb::value_error("windows and strides have 1 to 2**32 steps");
    auto windows = std::make_unique<Windows>();
    {
        auto steps = done.rows * done.columns;
        LongWork hold(steps > LONG_WORK / 8);
        windows->reserve(static_cast<std::size_t>(steps / std::min(length, stride) + steps / 8 + 8));  // a guess
        for (std::int64_t env = 0; env < done.columns; ++env)
            cut_env(env, done, real, starts, {length, stride, tails, complete}, *windows);
    }
    return table_of(std::move(windows));
}

constexpr std::int64_t RUN = 1024;       // bytes of a run that are loaded ahead; the processor itself loads the rest
constexpr std::int64_t PADDED = 8192;    // bytes of padding that are written at once
constexpr std::int64_t LARGE = 8192;     // from so many bytes on, the system's own way to fill memory is quicker

// Fill some bytes with copies of a row.
void repeat(std::byte *target, std::int64_t bytes, Vector<const std::uint8_t> row) {
    // whole rows, so that every copy begins where a row does
    auto width = row.size(), block = std::max<std::int64_t>(PADDED / std::max<std::int64_t>(width, 1), 1) * width;
    auto filled = std::min(width, bytes);
    std::memcpy(target, row.data, filled);
    while (filled < bytes) {
        // copied from what is written already, a block that stays in the nearest cache
        auto more = std::min({filled, bytes - filled, block});
        std::memcpy(target + filled, target, more);
        filled += more;
    }
}

// Windows of rows: window b has the rows first[b], first[b] + step, ..., lengths[b] of them; `pad` fills it up.
struct Runs {
    Matrix<const std::uint8_t> source;
    Column<const std::int64_t> first;
    std::int64_t step;
    Column<const std::int64_t> lengths;
    Vector<const std::uint8_t> pad;
};

void require_inside(const Runs &runs, std::int64_t length) {
    const auto &[source, first, step, lengths, pad] = runs;
    if (step < 1 || length < 0 || pad.size() != source.columns || first.size() != lengths.size())
        throw nb::value_error("the arrays of windows do not fit each other");
    auto room = source.rows ? (source.rows - 1) / step : 0;  // whole steps from the first row to the last
    for (std::int64_t b = 0; b < first.size(); ++b) {
        if (lengths[b] < 0 || lengths[b] > length) throw nb::index_error("a window is longer than its batch");
        bool inside = first[b] >= 0 && first[b] < source.rows && lengths[b] - 1 <= room &&
                      first[b] + (lengths[b] - 1) * step < source.rows;
        if (lengths[b] && !inside) throw nb::index_error("a window goes on beyond the rows");
    }
}

// Copy windows, each as `length` rows, to where there is room for them.
// Windows of a rollout lie in order, so a window and its padding are each one run of bytes: 34 µs against 47 at (2048,
// 8). Those of a replay lie far apart, and eight reads side by side overlap their misses: 92 µs against 111 for 64
// windows of 80. Blocks of rows win by a quarter for one row width and lose up to 60 % for others.
void copy_runs(const Runs &runs, std::int64_t length, std::byte *target) {
    const auto &[source, first, step, lengths, pad] = runs;
    auto count = first.size(), width = source.columns;
    bool apart = source.rows > 1 && source.stride != width;
    // all bytes of the padding are alike: each is like the one after it
    bool even = width > 0 && std::memcmp(pad.data, pad.data + 1, width - 1) == 0;
    auto loaded = static_cast<std::size_t>(std::min<std::int64_t>(length * width, RUN));
    LongWork hold(count * length * width > LONG_WORK);
    for (std::int64_t b = 0; b < count; ++b) {
        auto steps = lengths[b], next = first[std::min<std::int64_t>(b + 1, count - 1)];
        const auto *here = source.first + (steps ? first[b] * source.stride : 0);
        if (step == 1 && !apart) {
            // one run of bytes: the processor loads its lines ahead, but not those of the next window
            fetch(foreseen(source, next), loaded);
            if (steps) std::memcpy(target, here, steps * width);
        } else {
            for (std::int64_t t = 0; t < steps; ++t) {
                fetch(foreseen(source, next + t * step), std::min<std::size_t>(width, loaded));
                std::memcpy(target + t * width, here + t * step * source.stride, width);
            }
        }
        auto padding = (length - steps) * width;
        if (even && padding >= LARGE) std::memset(target + steps * width, pad[0], padding);
        else if (padding) repeat(target + steps * width, padding, pad);
        target += length * width;
    }
}

void copy_windows(Matrix<const std::uint8_t> source, Column<const std::int64_t> first, std::int64_t step,
                  Column<const std::int64_t> lengths, Vector<const std::uint8_t> pad, nb::object out) {
    auto *array = reinterpret_cast<PyArrayObject *>(out.ptr());
    if (!PyArray_Check(out.ptr()) || PyArray_NDIM(array) != 3 || !holds<std::uint8_t>(array) ||
        !PyArray_IS_C_CONTIGUOUS(array))
        throw nb::type_error("windows are written to uint8 [B, L, W] in one piece");
    auto *shape = PyArray_DIMS(array);
    if (shape[0] != first.size() || shape[2] != source.columns)
        throw nb::value_error("the arrays of windows do not fit each other");
    Runs runs{source, first, step, lengths, pad};
    require_inside(runs, shape[1]);
    copy_runs(runs, shape[1], static_cast<std::byte *>(PyArray_DATA(array)));
}

void take_windows(Matrix<const std::uint8_t> source, Column<const std::int64_t> first, std::int64_t step,
                  Column<const std::int64_t> lengths, Vector<const std::uint8_t> pad, std::int64_t length,
                  const Fields &fields, bool time_first, Pool &pool, nb::handle given) {
    auto into = nb::cast<nb::dict>(given);
    Runs runs{source, first, step, lengths, pad};
    require_inside(runs, length);
    std::int64_t window, bytes = 0;
    require(static_cast<std::int64_t>(fields.width) == source.columns, "take_windows: rows of another width");
    require(!__builtin_mul_overflow(length, source.columns, &window) &&
                !__builtin_mul_overflow(first.size(), window, &bytes),
            "take_windows: too many rows");
    auto block = pool.take(static_cast<std::size_t>(bytes));
    copy_runs(runs, length, block->rows());
    std::int64_t sizes[2] = {first.size(), length}, strides[2] = {window, source.columns};
    if (time_first) {
        std::swap(sizes[0], sizes[1]);
        std::swap(strides[0], strides[1]);
    }
    fields.put(*block, PackedRows{block->rows(), sizes, strides}, into);
}

nb::object mark_windows(Column<const std::int64_t> lengths, Column<const std::int64_t> is_start,
                        std::int64_t length) {
    auto count = lengths.size();
    if (is_start.size() != count || length < 0)
        throw nb::value_error("the facts of windows do not fit each other");
    npy_intp shape[3] = {2, static_cast<npy_intp>(count), static_cast<npy_intp>(length)};
    auto array = array_or_raise(PyArray_SimpleNew(3, shape, NPY_BOOL));
    auto *starts = numbers_of<std::uint8_t>(array);
    auto *mask = starts + count * length;
    std::memset(starts, 0, 2 * count * length);
    for (std::int64_t b = 0; b < count && length; ++b) {
        starts[b * length] = is_start[b] == 1;
        std::memset(mask + b * length, 1, std::clamp<std::int64_t>(lengths[b], 0, length));
    }
    return array;
}

}  // namespace

void bind_rollouts(nb::module_ &module) {
    using namespace nb::literals;
    module.def("episode_starts", &episode_starts, "done"_a, "real"_a, "ended"_a, "starts"_a,
               "Mark the steps that are the first of their episode.\n\n"
               "``done`` is ``terminated | truncated`` and ``real`` the mask, uint8 ``[T, N]``. ``ended``, ``[N]``, "
               "says whether the episode before the first row had ended, and is overwritten by the same for the newest "
               "row. ``starts``, ``[T, N]``, is written. A step that is not real and ends no episode changes nothing: "
               "it may be the one in which NEXT_STEP autoreset resets, or one that was left out in the middle of an "
               "episode.");
    module.def("plan_windows", &plan_windows, "done"_a, "real"_a, "starts"_a, "length"_a, "stride"_a, "tails"_a,
               "complete"_a,
               "Cut runs into windows; a run is as many successive real steps of one episode as there are.\n\n"
               "The windows of a run begin at its steps 0, stride, 2 stride, ... as long as each has a step that no "
               "window before it has. A window has ``length`` steps, or as many as the run has left. Without ``tails`` "
               "windows of fewer steps are left out; with ``complete`` all but whole episodes are. Returns int64 "
               "``[K, 5]``, env by env in the order of time: the env, the window's first step, how many steps it has, "
               "the episode's first step in this rollout or 0, and 1 if the episode begins there.");
    module.def("copy_windows", &copy_windows, "source"_a, "first"_a, "step"_a, "lengths"_a, "pad"_a, "out"_a,
               "Copy windows of rows ``[R, W]``, and fill each up with the row ``pad``.\n\n"
               "Window b has the rows ``first[b]``, ``first[b] + step``, ..., ``lengths[b]`` of them. ``out``, uint8 "
               "``[B, L, W]``, is written.");
    module.def("take_windows", &take_windows, "source"_a, "first"_a, "step"_a, "lengths"_a, "pad"_a, "length"_a,
               "fields"_a, "time_first"_a, "pool"_a, "into"_a,
               "``copy_windows`` into memory of the pool, with a tensor ``[B, length, *shape]``, or ``[length, B, "
               "*shape]``, over each field of these rows in ``into``.");
    module.def("mark_windows", &mark_windows, "lengths"_a, "is_start"_a, "length"_a,
               "Mark the rows of windows that begin an episode (only first rows can), and those that are steps to "
               "learn from.\n\n``lengths`` and ``is_start`` are int64 ``[B]``. Returns bool "
               "``[2, B, length]``.");
}

}  // namespace relive
