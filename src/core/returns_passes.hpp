// Passes over a rollout from its last step to its first, LANES envs at a time: one for each estimator.
//
// returns.cpp includes this file once for each width of vectors, inside a namespace, so it includes nothing itself.
// `i` is a flat place: step t of env n is i = t * envs + n, and i + envs is the step after it. A vector that is for
// fewer envs reads on into the next row: what it computes in those lanes is stored nowhere. Everything is inlined into
// the loops, of which none calls a function.

[[gnu::always_inline]] inline Lanes splat(float number) { return number - Lanes{}; }  // of -0.0 too

// The first `count` numbers; 0 in the other lanes.
[[gnu::noinline]] inline void load_some(const float *from, std::int64_t count, Lanes &numbers) {
    numbers = Lanes{};
    for (std::int64_t k = 0; k < count; ++k) numbers[k] = from[k];
}
[[gnu::always_inline]] inline Lanes load(const float *from, std::int64_t count) {
    Lanes numbers;
    if (count == LANES) __builtin_memcpy(&numbers, from, sizeof numbers);
    else load_some(from, count, numbers);
    return numbers;
}

// The first `count` flags; 0 in the other lanes.
[[gnu::noinline]] inline Flags load_some(const std::uint8_t *from, std::int64_t count) {
    Flags flags = 0;
    for (std::int64_t k = 0; k < count; ++k) flags |= Flags{from[k]} << (8 * k);
    return flags;
}
[[gnu::always_inline]] inline Flags load(const std::uint8_t *from, std::int64_t count) {
    if (count != LANES) return load_some(from, count);
    Flags flags;
    __builtin_memcpy(&flags, from, sizeof flags);
    return flags;
}

// Write the first `count` numbers.
[[gnu::always_inline]] inline void store(float *to, Lanes numbers, std::int64_t count) {
    if (count == LANES) {
        __builtin_memcpy(to, &numbers, sizeof numbers);
        return;
    }
    if (LANES > 4 && count & 4) {
        __builtin_memcpy(to, &numbers, 16);
        to += 4;
        numbers = without_four(numbers);
    }
    if (count & 2) {
        __builtin_memcpy(to, &numbers, 8);
        to += 2;
        numbers = without_two(numbers);
    }
    if (count & 1) *to = numbers[0];
}

// The numbers in lanes that are marked, 0 in the others.
[[gnu::always_inline]] inline Lanes where(Marks marked, Lanes numbers) {
    return reinterpret_cast<Lanes>(marked & reinterpret_cast<Marks>(numbers));
}

// The consequences of a step, a lane an env.
struct Ends {
    Marks goes_on;    // the episode does
    Marks valued;     // something follows: false where it terminated, or was cut and there are no final values
    Lanes following;  // the value of what follows
};

// `following` is the value of the next row, which a final value replaces where an episode was cut.
[[gnu::always_inline]] inline Ends ends_of(const Grid &grid, std::int64_t i, std::int64_t reads, Lanes following) {
    auto terminated = load(grid.terminated + i, reads), truncated = load(grid.truncated + i, reads);
    auto goes_on = unset(terminated | truncated), valued = goes_on;
    if (truncated && grid.final_value) {  // rare: final values are read nowhere else
        following = unset(truncated) ? following : load(grid.final_value + i, reads);
        valued = unset(terminated);
    }
    return {goes_on, valued, following};
}

// The estimators. A State is what one step passes to the step before it; `last` is that of the bootstrap row, `stored`
// that of a row that was written in whole vectors. A pass calls `step` and then `write`, from the last row on. `write`
// returns 0, but in `Gae` NaN where the advantage is not finite.

// With EXACT, 0 is passed on where an episode ends or where the decay is 0, even of an advantage that is not finite.
// Without, what is passed on is 0 times the advantage, which comes to the same if all advantages turn out to be finite:
// then a step waits for the one after it for the time of a product and a sum, no more.
template <bool EXACT> struct Gae {
    Grid grid;
    Lanes gamma, decay;
    Marks decays;  // false where the decay is 0
    struct State { Lanes advantage, value; };

    Gae(const Grid &grid, const Factors &factors)
        : grid(grid), gamma(splat(factors.gamma)), decay(splat(factors.decay)), decays(decay != 0) {}

    [[gnu::always_inline]] State last(std::int64_t i, std::int64_t reads) const {
        return {Lanes{}, load(grid.value + i, reads)};
    }
    [[gnu::always_inline]] State stored(std::int64_t i) const {
        return {load(grid.advantage + i, LANES), load(grid.value + i, LANES)};
    }
    // δₜ + γλ(1 - doneₜ)Âₜ₊₁
    [[gnu::always_inline]] State step(std::int64_t i, std::int64_t reads, const State &next) const {
        auto value = load(grid.value + i, reads);
        auto ends = ends_of(grid, i, reads, next.value);
        auto delta = (load(grid.reward + i, reads) - value) + where(ends.valued, gamma * ends.following);
        auto goes_on = decays & ends.goes_on;
        if (grid.mask) {
            auto real = set(load(grid.mask + i, reads));
            delta = where(real, delta);
            goes_on &= real;
        }
        if constexpr (EXACT) return {delta + where(goes_on, decay * next.advantage), value};
        // what is passed on may be -0.0 where it has to be 0.0: then it makes no difference, as delta is not -0.0 there
        delta += where(goes_on, splat(-0.0f));
        return {delta + where(goes_on, decay) * next.advantage, value};
    }
    [[gnu::always_inline]] Lanes write(std::int64_t i, std::int64_t count, const State &state) const {
        store(grid.advantage + i, state.advantage, count);
        store(grid.ret + i, state.advantage + state.value, count);
        return Lanes{} * state.advantage;  // 0 or NaN
    }
};

struct Discounted {
    Grid grid;
    Lanes gamma;
    Marks discounts;  // false where gamma is 0
    struct State { Lanes ret; };

    Discounted(const Grid &grid, const Factors &factors)
        : grid(grid), gamma(splat(factors.gamma)), discounts(gamma != 0) {}

    [[gnu::always_inline]] State last(std::int64_t i, std::int64_t reads) const {
        return {grid.value ? load(grid.value + i, reads) : Lanes{}};
    }
    [[gnu::always_inline]] State stored(std::int64_t i) const { return {load(grid.ret + i, LANES)}; }
    // rₜ + γGₜ₊₁: an end that was cut goes on with its final value, the last row with the bootstrap. A step that
    // terminated and was truncated counts as terminated.
    [[gnu::always_inline]] State step(std::int64_t i, std::int64_t reads, const State &next) const {
        auto terminated = load(grid.terminated + i, reads), truncated = load(grid.truncated + i, reads);
        auto term = load(grid.reward + i, reads);
        if (truncated && grid.final_value) {
            auto cut = unset(terminated) & set(truncated);
            term = cut ? term + gamma * load(grid.final_value + i, reads) : term;
        }
        auto goes_on = discounts & unset(terminated | truncated);
        if (grid.mask) {
            auto real = set(load(grid.mask + i, reads));
            term = real ? term : grid.value ? load(grid.value + i, reads) : Lanes{};
            goes_on &= real;
        }
        return {term + where(goes_on, gamma * next.ret)};
    }
    [[gnu::always_inline]] Lanes write(std::int64_t i, std::int64_t count, const State &state) const {
        store(grid.ret + i, state.ret, count);
        return Lanes{};
    }
};

struct Vtrace {
    Grid grid;
    Lanes gamma, lam, most_rho, most_c;
    struct State { Lanes correction, target, value, advantage; };  // correction is vs - v, target is vs

    Vtrace(const Grid &grid, const Factors &factors)
        : grid(grid), gamma(splat(factors.gamma)), lam(splat(factors.lam)), most_rho(splat(factors.rho_clip)),
          most_c(splat(factors.c_clip)) {}

    [[gnu::always_inline]] State last(std::int64_t i, std::int64_t reads) const {
        auto value = load(grid.value + i, reads);
        return {Lanes{}, value, value, Lanes{}};
    }
    [[gnu::always_inline]] State stored(std::int64_t i) const {
        return {load(grid.ratio + i, LANES), load(grid.ret + i, LANES), load(grid.value + i, LANES), Lanes{}};
    }
    [[gnu::always_inline]] State step(std::int64_t i, std::int64_t reads, const State &next) const {
        auto ratio = load(grid.ratio + i, reads), value = load(grid.value + i, reads);
        auto rho = ratio > most_rho ? most_rho : ratio;  // NaN stays NaN, as torch's clamp has it
        auto c = lam * (ratio > most_c ? most_c : ratio), trace = gamma * c;
        auto ends = ends_of(grid, i, reads, next.value), targets = ends_of(grid, i, reads, next.target);
        auto gain = load(grid.reward + i, reads) - value;
        auto term = rho * (gain + where(ends.valued, gamma * ends.following));
        auto advantage = rho * (gain + where(ends.valued, gamma * targets.following));
        auto goes_on = (trace != 0) & ends.goes_on;  // a trace of 0 passes on 0, even of what is not finite
        if (grid.mask) {  // a row that is not real is worth its own value
            auto real = set(load(grid.mask + i, reads));
            term = where(real, term);
            goes_on &= real;
            advantage = where(real, advantage);
        }
        auto correction = term + where(goes_on, trace * next.correction);
        return {correction, correction + value, value, advantage};
    }
    // In whole vectors, the ratio makes room for the correction, which the row before may read there.
    [[gnu::always_inline]] Lanes write(std::int64_t i, std::int64_t count, const State &state) const {
        if (count == LANES) store(grid.ratio + i, state.correction, LANES);
        store(grid.ret + i, state.target, count);
        store(grid.advantage + i, state.advantage, count);
        return Lanes{};
    }
};

// With at most this many envs, each vector of envs is followed through all of time: what one step passes to the next
// stays in registers. With more, the pass takes row after row, as the processor loads ahead what follows in memory.
inline constexpr std::int64_t NARROW = 16;

// One step of the `count` envs from flat place `i` on, which reads no place behind theirs.
template <typename Estimator>
[[gnu::noinline]] void step_alone(const Estimator &estimator, std::int64_t i, std::int64_t count,
                                  typename Estimator::State &state, Lanes &zeros) {
    state = estimator.step(i, count, state);
    zeros += estimator.write(i, count, state);
}

// The steps of the `count` envs from flat place `i` on down to the first: a loop for each count.
template <std::int64_t COUNT, typename Estimator>
[[gnu::always_inline]] inline Lanes pass_down(const Estimator &estimator, std::int64_t i, std::int64_t count,
                                              typename Estimator::State state) {
    if constexpr (COUNT > 1)
        if (count != COUNT) return pass_down<COUNT - 1>(estimator, i, count, state);
    Lanes zeros{};
    for (; i >= 0; i -= estimator.grid.envs) {
        state = estimator.step(i, LANES, state);
        zeros += estimator.write(i, COUNT, state);
    }
    return zeros;
}

// All steps of the `count` envs from `env` on. Returns the sum of what `write` does.
template <typename Estimator>
[[gnu::noinline]] Lanes pass_through_time(const Estimator estimator, std::int64_t env, std::int64_t count) {
    auto envs = estimator.grid.envs, size = estimator.grid.steps * envs, i = size - envs + env;
    Lanes zeros{};
    auto state = estimator.last(size + env, count);
    for (; i >= 0 && i + LANES > size; i -= envs) step_alone(estimator, i, count, state, zeros);
    zeros += pass_down<LANES>(estimator, i, count, state);
    for (auto k = count; k < LANES; ++k) zeros[k] = 0;
    return zeros;
}

// Row after row of the first `whole` envs, which fill vectors.
template <typename Estimator>
[[gnu::noinline]] Lanes pass_through_rows(const Estimator estimator, std::int64_t whole) {
    auto envs = estimator.grid.envs, size = estimator.grid.steps * envs;
    Lanes zeros{};
    for (auto row = size - envs; row >= 0; row -= envs)
        if (row + envs == size)
            for (auto i = row; i < row + whole; i += LANES)
                zeros += estimator.write(i, LANES, estimator.step(i, LANES, estimator.last(i + envs, LANES)));
        else
            for (auto i = row; i < row + whole; i += LANES)
                zeros += estimator.write(i, LANES, estimator.step(i, LANES, estimator.stored(i + envs)));
    return zeros;
}

// Up to NARROW envs, a pass follows LANES of them through all of time, so that what one step passes on stays in
// registers: row by row they have too little to do at a time, which took 200 µs at 2048 x 8 instead of 10.6. With more
// envs it goes row by row, because the processor loads that ahead best.
template <typename Estimator> inline bool pass(const Estimator &estimator) {
    auto envs = estimator.grid.envs, env = envs <= NARROW ? 0 : envs / LANES * LANES;
    auto zeros = env ? pass_through_rows(estimator, env) : Lanes{};
    for (; env < envs; env += LANES)
        zeros += pass_through_time(estimator, env, envs - env < LANES ? envs - env : LANES);
    bool found = false;
    for (std::int64_t k = 0; k < LANES; ++k) found |= zeros[k] != zeros[k];
    return found;
}

// Real steps that were truncated, not terminated, and lack their final value.
[[gnu::always_inline]] inline Marks missing_at(const Grid &grid, std::int64_t i) {
    auto missing = unset(load(grid.terminated + i, LANES)) & set(load(grid.truncated + i, LANES));
    if (grid.mask) missing &= set(load(grid.mask + i, LANES));
    if (!grid.final_value) return missing;
    auto final_value = load(grid.final_value + i, LANES);
    return missing & (final_value != final_value);
}

// The first place of such a step; or -1.
inline std::int64_t first_missing(const Grid &grid) {
    constexpr std::int64_t WORDS = 4, BLOCK = WORDS * LANES;
    auto size = grid.steps * grid.envs;
    std::int64_t i = 0;
    for (; i + BLOCK <= size; i += BLOCK) {
        Flags some = 0;
        for (std::int64_t k = 0; k < BLOCK; k += LANES) some |= load(grid.truncated + i + k, LANES);
        if (!some) continue;
        Marks missing{};  // no branch for each flag: most would not be foreseen
        for (std::int64_t k = 0; k < BLOCK; k += LANES) missing |= missing_at(grid, i + k);
        std::int32_t found = 0;
        for (std::int64_t k = 0; k < LANES; ++k) found |= missing[k];
        if (found) break;
    }
    for (; i < size; ++i)
        if (grid.truncated[i] && !grid.terminated[i] && (!grid.mask || grid.mask[i]) &&
            (!grid.final_value || grid.final_value[i] != grid.final_value[i]))
            return i;
    return -1;
}

// The passes of the estimators. Each returns true if an advantage that was written is not finite.

inline bool gae(const Grid &grid, const Factors &factors) {
    if (grid.envs <= NARROW && !pass(Gae<false>{grid, factors})) return false;
    return pass(Gae<true>{grid, factors});
}

inline bool discounted_return(const Grid &grid, const Factors &factors) {
    return pass(Discounted{grid, factors});
}

inline bool vtrace(const Grid &grid, const Factors &factors) {
    return pass(Vtrace{grid, factors});
}
