// Steps: whether the fields of one can be copied as they are, and where they are stored.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tensors.hpp"

namespace relive {

// A field of a step, `[N, *shape]`, and where its rows are stored: as runs of bytes that begin `pitch` bytes apart.
struct StepField {
    DType dtype;
    nb::object torch_dtype;
    std::vector<std::int64_t> shape;  // with N
    char kind = 0;                    // NumPy's letter of its dtype; 0 if NumPy lacks it
    std::size_t item = 0;             // bytes of a number
    std::size_t bytes = 0;            // of all N items
    std::byte *target = nullptr;      // its first row; null if the field is only checked
    std::int64_t rows = 0;
    std::ptrdiff_t stride = 0;        // bytes from a row to the next
    std::int64_t runs = 0;            // of a row: one if its items follow one another, else N
    std::ptrdiff_t pitch = 0;
    std::size_t size = 0;             // bytes of a run
    bool past = false;                // rows are written past the caches
};

// Where the numbers of a field lie; the object is held until the step is forgotten.
struct Source {
    PyObject *item;
    const std::byte *data;
    bool narrowed;  // float64, to be stored as float32
};

// The values of a step, one for each field.
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
    Source &operator[](std::size_t i) { return first_[i]; }
    const Source &operator[](std::size_t i) const { return first_[i]; }

  private:
    static constexpr std::size_t FEW = 24;
    std::size_t count_;
    Source few_[FEW];
    std::vector<Source> many_;
    Source *first_;
};

// The fields of a step. None of their targets moves.
class StepFields {
  public:
    StepFields(nb::handle paths, nb::handle dtypes, nb::handle shapes, std::int64_t count, nb::handle targets);

    // The first field that cannot be copied as it is, or -1: then `step` has where each lies. Fields that are missing,
    // or one too many, make it 0. Throws what is raised by Ctrl-C while a tensor is asked.
    std::int64_t accept(nb::handle given, Step &step) const;
    // Copy an accepted step to row `row`, which exists. Nothing of Python is touched.
    void copy(const Step &step, std::int64_t row) const;
    void copy(const Step &step, std::int64_t row, std::size_t field) const;

    const std::vector<StepField> &fields() const { return fields_; }
    std::size_t size() const { return fields_.size(); }
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
    static bool pick(PyObject *given, const Node &node, Step &step);
    static bool accept(Source &source, const StepField &field);

    std::vector<StepField> fields_;
    Node root_;
    std::int64_t count_, rows_ = -1, bytes_ = 0;
    nb::object kept_;  // the targets
};

}  // namespace relive
