// Steps: whether the fields of one can be read, and where they are stored.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tensors.hpp"

namespace relive {

// A field of a step, `[N, *shape]`, and where its rows are stored: as runs of bytes that begin `pitch` bytes apart.
struct StepField {
    DType dtype;
    std::vector<std::int64_t> shape;  // with N
    bool finite = false;              // its numbers are, in debug mode
    std::size_t item = 0;             // bytes of a number
    std::size_t bytes = 0;            // of all N items
    std::byte *target = nullptr;      // its first row; null if the field is only checked
    std::int64_t rows = 0;
    std::ptrdiff_t stride = 0;        // bytes from a row to the next
    std::int64_t runs = 0;            // of a row: one if its items follow one another, else N
    std::ptrdiff_t pitch = 0;
    std::size_t size = 0;             // bytes of a run
    bool past = false;                // rows are written past the caches
    nb::object otherwise;             // the value in a step that leaves the field out; invalid if none may
    const std::byte *default_data = nullptr;  // its numbers, as they are stored

    // Bytes from the begin of a row to its end.
    std::ptrdiff_t extent() const { return runs > 0 ? (runs - 1) * pitch + static_cast<std::ptrdiff_t>(size) : 0; }
};

// Where the numbers of a field lie, one behind the other and of its dtype.
struct Source {
    PyObject *item;  // held until the step is forgotten
    const std::byte *data;
    bool read;  // into memory of the step, since those of the item lie or are otherwise
};

// The values of a step, one for each field; and memory for those that are not given as they are stored.
class Step {
  public:
    explicit Step(std::size_t count) : count_(count), many_(count > FEW ? count : 0) {
        first_ = many_.empty() ? few_ : many_.data();
        for (std::size_t i = 0; i < count; ++i) first_[i].item = nullptr;
    }
    Step(const Step &) = delete;
    Step &operator=(const Step &) = delete;
    ~Step() { for (std::size_t i = 0; i < count_; ++i) Py_XDECREF(first_[i].item); }

    // Takes the reference.
    void set(std::size_t i, PyObject *item) { first_[i] = {item, nullptr, false}; }
    // The field is left out: its default is a value that needs no look.
    void set_default(std::size_t i, const StepField &field) {
        first_[i] = {field.otherwise.inc_ref().ptr(), field.default_data, false};
    }
    Source &operator[](std::size_t i) { return first_[i]; }
    const Source &operator[](std::size_t i) const { return first_[i]; }
    // Memory for so many bytes, aligned for any number.
    std::byte *take(std::size_t bytes) {
        auto begin = (used_ + 15) / 16 * 16;
        if (bytes <= sizeof(near_) && begin <= sizeof(near_) - bytes) {
            used_ = begin + bytes;
            return near_ + begin;
        }
        return far_.emplace_back(new std::byte[bytes]).get();
    }

  private:
    static constexpr std::size_t FEW = 24;
    std::size_t count_;
    Source few_[FEW];
    std::vector<Source> many_;
    Source *first_;
    alignas(16) std::byte near_[4096];
    std::size_t used_ = 0;
    std::vector<std::unique_ptr<std::byte[]>> far_;
};

// The fields of a step. None of their targets moves.
class StepFields {
  public:
    StepFields(nb::handle paths, nb::handle dtypes, nb::handle shapes, std::int64_t count, nb::handle targets,
               nb::handle finite, nb::handle defaults);

    // True if all fields can be read, and a dict has just so many `others`: then `step` has where each lies. Throws
    // what is raised by Ctrl-C while a tensor is asked.
    bool accept(nb::handle given, Step &step, Py_ssize_t others = 0) const;
    // The same for one of them, or for a field that is not stored.
    bool accept(const StepField &field, Source &source, Step &step) const;
    // True if no number of a field of an accepted step is NaN or infinite, or if some may be.
    bool is_finite(const Step &step, std::size_t field) const;
    // The leaves of an accepted step, as they were given or as new arrays.
    nb::tuple leaves(const Step &step) const;
    // Copy the values that lie in row `row` of a target: they would be overwritten before they are read.
    void set_aside(Step &step, std::int64_t row) const;
    // Copy an accepted step to row `row`, which exists. Nothing of Python is touched.
    void copy(const Step &step, std::int64_t row) const;
    void copy(const Step &step, std::int64_t row, std::size_t field) const;

    const std::vector<StepField> &fields() const { return fields_; }
    std::size_t size() const { return fields_.size(); }
    Py_ssize_t names() const { return static_cast<Py_ssize_t>(root_.members.size()); }
    std::int64_t count() const { return count_; }
    std::int64_t rows() const { return rows_; }  // of the shortest target; -1: there is none
    std::int64_t bytes() const { return bytes_; }  // of a step

  private:
    struct Node {
        nb::object name;
        bool is_leaf = false;
        std::size_t leaf = 0;       // which field it is
        std::vector<Node> members;  // else
        bool numbered = false;      // the members are named "0", "1", ...: a tuple may hold them
    };
    static void grow(Node &node, const nb::tuple &path, std::size_t depth, std::size_t leaf);
    // Accept a field whose numbers have to be read into the step; null: it is neither an array nor a tensor.
    bool read(const StepField &field, Source &source, Step &step, const Description *found) const;
    bool pick(PyObject *given, const Node &node, Step &step, Py_ssize_t others) const;

    std::vector<StepField> fields_;
    Node root_;
    std::int64_t count_, rows_ = -1, bytes_ = 0;
    Py_ssize_t defaults_ = 0;  // how many fields have a value for steps that leave them out
    const std::byte *low_ = nullptr, *high_ = nullptr;  // all targets lie between them
    nb::object kept_;  // the targets
};

}  // namespace relive
