// Arguments from Python: views of NumPy's arrays that check dtype and axes once, by its C API in a few nanoseconds.
//
// A view holds no reference: it is good while the caller's argument lives. What outlives a call is a KeptVector, or
// keeps the object too.
#pragma once
#include <nanobind/nanobind.h>

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL relive_numpy
#ifndef RELIVE_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace relive {

namespace nb = nanobind;

// Bad arguments are refused with a ValueError, before anything is written.
inline void require(bool holds, const char *what) {
    if (!holds) throw nb::value_error(what);
}

// One axis: element i is `stride` bytes after element i - 1. Columns of packed rows are such views.
template <typename T> struct Column {
    using Number = T;
    using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
    static constexpr int AXES = 1;
    Byte *first = nullptr;
    std::ptrdiff_t stride = sizeof(T);
    std::int64_t count = 0;
    T &operator[](std::int64_t i) const { return *reinterpret_cast<T *>(first + i * stride); }
    std::int64_t size() const { return count; }

    bool bind(PyArrayObject *array) {
        first = static_cast<Byte *>(PyArray_DATA(array));
        stride = PyArray_STRIDES(array)[0];
        count = PyArray_DIMS(array)[0];
        return true;
    }
};

// One axis, one element behind the other.
template <typename T> struct Vector {
    using Number = T;
    static constexpr int AXES = 1;
    T *data = nullptr;
    std::int64_t count = 0;
    T &operator[](std::int64_t i) const { return data[i]; }
    std::int64_t size() const { return count; }
    T *begin() const { return data; }
    T *end() const { return data + count; }

    bool bind(PyArrayObject *array) {
        data = static_cast<T *>(PyArray_DATA(array));
        count = PyArray_DIMS(array)[0];
        return count < 2 || PyArray_STRIDES(array)[0] == sizeof(T);
    }
};

// A vector that keeps its array.
template <typename T> struct KeptVector : Vector<T> {
    nb::object array;

    bool bind(PyArrayObject *given) {
        array = nb::borrow(reinterpret_cast<PyObject *>(given));
        return Vector<T>::bind(given);
    }
};

// Two axes; the elements of a row lie one behind the other, rows are `stride` bytes apart.
template <typename T> struct Matrix {
    using Number = T;
    using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
    static constexpr int AXES = 2;
    Byte *first = nullptr;
    std::ptrdiff_t stride = 0;
    std::int64_t rows = 0, columns = 0;
    T *operator[](std::int64_t row) const { return reinterpret_cast<T *>(first + row * stride); }

    bool bind(PyArrayObject *array) {
        first = static_cast<Byte *>(PyArray_DATA(array));
        rows = PyArray_DIMS(array)[0];
        columns = PyArray_DIMS(array)[1];
        bool none = rows == 0 || columns == 0;  // then strides say nothing
        stride = none ? columns * static_cast<std::ptrdiff_t>(sizeof(T)) : PyArray_STRIDES(array)[0];
        return none || columns == 1 || PyArray_STRIDES(array)[1] == sizeof(T);
    }
};

// Any int, modulo 2**64.
struct Word {
    std::uint64_t value = 0;
};

// True if an array's elements are numbers of type T, whatever NumPy calls the type: int64 is `long` or `long long`.
template <typename T> bool holds(PyArrayObject *array) {
    using U = std::remove_const_t<T>;
    char kind = PyArray_DESCR(array)->kind;
    bool same = std::is_floating_point_v<U> ? kind == 'f'
                : sizeof(U) == 1 && std::is_unsigned_v<U> ? kind == 'u' || kind == 'b'
                : std::is_unsigned_v<U> ? kind == 'u' : kind == 'i';
    return same && PyArray_ITEMSIZE(array) == sizeof(U) && PyArray_ISNOTSWAPPED(array) && PyArray_ISALIGNED(array) &&
           (std::is_const_v<T> || PyArray_ISWRITEABLE(array));
}

}  // namespace relive

namespace nanobind::detail {

// An array of these numbers, of as many axes, whose elements lie as the view says; else the call raises a TypeError.
template <typename View> requires(View::AXES > 0) struct type_caster<View> {
    NB_TYPE_CASTER(View, const_name("numpy.typing.NDArray"))
    bool from_python(handle source, uint8_t, cleanup_list *) noexcept {
        if (!PyArray_Check(source.ptr())) return false;
        auto *array = reinterpret_cast<PyArrayObject *>(source.ptr());
        return PyArray_NDIM(array) == View::AXES && relive::holds<typename View::Number>(array) && value.bind(array);
    }
};

template <> struct type_caster<relive::Word> {
    NB_TYPE_CASTER(relive::Word, const_name("int"))
    bool from_python(handle source, uint8_t, cleanup_list *) noexcept {
        if (!PyIndex_Check(source.ptr())) return false;
        value.value = PyLong_AsUnsignedLongLongMask(source.ptr());
        if (value.value != static_cast<std::uint64_t>(-1) || !PyErr_Occurred()) return true;
        PyErr_Clear();
        return false;
    }
};

}  // namespace nanobind::detail

namespace relive {

// A member of a NamedTuple of arrays. `whose` begins the error of one that has another dtype or other axes.
template <typename View> View member(nb::handle arrays, const char *name, const char *whose) {
    View view;
    nb::object array = arrays.attr(name);  // what it raises goes to Python; try_cast itself may raise nothing
    if (!nb::try_cast(array, view))
        throw nb::type_error((std::string(whose) + " `" + name + "` has another dtype or other axes").c_str());
    return view;
}

// What NumPy has made, or what it raised instead.
inline nb::object array_or_raise(PyObject *array) {
    if (!array) nb::raise_python_error();
    return nb::steal(array);
}

// Where the numbers of an array are that was made here.
template <typename T> T *numbers_of(nb::handle array) {
    return static_cast<T *>(PyArray_DATA(reinterpret_cast<PyArrayObject *>(array.ptr())));
}

// An array keeps what its memory belongs to.
inline void set_base(nb::handle array, nb::object owner) {
    if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject *>(array.ptr()), owner.release().ptr()) < 0)
        nb::raise_python_error();
}

}  // namespace relive
