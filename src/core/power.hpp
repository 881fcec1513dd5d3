// Numbers to a power, with the same bits everywhere.
#pragma once
#include <cstdint>
#include <span>

namespace relive {

// Replace each number x by x**a, for any x and finite a; for exponents up to 2 within some 4 units in the last place,
// and the further the larger they are. x**1 is x, x**0 is 1.
void raise(std::span<double> numbers, double a);

}  // namespace relive
