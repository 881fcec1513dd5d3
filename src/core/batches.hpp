// What batches are made of: anchors, drawn when they are read, or given.
#pragma once
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <span>
#include <vector>

#include "arrays.hpp"
#include "draws.hpp"
#include "priorities.hpp"
#include "ring.hpp"
#include "tensors.hpp"
#include "tree.hpp"
#include "windows.hpp"

namespace relive {

// What a sampler draws: `count` anchors of a stream of random numbers. Equal draws of a ring that has not changed give
// equal anchors, so it does not matter when, or how often, it is made.
struct Draw {
    enum class By { Chance, Weight, Priority };

    By by = By::Chance;
    std::int64_t count = 0;
    std::uint64_t stream = 0;
    // by chance
    const Ring *ring = nullptr;
    std::int64_t newest = 0;  // from so many of the newest; 0: from all
    // by weight or priority
    const Tree *tree = nullptr;
    bool from_some = false;  // from the leaves of a cover alone
    std::vector<std::int64_t> tops;
    std::vector<double> until;
    const Ring *episodes = nullptr;  // a leaf stands for its episode: one of its windows is drawn
    std::vector<Number> oldest;      // of each env, the first row that may end it; empty: all may
    // by priority
    const Priorities *priorities = nullptr;
    bool stratified = false;
    double beta = 0.0, lowest = 0.0;
    nb::object kept;  // what the pointers point into
    nb::object standing = nb::none();  // what the batch is written to, if not to fresh memory

    bool weighed() const { return by == By::Priority; }
    // The places of the anchors; by priority, their chances and weights as well. False if there is nothing to draw.
    bool into(std::span<Place> places, Column<double> probability, Column<float> weight) const;

  private:
    bool leaves_into(const Cover &among, std::span<Place> places) const;
};

// There was nothing to draw when a draw was made. It is Python's `EmptyDraw`, a ValueError.
struct EmptyDraw : std::exception {
    const char *what() const noexcept override { return "there is nothing to draw"; }
};

[[noreturn]] void nothing_to_draw();

// The object that Python holds; never null, as a pointer to None would be.
template <typename T> const T *held(nb::handle object, const char *what) {
    const T *found = nullptr;
    if (!nb::try_cast(object, found) || !found) throw nb::type_error(what);
    return found;
}

// The anchors of a batch: those of a draw, or places (int64 [B]). They are found without the GIL.
class Anchors {
  public:
    // `roomy` if the batch has room for the weights of a draw by priority.
    Anchors(nb::handle what, bool roomy);
    std::int64_t count() const { return draw_ ? draw_->count : given_.size(); }
    bool weighed() const { return draw_ && draw_->weighed(); }
    nb::object standing() const { return draw_ ? draw_->standing : nb::none(); }
    // Memory for `sizes[0] * sizes[1] * ...` bytes and a few more for each anchor, or std::bad_alloc.
    static std::size_t bytes(std::initializer_list<std::int64_t> sizes);
    // Copies: other threads may change the array between the test of a place and its use.
    bool into(std::span<Place> places, Column<double> probability, Column<float> weight) const;
    // True if a part of them can be found without the others: those from number `low` on.
    bool by_parts() const { return draw_ && draw_->by == Draw::By::Chance; }
    bool part_into(std::span<Place> places, std::int64_t low) const;
    // Throws if there was nothing to draw, or if a draw gave a place that is no row's. What is no row's of places that
    // were given is answered by its position.
    void require(bool some, std::int64_t bad) const;

  private:
    const Draw *draw_ = nullptr;
    Places given_;
};

// The large fields of n-step windows of a ring: the columns of a batch that lie apart from its packed rows.
class LargeFields {
  public:
    // Of tuples (rows of bytes, now, then, stacked), in the order of the columns of `fields`: the rows (uint8 [R, W]) of
    // a field, and whether a batch has those of the anchors, those of the rows that windows bootstrap from, and, in
    // place of single ones, the stacks of so many frames that end there.
    LargeFields(nb::handle facts, const Fields &fields, std::int64_t depth = 0, bool repeat = false);
    bool empty() const { return fields_.empty(); }
    std::int64_t row_bytes() const { return row_bytes_; }  // of all columns
    // Throws if the ring was bound to more rows than these fields have.
    void require_all(const Ring &ring) const;
    // Copies the columns of a batch, one after another from `to` on: its anchors, and then as many rows that its windows
    // bootstrap from. All are rows of the ring.
    void read(const Ring &ring, Places places, std::byte *to) const;

  private:
    struct Field {
        Bytes source;
        bool now, then, stacked;
        nb::object kept;
    };
    std::vector<Field> fields_;
    std::int64_t depth_, row_bytes_ = 0;
    bool repeat_;
};

}  // namespace relive
