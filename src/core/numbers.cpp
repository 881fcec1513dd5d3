// Reads numbers of any strides and dtype into the dtype of a field, and says whether they are finite.
#include "numbers.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "copies.hpp"

namespace relive {

namespace {

constexpr std::int64_t TOGETHER = 128;  // numbers that are converted together, while they stay in a near cache

// Numbers that C++ has no type for.
struct Flag {
    std::uint8_t bits;
    explicit operator std::int64_t() const { return bits != 0; }
};
struct Half {
    std::uint16_t bits;
    // No operation has a subnormal operand, which a processor may be told to take for 0.
    explicit operator double() const {
        std::int32_t exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
        auto negative = static_cast<std::uint64_t>(bits & 0x8000) << 48;
        auto wide = static_cast<std::uint64_t>(exponent == 0x1f ? 0x7ff : exponent + 1008);  // infinity or NaN
        auto size = wide << 52 | static_cast<std::uint64_t>(fraction) << 42;
        auto small = std::bit_cast<std::uint64_t>(fraction * 0x1p-24);  // a whole number of these
        return std::bit_cast<double>(negative | (exponent ? size : small));
    }
};
struct Brain {
    std::uint16_t bits;
    explicit operator double() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

// Numbers go from one dtype to another by way of a wide one, which holds each of them: int64 or double.
template <typename Wide> using Load = void (*)(const std::byte *from, std::ptrdiff_t stride, std::int64_t n, Wide *to);
template <typename Wide> using Store = bool (*)(const Wide *from, std::int64_t n, std::byte *to);

template <typename T, typename Wide>
void load(const std::byte *from, std::ptrdiff_t stride, std::int64_t n, Wide *to) {
    for (std::int64_t i = 0; i < n; ++i) to[i] = static_cast<Wide>(get<T>(from + i * stride));
}

// True if none of these numbers would become another one: whole numbers are not rounded, nor finite ones infinite.
template <typename T, typename Wide> bool keeps(const Wide *numbers, std::int64_t n) {
    std::uint64_t lost = 0;  // both loops go to the end, since one without a way out is compiled to vector code
    if constexpr (std::is_integral_v<T>) {
        for (std::int64_t i = 0; i < n; ++i) lost |= !std::in_range<T>(numbers[i]);
        return !lost;
    } else if constexpr (std::is_integral_v<Wide>) {
        constexpr auto exact = std::int64_t{1} << std::numeric_limits<T>::digits;
        for (std::int64_t i = 0; i < n; ++i) lost |= numbers[i] < -exact || numbers[i] > exact;
        return !lost;
    } else {
        // Sizes of float64 come in the order of their bits, NaN after infinity: none may lie between the largest number
        // and infinity. Both differences are negative then.
        constexpr auto most = std::bit_cast<std::uint64_t>(static_cast<double>(std::numeric_limits<T>::max()));
        constexpr auto infinite = std::bit_cast<std::uint64_t>(std::numeric_limits<double>::infinity());
        for (std::int64_t i = 0; i < n; ++i) {
            auto size = std::bit_cast<std::uint64_t>(numbers[i]) & ~(std::uint64_t{1} << 63);
            lost |= (most - size) & (size - infinite);
        }
        return !(lost >> 63);
    }
}

template <typename T, typename Wide> bool store(const Wide *from, std::int64_t n, std::byte *to) {
    if (!keeps<T>(from, n)) return false;
    auto *numbers = reinterpret_cast<T *>(to);
    for (std::int64_t i = 0; i < n; ++i) numbers[i] = static_cast<T>(from[i]);
    return true;
}

// What `each` answers for the type of a dtype's numbers; nullptr if it is not known.
template <typename Answer, typename Each> Answer by_kind(DType dtype, Each each) {
    constexpr auto key = [](int code, int bits) { return code << 8 | bits; };
    switch (key(dtype.code, dtype.bits)) {
    case key(BOOL, 8): return each(std::type_identity<Flag>{});
    case key(INT, 8): return each(std::type_identity<std::int8_t>{});
    case key(INT, 16): return each(std::type_identity<std::int16_t>{});
    case key(INT, 32): return each(std::type_identity<std::int32_t>{});
    case key(INT, 64): return each(std::type_identity<std::int64_t>{});
    case key(UINT, 8): return each(std::type_identity<std::uint8_t>{});
    case key(UINT, 16): return each(std::type_identity<std::uint16_t>{});
    case key(UINT, 32): return each(std::type_identity<std::uint32_t>{});
    case key(UINT, 64): return each(std::type_identity<std::uint64_t>{});
    case key(FLOAT, 16): return each(std::type_identity<Half>{});
    case key(FLOAT, 32): return each(std::type_identity<float>{});
    case key(FLOAT, 64): return each(std::type_identity<double>{});
    case key(BFLOAT, 16): return each(std::type_identity<Brain>{});
    default: return nullptr;
    }
}

// Reads the numbers of a dtype that fit this wide one; no integer of 64 bits without a sign does.
template <typename Wide> Load<Wide> load_as(DType dtype) {
    return by_kind<Load<Wide>>(dtype, [](auto kind) -> Load<Wide> {
        using T = typename decltype(kind)::type;
        constexpr bool whole = std::is_same_v<T, Flag> || std::is_integral_v<T>;
        if constexpr (whole == std::is_integral_v<Wide> && !std::is_same_v<T, std::uint64_t>) return load<T, Wide>;
        else return nullptr;
    });
}

template <typename Wide> Store<Wide> store_as(DType dtype) {
    return by_kind<Store<Wide>>(dtype, [](auto kind) -> Store<Wide> {
        using T = typename decltype(kind)::type;
        // a float becomes no integer
        if constexpr (std::is_floating_point_v<T> || (std::is_integral_v<T> && std::is_integral_v<Wide>))
            return store<T, Wide>;
        else return nullptr;
    });
}

// Numbers in runs, `count` of a run and `stride` bytes apart; the runs are those of the first `axes` axes.
struct Runs {
    explicit Runs(const Description &given) : given(given), stride(static_cast<std::ptrdiff_t>(given.dtype.bytes())) {
        for (axes = given.ndim; axes > 0; --axes) {
            auto size = given.shape[axes - 1];
            if (size == 1) continue;
            if (count == 1) stride = given.stride(axes - 1);
            else if (given.stride(axes - 1) != count * stride) break;
            count *= size;
        }
        // there may be no memory
        if (given.empty()) {
            axes = 0;
            count = 0;
        }
    }
    // `each(first byte)` of every run in turn; the first false ends it.
    template <typename Each> bool walk(Each &each, const std::byte *from, std::int32_t axis = 0) const {
        if (axis == axes) return each(from);
        for (std::int64_t k = 0; k < given.shape[axis]; ++k)
            if (!walk(each, from + k * given.stride(axis), axis + 1)) return false;
        return true;
    }
    const Description &given;
    std::int32_t axes;
    std::int64_t count = 1;
    std::ptrdiff_t stride;
};

void gather(const std::byte *from, std::ptrdiff_t stride, std::int64_t n, std::byte *to, std::size_t size) {
    if (stride == static_cast<std::ptrdiff_t>(size)) return copy_bytes(to, from, size * static_cast<std::size_t>(n));
    with_size(size, [=](auto bytes) {
        for (std::int64_t i = 0; i < n; ++i) copy_bytes(to + i * bytes, from + i * stride, bytes);
    });
}

template <typename Wide> bool convert(const Runs &runs, Load<Wide> load, Store<Wide> store, std::byte *to,
                                      std::size_t size) {
    Wide wide[TOGETHER];
    bool is_wide = runs.given.dtype.bits == 64 && runs.stride == sizeof(Wide);
    auto each = [&](const std::byte *from) {
        for (std::int64_t low = 0; low < runs.count; low += TOGETHER) {
            auto n = std::min(TOGETHER, runs.count - low);
            auto *numbers = from + low * runs.stride;
            if (!is_wide) load(numbers, runs.stride, n, wide);
            if (!store(is_wide ? reinterpret_cast<const Wide *>(numbers) : wide, n, to)) return false;
            to += static_cast<std::size_t>(n) * size;
        }
        return true;
    };
    return runs.walk(each, runs.given.data);
}

// True if no number has all bits of its exponent set.
template <typename Bits> bool all_finite(const std::byte *numbers, std::size_t bytes, Bits exponent) {
    Bits found = 0;
    for (std::size_t k = 0; k < bytes; k += sizeof(Bits)) found |= (get<Bits>(numbers + k) & exponent) == exponent;
    return !found;
}

}  // namespace

bool read_numbers(const Description &given, DType dtype, std::byte *to) {
    Runs runs(given);
    if (given.dtype == dtype) {
        auto size = dtype.bytes();
        auto each = [&](const std::byte *from) {
            gather(from, runs.stride, runs.count, to, size);
            to += size * static_cast<std::size_t>(runs.count);
            return true;
        };
        return runs.walk(each, given.data);
    }
    if (auto load = load_as<std::int64_t>(given.dtype)) {
        auto store = store_as<std::int64_t>(dtype);
        return store && convert(runs, load, store, to, dtype.bytes());
    }
    auto load = load_as<double>(given.dtype);
    auto store = store_as<double>(dtype);
    return load && store && convert(runs, load, store, to, dtype.bytes());
}

bool all_finite(DType dtype, const std::byte *numbers, std::size_t bytes) {
    auto bits = dtype.code == COMPLEX ? dtype.bits / 2 : dtype.bits;
    if (dtype.code == BFLOAT) return all_finite<std::uint16_t>(numbers, bytes, 0x7f80);
    if (dtype.code != FLOAT && dtype.code != COMPLEX) return true;
    if (bits == 16) return all_finite<std::uint16_t>(numbers, bytes, 0x7c00);
    if (bits == 32) return all_finite<std::uint32_t>(numbers, bytes, 0x7f800000);
    return all_finite<std::uint64_t>(numbers, bytes, 0x7ff0000000000000);
}

}  // namespace relive
