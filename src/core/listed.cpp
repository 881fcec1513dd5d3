// Reads lists and tuples of numbers, or of arrays, into one array, and gives up where an item is not like the first.
#include "listed.hpp"

#include <cstring>
#include <vector>

#include "copies.hpp"
#include "tensors.hpp"

namespace relive {

namespace {

bool is_list(PyObject *thing) { return PyList_CheckExact(thing) || PyTuple_CheckExact(thing); }

Py_ssize_t length(PyObject *list) {
    return PyList_CheckExact(list) ? NB_LIST_GET_SIZE(list) : NB_TUPLE_GET_SIZE(list);
}

// Kept: a tensor that is asked may run code that changes the list.
nb::object item(PyObject *list, Py_ssize_t i) {
    return nb::borrow(PyList_CheckExact(list) ? NB_LIST_GET_ITEM(list, i) : NB_TUPLE_GET_ITEM(list, i));
}

// NumPy's name of a dtype; NPY_VOID where it has none.
int name_of(DType dtype) {
    for (int name = 0; name < static_cast<int>(std::size(NUMPY_DTYPES)); ++name)
        if (NUMPY_DTYPES[name] == dtype) return name;
    return NPY_VOID;
}

// One way to read a list: the dtype of its numbers, and of what shape it is.
class ListReader {
  public:
    // By the first of everything.
    explicit ListReader(PyObject *given) {
        nb::object at = nb::borrow(given);
        while (is_list(at.ptr()) && shape_.size() < NPY_MAXDIMS) {
            shape_.push_back(length(at.ptr()));
            if (shape_.back() == 0) return;  // of float64, as NumPy has it, or of rows that come to nothing
            at = item(at.ptr(), 0);
        }
        depth_ = shape_.size();
        auto *first = at.ptr();
        if (PyFloat_CheckExact(first)) type_ = NPY_FLOAT64;
        else if (PyBool_Check(first)) type_ = NPY_BOOL;
        else if (PyLong_CheckExact(first)) type_ = NPY_INT64;
        else if (Description found; describe(first, found) && found.dtype.code != BFLOAT && found.ndim > 0) {
            dtype_ = found.dtype;
            type_ = name_of(dtype_);
            size_ = dtype_.bytes();
            for (std::int32_t axis = 0; axis < found.ndim; ++axis) {
                shape_.push_back(found.shape[axis]);
                size_ *= static_cast<std::size_t>(found.shape[axis]);
            }
        }
    }

    nb::object array() {
        if (type_ == NPY_VOID || shape_.size() > NPY_MAXDIMS) return {};
        return nb::steal(PyArray_SimpleNew(static_cast<int>(shape_.size()), shape_.data(), type_));
    }

    // Fill the array; false if an item is not like the first.
    bool fill(PyObject *list, std::size_t axis, std::byte *&to) {
        auto count = shape_[axis];
        bool numbers = axis + 1 == depth_;
        for (npy_intp i = 0; i < count; ++i) {
            if (!is_list(list) || length(list) != count) return false;
            if (numbers && !size_) {
                auto *one = PyList_CheckExact(list) ? NB_LIST_GET_ITEM(list, i) : NB_TUPLE_GET_ITEM(list, i);
                if (!number(one, to)) return false;
            } else if (auto one = item(list, i); numbers ? !rows(one.ptr(), to) : !fill(one.ptr(), axis + 1, to)) {
                return false;
            }
        }
        return true;
    }

    // Whole numbers among floats are floats, as NumPy has it.
    bool turn_real() {
        if (!met_float_ || type_ != NPY_INT64) return false;
        type_ = NPY_FLOAT64;
        return true;
    }

  private:
    bool number(PyObject *one, std::byte *&to) {
        if (type_ == NPY_FLOAT64 && PyFloat_CheckExact(one)) return set(to, PyFloat_AsDouble(one));
        if (type_ == NPY_BOOL) return PyBool_Check(one) && set(to, static_cast<npy_bool>(one == Py_True));
        if (!PyLong_CheckExact(one)) {
            met_float_ = PyFloat_CheckExact(one);
            return false;
        }
        int beyond = 0;
        auto whole = PyLong_AsLongLongAndOverflow(one, &beyond);  // larger ones have another dtype
        if (beyond) return false;
        return type_ == NPY_INT64 ? set(to, static_cast<npy_int64>(whole)) : set(to, static_cast<double>(whole));
    }

    template <typename T> static bool set(std::byte *&to, T value) {
        put(to, value);
        to += sizeof(T);
        return true;
    }

    bool rows(PyObject *one, std::byte *&to) const {
        Description found;
        bool alike = describe(one, found) && found.dtype == dtype_ && found.contiguous() &&
                     found.has_shape({reinterpret_cast<const std::int64_t *>(shape_.data()) + depth_,
                                      shape_.size() - depth_});
        if (alike && size_) copy_bytes(to, found.data, size_);
        to += size_;
        return alike;
    }

    std::vector<npy_intp> shape_;
    std::size_t depth_ = 0;  // axes that are lists
    int type_ = NPY_VOID;
    DType dtype_;
    std::size_t size_ = 0;   // bytes of one array or tensor; 0: of numbers
    bool met_float_ = false;
};

}  // namespace

nb::object array_of_list(PyObject *given) {
    if (!is_list(given)) return {};
    ListReader reader(given);
    do {
        nb::object array = reader.array();
        if (!array.is_valid()) {
            PyErr_Clear();
            return {};
        }
        auto *to = numbers_of<std::byte>(array);
        if (reader.fill(given, 0, to)) return array;
    } while (reader.turn_real());
    return {};
}

}  // namespace relive
