// Copies of rows: short ones without a call, large ones past the caches.
//
// Source and target never overlap, and may lie at any byte.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

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

template <std::size_t SIZE>
inline void spread(std::byte *target, std::ptrdiff_t pitch, const std::byte *source, std::int64_t runs) {
    for (std::int64_t run = 0; run < runs; ++run) __builtin_memcpy(target + run * pitch, source + run * SIZE, SIZE);
}

// Copy runs of `size` bytes to places `pitch` bytes apart; short ones need no call for each.
inline void spread(std::byte *target, std::ptrdiff_t pitch, const std::byte *source, std::int64_t runs,
                   std::size_t size) {
    switch (size) {
    case 1: return spread<1>(target, pitch, source, runs);
    case 2: return spread<2>(target, pitch, source, runs);
    case 4: return spread<4>(target, pitch, source, runs);
    case 8: return spread<8>(target, pitch, source, runs);
    case 16: return spread<16>(target, pitch, source, runs);
    }
    for (std::int64_t run = 0; run < runs; ++run) copy_bytes(target + run * pitch, source + run * size, size);
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
