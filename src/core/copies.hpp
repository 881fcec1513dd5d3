// Copies of rows: short ones without a call, large ones past the caches.
//
// Source and target never overlap, and may lie at any byte.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "ring.hpp"

namespace relive {

inline constexpr std::size_t PIECE = 16;   // bytes that are moved at once
inline constexpr std::size_t SHORT = 256;  // a call of memcpy for fewer bytes takes longer than the copy

template <typename T> inline void move_as(std::byte *to, const std::byte *from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    std::memcpy(to, &value, sizeof(T));
}

inline void move_piece(std::byte *to, const std::byte *from) {
    struct Piece {
        std::uint64_t low, high;
    };
    move_as<Piece>(to, from);
}

// A multiple of 16 bytes, which are few.
// Without a call of memcpy a minibatch of short rows takes 32 µs instead of 37.
inline void copy_short(std::byte *to, const std::byte *from, std::size_t bytes) {
    for (std::size_t k = 0; k < bytes; k += PIECE) move_piece(to + k, from + k);
}

// Any number of bytes, most often few. The last piece of each size overlaps the one before.
inline void copy_bytes(std::byte *to, const std::byte *from, std::size_t bytes) {
    if (bytes > SHORT) {
        std::memcpy(to, from, bytes);
    } else if (bytes >= PIECE) {
        copy_short(to, from, bytes - PIECE);
        move_piece(to + bytes - PIECE, from + bytes - PIECE);
    } else if (bytes >= 8) {
        move_as<std::uint64_t>(to, from);
        move_as<std::uint64_t>(to + bytes - 8, from + bytes - 8);
    } else if (bytes >= 4) {
        move_as<std::uint32_t>(to, from);
        move_as<std::uint32_t>(to + bytes - 4, from + bytes - 4);
    } else {
        for (std::size_t k = 0; k < bytes; ++k) to[k] = from[k];
    }
}

// A number of bytes that the compiler knows.
template <std::size_t SIZE> using Known = std::integral_constant<std::size_t, SIZE>;
template <std::size_t SIZE> inline void copy_bytes(std::byte *to, const std::byte *from, Known<SIZE>) {
    __builtin_memcpy(to, from, SIZE);
}

// Runs `loop(size)` with a size that the compiler knows where it is that of a number, or of two: then the loop copies
// each by a load and a store, without a call.
template <typename Loop> [[gnu::always_inline]] inline void with_size(std::size_t size, Loop loop) {
    switch (size) {
    case 1: return loop(Known<1>{});
    case 2: return loop(Known<2>{});
    case 4: return loop(Known<4>{});
    case 8: return loop(Known<8>{});
    case 16: return loop(Known<16>{});
    default: return loop(size);
    }
}

// Copy runs of `size` bytes to places `pitch` bytes apart.
inline void spread(std::byte *target, std::ptrdiff_t pitch, const std::byte *source, std::int64_t runs,
                   std::size_t size) {
    with_size(size, [=](auto bytes) {
        for (std::int64_t run = 0; run < runs; ++run) copy_bytes(target + run * pitch, source + run * bytes, bytes);
    });
}

// A number at any byte of a row.
template <typename T> inline void put(std::byte *to, T value) { std::memcpy(to, &value, sizeof(T)); }
template <typename T> inline T get(const std::byte *from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

// Copies past the caches, so that the target's lines are not loaded first: for batches larger than the caches. What is
// written can then be read by other threads as after any store.
inline void copy_past(std::byte *to, const std::byte *from, std::size_t bytes) {
#ifdef __SSE2__
    // whole cache lines of the target go past the caches, the bytes before and after them do not
    auto before = std::min<std::size_t>(-reinterpret_cast<std::uintptr_t>(to) % LINE, bytes);
    auto lines = (bytes - before) / LINE * LINE;
    std::memcpy(to, from, before);
    to += before;
    from += before;
    for (std::size_t k = 0; k < lines; k += PIECE)
        _mm_stream_si128(reinterpret_cast<__m128i *>(to + k),
                         _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + k)));
    if (lines) _mm_sfence();
    std::memcpy(to + lines, from + lines, bytes - before - lines);
#else
    std::memcpy(to, from, bytes);
#endif
}

}  // namespace relive
