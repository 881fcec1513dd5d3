// Batches whose rows come from several rings.
#pragma once
#include <cstdint>

#include "tensors.hpp"

namespace relive {

// The rows of one batch, to which several reads write in turn, each behind those before it. A row has the fields of
// what is read, at the same bytes, and behind them the number of its part.
class JoinedRows {
  public:
    // `fields` are of the whole rows, in which the part's number (int64) is at byte `part_at`.
    JoinedRows(nb::object fields, std::int64_t part_at, std::int64_t count, nb::handle standing, Pool &pool);
    // Memory of the next `count` rows, of which a read writes up to `width` bytes each.
    Matrix<std::uint8_t> take(std::int64_t count, std::int64_t width);
    // The tensors over all rows, once all are taken.
    nb::dict tensors();

    std::int64_t part = 0;  // the number of the part that comes next

  private:
    nb::object kept_;
    const Fields *fields_;
    std::int64_t part_at_, count_, taken_ = 0;
    Target block_;
};

// What a batch is written to, if that is rows of several parts; else null.
JoinedRows *joined_rows(nb::handle standing);

}  // namespace relive
