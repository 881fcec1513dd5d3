// Lists and tuples of numbers as arrays, where that is quicker than NumPy's own way.
#pragma once
#include "arrays.hpp"

namespace relive {

// The array that NumPy makes of a list or a tuple, nested or not, of Python's own numbers or of arrays and tensors in
// RAM that are alike; invalid for anything else, which NumPy may still know. Throws what is raised by Ctrl-C while a
// tensor is asked.
nb::object array_of_list(PyObject *given);

}  // namespace relive
