// Random numbers as functions of (seed, counter): splitmix64 (Steele, Lea and Flood 2014).
#pragma once
#include <cstdint>

namespace relive {

inline constexpr std::uint64_t GOLDEN = 0x9E3779B97F4A7C15;

// splitmix64's finalizer: a permutation of the 64-bit numbers whose outputs look random.
inline std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

// The stream number `counter` of a seed.
inline std::uint64_t key(std::uint64_t seed, std::uint64_t counter) { return mix(mix(seed) + GOLDEN * counter); }

// Number `nth` of a stream, in [0, 1).
inline double uniform(std::uint64_t stream, std::uint64_t nth) {
    return static_cast<double>(static_cast<std::int64_t>(mix(stream + GOLDEN * nth) >> 11)) * 0x1p-53;
}

}  // namespace relive
