// Numbers of any strides and dtype, read as a field stores them.
#pragma once
#include <cstddef>

#include "tensors.hpp"

namespace relive {

// Copy the numbers of `given` to `to`, one behind the other and of this dtype. False if that would change what one of
// them means, or if it is not known here whether it would: `to` then holds anything. `check_castable` of
// relive.steps.arrays has the rule, and allows all that is read here.
bool read_numbers(const Description &given, DType dtype, std::byte *to);

// True if no number of a contiguous field is NaN or infinite.
bool all_finite(DType dtype, const std::byte *numbers, std::size_t bytes);

}  // namespace relive
