// The rows of one batch that several reads write, each behind those of the part before it.
#include "joined.hpp"

#include "batches.hpp"
#include "bindings.hpp"
#include "copies.hpp"

namespace relive {

JoinedRows::JoinedRows(nb::object fields, std::int64_t part_at, std::int64_t count, nb::handle standing, Pool &pool)
    : kept_(fields), fields_(held<Fields>(fields, "expected the fields of packed rows")), part_at_(part_at),
      count_(count) {
    auto width = static_cast<std::int64_t>(fields_->width);
    require(count >= 0 && part_at >= 0 && part_at <= width - 8, "joined rows: the part lies beyond a row");
    block_ = Target(standing, pool, Anchors::bytes({count, width}));
}

Matrix<std::uint8_t> JoinedRows::take(std::int64_t count, std::int64_t width) {
    auto stride = static_cast<std::int64_t>(fields_->width);
    require(count <= count_ - taken_ && width <= part_at_, "joined rows: a part has too many rows, or wider ones");
    Matrix<std::uint8_t> rows{block_->rows() + taken_ * stride, stride, count, width};
    for (std::int64_t i = 0; i < count; ++i) put(rows.first + i * stride + part_at_, part);
    taken_ += count;
    return rows;
}

nb::dict JoinedRows::tensors() {
    require(taken_ == count_, "joined rows: some are of no part yet");
    nb::dict found;
    fields_->put(*block_, block_->rows(), count_, found, block_.slot);
    return found;
}

JoinedRows *joined_rows(nb::handle standing) {
    JoinedRows *found = nullptr;
    return nb::try_cast(standing, found) ? found : nullptr;
}

void bind_joined(nb::module_ &module) {
    nb::class_<JoinedRows>(module, "JoinedRows", "The rows of one batch that several reads write, each those of a part.")
        .def(nb::init<nb::object, std::int64_t, std::int64_t, nb::handle, Pool &>(), nb::arg("fields"),
             nb::arg("part_at"), nb::arg("count"), nb::arg("standing").none(), nb::arg("pool"))
        .def_rw("part", &JoinedRows::part, "The number of the part that is read next.")
        .def("tensors", &JoinedRows::tensors, "The tensors over all rows, once every part was read.");
}

}  // namespace relive
