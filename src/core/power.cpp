#include "power.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

// The C library of each system rounds its pow in its own way, and a GPU's does so again. Priorities are added up and
// compared, so one bit may draw another row. Here are only operations of which IEEE 754 defines every bit;
// `relive.core.numbers` has the same ones in the same order.
namespace relive {

namespace {

using Bits = std::uint64_t;

constexpr double FARTHEST = 1100.0;       // 2**FARTHEST is infinite, and 2**-FARTHEST is 0
constexpr double SHIFTER = 0x1.8p52;      // a number near it has its whole part in its lowest bits
constexpr Bits ONE = 0x3FF0000000000000;  // the bits of 1.0

inline double two_to(Bits k) { return std::bit_cast<double>((k + 1023) << 52); }

// x**a of a positive, finite x. Without a jump or a conversion, so that compilers make vector code of a loop of it.
inline double ordinary(double x, double a, double upper) {
    // x = m * 2**e with m from sqrt(1/2) to sqrt(2)
    bool subnormal = x < std::numeric_limits<double>::min();
    auto bits = std::bit_cast<Bits>(subnormal ? x * 0x1p54 : x);
    // as the lowest bits of a number from 2**52 on, the exponent is a double without a conversion
    auto e = std::bit_cast<double>(bits >> 52 | 0x4330000000000000) - (subnormal ? 0x1p52 + 1077.0 : 0x1p52 + 1023.0);
    auto m = std::bit_cast<double>((bits & 0x000FFFFFFFFFFFFF) | ONE);
    bool large = m > 0x1.6a09e667f3bcdp+0;
    m = large ? m * 0.5 : m;
    e = large ? e + 1.0 : e;
    // log2(m) = 2 / ln 2 * (s + s**3 / 3 + s**5 / 5 + ...)
    auto s = (m - 1.0) / (m + 1.0), z = s * s, sum = 1.0 / 21.0;
    sum = sum * z + 1.0 / 19.0;
    sum = sum * z + 1.0 / 17.0;
    sum = sum * z + 1.0 / 15.0;
    sum = sum * z + 1.0 / 13.0;
    sum = sum * z + 1.0 / 11.0;
    sum = sum * z + 1.0 / 9.0;
    sum = sum * z + 1.0 / 7.0;
    sum = sum * z + 1.0 / 5.0;
    sum = sum * z + 1.0 / 3.0;
    auto log = (s + s * z * sum) * 0x1.71547652b82fep+1;
    // a * log2(x) = n + rest. The upper half of a times e is exact, and so is its difference from n.
    auto all = std::min(std::max(a * e + a * log, -FARTHEST), FARTHEST);
    auto shifted = all + SHIFTER, n = shifted - SHIFTER;
    auto rest = std::min(std::max((upper * e - n) + ((a - upper) * e + a * log), -1.0), 1.0);
    // 2**rest = exp(rest * ln 2), by Taylor's series
    auto t = rest * 0x1.62e42fefa39efp-1, value = 1.0 / 6227020800.0;
    value = value * t + 1.0 / 479001600.0;
    value = value * t + 1.0 / 39916800.0;
    value = value * t + 1.0 / 3628800.0;
    value = value * t + 1.0 / 362880.0;
    value = value * t + 1.0 / 40320.0;
    value = value * t + 1.0 / 5040.0;
    value = value * t + 1.0 / 720.0;
    value = value * t + 1.0 / 120.0;
    value = value * t + 1.0 / 24.0;
    value = value * t + 1.0 / 6.0;
    value = value * t + 1.0 / 2.0;
    value = value * t + 1.0;
    value = value * t + 1.0;
    // times 2**n in two steps, since 2**n alone may be no normal number
    auto whole = std::bit_cast<Bits>(shifted) - std::bit_cast<Bits>(SHIFTER);
    constexpr Bits EVEN = 4096;  // so that a shift of a negative number is one of a positive one
    auto half = ((whole + EVEN) >> 1) - EVEN / 2;
    return value * two_to(half) * two_to(whole - half);
}

#ifdef RELIVE_CLONES
__attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#endif
void raise_ordinary(const double *x, std::int64_t count, double a, double upper, double *out) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = ordinary(x[i], a, upper);
}

}  // namespace

void raise(std::span<double> numbers, double a) {
    if (a == 1.0) return;
    auto upper = std::bit_cast<double>(std::bit_cast<Bits>(a) & ~Bits{0x7FFFFFF});
    std::array<double, 64> part;
    for (std::size_t low = 0; low < numbers.size(); low += part.size()) {
        auto some = numbers.subspan(low, std::min(part.size(), numbers.size() - low));
        raise_ordinary(some.data(), std::ssize(some), a, upper, part.data());
        for (std::size_t i = 0; i < some.size(); ++i) {
            bool plain = some[i] > 0.0 && some[i] < std::numeric_limits<double>::infinity();
            some[i] = plain ? part[i] : std::pow(some[i], a);  // where no library's pow has a choice
        }
    }
}

}  // namespace relive
