// Long work lets other threads of Python run; for short work that would cost more than the work itself.
// Below some 20 µs, about 256 KiB of copies, to let go of the GIL costs more than it gives. What may wait for a disk
// always lets go.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>

namespace relive {

// So many bytes of copies take some 20 us or more.
inline constexpr std::int64_t LONG_WORK = std::int64_t{1} << 18;
// As do so many draws, or changes of a tree.
inline constexpr std::int64_t MANY_ITEMS = 4096;

// While it lives, the GIL is let go of if the work is long. Nothing of Python may be touched then, and nothing may
// throw what Python has to see before it is gone.
class LongWork {
  public:
    explicit LongWork(bool lasts) : state_(lasts ? PyEval_SaveThread() : nullptr) {}
    ~LongWork() { if (state_) PyEval_RestoreThread(state_); }
    LongWork(const LongWork &) = delete;
    LongWork &operator=(const LongWork &) = delete;

  private:
    PyThreadState *state_;  // null if it was not let go of
};

}  // namespace relive
