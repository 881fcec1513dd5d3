// Returns and advantages of rollouts [T, N] of float32 numbers: one pass from the last step to the first for each
// estimator. Sums are added in the order of the definitions, so results do not depend on the processor.
//
// Vectors are written out, since gcc does not vectorise recursions: GAE took four times as long.
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <cstdint>

#include "arrays.hpp"
#include "bindings.hpp"
#include "gil.hpp"
#include "tensors.hpp"

namespace relive {

namespace {

// Contiguous columns [T, N] of numbers and flags, null where there is none; `value` has the bootstrap row as well.
struct Grid {
    std::int64_t steps, envs;
    const float *reward, *value;
    const std::uint8_t *terminated, *truncated;
    const float *final_value;  // read where a step was truncated and not terminated
    const std::uint8_t *mask;  // 0 at steps that are not real
    float *ratio;              // of V-trace: π/μ, the ratio of the two policies' probabilities; overwritten
    float *advantage, *ret;
};

struct Factors {
    float gamma = 0, decay = 0, lam = 0, rho_clip = 0, c_clip = 0;  // decay is γλ, rounded once
};

// The passes are compiled for each width of vectors. Each time come first: vectors of numbers, and of marks, -1 or 0; a
// word with as many flags, one a byte; the lanes whose flag is 0, and those whose flag is not; the lanes behind the
// first two, and behind the first four. Results do not depend on the width.

namespace four {
constexpr std::int64_t LANES = 4;
using Lanes [[gnu::vector_size(16)]] = float;
using Marks [[gnu::vector_size(16)]] = std::int32_t;
using Flags = std::uint32_t;

[[gnu::always_inline]] inline Marks split(Flags flags) {
    auto word = static_cast<std::int32_t>(flags);
    return Marks{word, word, word, word} & Marks{0xFF, 0xFF00, 0xFF0000, -0x1000000};  // little-endian
}
[[gnu::always_inline]] inline Marks unset(Flags flags) { return split(flags) == 0; }
[[gnu::always_inline]] inline Marks set(Flags flags) { return split(flags) != 0; }
[[gnu::always_inline]] inline Lanes without_two(Lanes x) { return Lanes{x[2], x[3]}; }
[[gnu::always_inline]] inline Lanes without_four(Lanes) { return Lanes{}; }

#include "returns_passes.hpp"
}  // namespace four

}  // namespace

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif

namespace {

namespace eight {
constexpr std::int64_t LANES = 8;
using Lanes [[gnu::vector_size(32)]] = float;
using Marks [[gnu::vector_size(32)]] = std::int32_t;
using Flags = std::uint64_t;

[[gnu::always_inline]] inline Marks split(Flags flags) {
    return reinterpret_cast<Marks>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<std::int64_t>(flags))));
}
[[gnu::always_inline]] inline Marks unset(Flags flags) { return split(flags) == 0; }
[[gnu::always_inline]] inline Marks set(Flags flags) { return split(flags) > 0; }
[[gnu::always_inline]] inline Lanes without_two(Lanes x) { return Lanes{x[2], x[3]}; }
[[gnu::always_inline]] inline Lanes without_four(Lanes x) { return Lanes{x[4], x[5], x[6], x[7]}; }

#include "returns_passes.hpp"
}  // namespace eight

}  // namespace

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

using Pass = bool (*)(const Grid &, const Factors &);  // returns true if an advantage is not finite

struct Passes {
    std::int64_t (*first_missing)(const Grid &);
    Pass gae, discounted_return, vtrace;
};

#if defined(__x86_64__)
// True if processor and system have 32-byte vectors. Asked by hand: Zig's runtime answers the builtin with no.
bool has_avx2() {
    unsigned a, b, c, d, saved, none;
    constexpr unsigned VECTORS = 6;  // the system saves the registers of 16 and of 32 bytes
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_AVX)) return false;
    asm("xgetbv" : "=a"(saved), "=d"(none) : "c"(0));
    return (saved & VECTORS) == VECTORS && __get_cpuid_count(7, 0, &a, &b, &c, &d) && b & bit_AVX2;
}
const bool HAS_AVX2 = has_avx2();
#endif

// Those of the widest vectors that the processor has, or of the narrowest.
const Passes &passes(bool widest) {
    static constexpr Passes narrow{four::first_missing, four::gae, four::discounted_return, four::vtrace};
#if defined(__x86_64__)
    static constexpr Passes wide{eight::first_missing, eight::gae, eight::discounted_return, eight::vtrace};
    if (widest && HAS_AVX2) return wide;
#endif
    static_cast<void>(widest);
    return narrow;
}

constexpr std::int64_t SPOILT = -2;

// A column that Python hands over: an array or a tensor in RAM, or None.
using Given = nb::handle;

constexpr DType FLOATS{FLOAT, 32, 1}, FLAGS{BOOL, 8, 1};

// Finds where columns `[T, N]` lie.
class Finder {
  public:
    explicit Finder(Given first) {
        Description found;
        if (describe(first.ptr(), found) && found.ndim == 2) {
            rows = found.shape[0];
            envs = found.shape[1];
        }
    }
    // The numbers of a contiguous column of these rows, or of more; null if it is another. It points into the column.
    template <typename T> T *find(Given column, DType dtype, std::int64_t steps) {
        Description found;
        bool fits = describe(column.ptr(), found) && found.dtype == dtype && found.ndim == 2 &&
                    found.shape[0] >= steps && found.shape[1] == envs && found.contiguous() &&
                    (std::is_const_v<T> || found.writeable);
        if (!fits) return nullptr;
        plain &= !found.array && found.shape[0] == steps;
        return reinterpret_cast<T *>(found.data);
    }
    const float *numbers(Given column, std::int64_t steps) { return checked(find<const float>(column, FLOATS, steps)); }
    const std::uint8_t *flags(Given column, std::int64_t steps) {
        return checked(find<const std::uint8_t>(column, FLAGS, steps));
    }
    float *results(Given column, std::int64_t steps) { return checked(find<float>(column, FLOATS, steps)); }

    std::int64_t rows = -1, envs = -1;
    bool plain = true;  // all columns are tensors with no more rows than they need
    bool fits = true;   // none is null

  private:
    template <typename T> T *checked(T *found) {
        fits &= found != nullptr;
        return found;
    }
};

// The columns that all estimators read.
struct Columns { Given reward, value, terminated, truncated, final_value, mask; };

Grid grid_of(Finder &finder, const Columns &given, std::int64_t steps) {
    Grid grid{};
    grid.steps = steps;
    grid.envs = finder.envs;
    finder.fits = 0 <= steps && steps <= finder.rows;
    if (!finder.fits) return grid;
    grid.reward = finder.numbers(given.reward, steps);
    if (!given.value.is_none()) grid.value = finder.numbers(given.value, steps + 1);
    grid.terminated = finder.flags(given.terminated, steps);
    grid.truncated = finder.flags(given.truncated, steps);
    if (!given.final_value.is_none()) grid.final_value = finder.numbers(given.final_value, steps);
    if (!given.mask.is_none()) grid.mask = finder.flags(given.mask, steps);
    if (!grid.value) grid.final_value = nullptr;  // it stands in for a value
    return grid;
}

// True if these are tensors in RAM that make a grid as they are: contiguous, [T, N], of float32 numbers and of bools.
bool is_grid(Given reward, Given value, Given terminated, Given truncated, Given final_value, Given mask, Given ratio) {
    Finder finder{reward};
    if (finder.rows < 0) return false;
    grid_of(finder, {reward, value, terminated, truncated, final_value, mask}, finder.rows);
    if (!ratio.is_none()) finder.results(ratio, finder.rows);
    return finder.fits && finder.plain;
}

void require(bool fits) {
    if (!fits) throw nb::value_error("expected contiguous columns of one width with at least so many steps");
}

// -1; or SPOILT if an advantage that was written is not finite; or the first place that lacks its final value: then
// nothing is written.
std::int64_t filled(const Grid &grid, const Factors &factors, const Passes &passes, Pass Passes::*pass) {
    LongWork hold(17 * grid.steps * grid.envs > LONG_WORK);
    auto missing = grid.value ? passes.first_missing(grid) : -1;
    if (missing >= 0) return missing;
    return (passes.*pass)(grid, factors) ? SPOILT : -1;
}

std::int64_t fill_gae(Given reward, Given value, Given terminated, Given truncated, Given final_value, Given mask,
                      Given advantage, Given ret, std::int64_t steps, double gamma, double lam, bool widest) {
    Finder finder{reward};
    auto grid = grid_of(finder, {reward, value, terminated, truncated, final_value, mask}, steps);
    grid.advantage = finder.results(advantage, steps);
    grid.ret = finder.results(ret, steps);
    require(finder.fits && grid.value);
    return filled(grid, {.gamma = float(gamma), .decay = float(gamma * lam)}, passes(widest), &Passes::gae);
}

std::int64_t fill_returns(Given reward, Given value, Given terminated, Given truncated, Given final_value, Given mask,
                          Given ret, std::int64_t steps, double gamma, bool widest) {
    Finder finder{reward};
    auto grid = grid_of(finder, {reward, value, terminated, truncated, final_value, mask}, steps);
    grid.ret = finder.results(ret, steps);
    require(finder.fits);
    return filled(grid, {.gamma = float(gamma)}, passes(widest), &Passes::discounted_return);
}

std::int64_t fill_vtrace(Given reward, Given value, Given terminated, Given truncated, Given final_value, Given mask,
                         Given ratio, Given advantage, Given ret, std::int64_t steps, double gamma, double lam,
                         double rho_clip, double c_clip, bool widest) {
    Finder finder{reward};
    auto grid = grid_of(finder, {reward, value, terminated, truncated, final_value, mask}, steps);
    grid.ratio = finder.results(ratio, steps);
    grid.advantage = finder.results(advantage, steps);
    grid.ret = finder.results(ret, steps);
    require(finder.fits && grid.value);
    Factors factors{.gamma = float(gamma), .lam = float(lam), .rho_clip = float(rho_clip), .c_clip = float(c_clip)};
    return filled(grid, factors, passes(widest), &Passes::vtrace);
}

}  // namespace

void bind_returns(nb::module_ &module) {
    RELIVE_EXPORT(SPOILT);
    using nb::arg;
    // `widest`: False takes vectors of four numbers, as on processors that have no wider ones
    module.def("is_grid", &is_grid, arg("reward").none(), arg("value").none(), arg("terminated").none(),
               arg("truncated").none(), arg("final_value").none(), arg("mask").none(),
               arg("ratio").none() = nb::none());
    module.def("fill_gae", &fill_gae, arg("reward"), arg("value"), arg("terminated"), arg("truncated"),
               arg("final_value").none(), arg("mask").none(), arg("advantage"), arg("ret"), arg("steps"), arg("gamma"),
               arg("lam"), arg("widest") = true);
    module.def("fill_returns", &fill_returns, arg("reward"), arg("value").none(), arg("terminated"), arg("truncated"),
               arg("final_value").none(), arg("mask").none(), arg("ret"), arg("steps"), arg("gamma"),
               arg("widest") = true);
    module.def("fill_vtrace", &fill_vtrace, arg("reward"), arg("value"), arg("terminated"), arg("truncated"),
               arg("final_value").none(), arg("mask").none(), arg("ratio"), arg("advantage"), arg("ret"), arg("steps"),
               arg("gamma"), arg("lam"), arg("rho_clip"), arg("c_clip"), arg("widest") = true);
}

}  // namespace relive
