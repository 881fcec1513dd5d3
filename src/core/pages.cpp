// Pages of mapped files that the system is asked for before they are read.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "bindings.hpp"
#include "gil.hpp"

#if defined(__linux__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace relive {

namespace {

constexpr std::size_t PAGES = 256;  // the most of one question to the system

// Ask for the pages of some bytes that are not in memory; gives how many there are. A page that does not exist counts
// as missing. Nothing is read and nothing is changed, whatever the addresses.
std::int64_t ask(std::uintptr_t first, std::uintptr_t last) {
#if defined(__linux__) || defined(__APPLE__)
#ifdef __APPLE__
    using Flag = char;
#else
    using Flag = unsigned char;
#endif
    auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    std::int64_t missing = 0;
    for (auto low = first - first % page; low < last; low += PAGES * page) {  // both calls want the start of a page
        auto bytes = std::min<std::uintptr_t>(last - low, PAGES * page);
        auto count = (bytes + page - 1) / page;
        Flag there[PAGES] = {};
        mincore(reinterpret_cast<void *>(low), bytes, there);
        auto absent = count - std::count_if(there, there + count, [](Flag flag) { return flag & 1; });
        if (absent) madvise(reinterpret_cast<void *>(low), bytes, MADV_WILLNEED);
        missing += absent;
    }
    return missing;
#else
    (void)first, (void)last;
    return 0;
#endif
}

// Arrays `[R, ...]` in mapped files, each in one piece. None of them moves while this object keeps it.
class Pages {
  public:
    explicit Pages(nb::sequence arrays) {
        for (nb::handle item : arrays) {
            auto *array = reinterpret_cast<PyArrayObject *>(item.ptr());
            if (!PyArray_Check(item.ptr()) || PyArray_NDIM(array) < 1 || !PyArray_IS_C_CONTIGUOUS(array))
                throw nb::type_error("expected arrays [R, ...] in one piece");
            auto count = PyArray_DIMS(array)[0];
            if (parts_.empty()) rows_ = count;
            rows_ = std::min<std::int64_t>(rows_, count);
            auto start = reinterpret_cast<std::uintptr_t>(PyArray_DATA(array));
            parts_.push_back({start, count ? static_cast<std::uintptr_t>(PyArray_NBYTES(array) / count) : 0});
            kept_.append(item);
        }
    }

    std::int64_t ask_for(Vector<const std::int64_t> begins, Vector<const std::int64_t> ends) const {
        if (begins.size() != ends.size()) throw nb::value_error("each run of rows has a begin and an end");
        for (std::int64_t k = 0; k < begins.size(); ++k)
            if (begins[k] < 0 || ends[k] > rows_) throw nb::index_error("there are no such rows");
        LongWork hold(true);  // the system may let us wait for the disk
        std::int64_t missing = 0;
        for (auto [start, width] : parts_)
            for (std::int64_t k = 0; k < begins.size(); ++k)
                if (auto begin = begins[k], end = ends[k]; begin < end)
                    missing += ask(start + begin * width, start + end * width);
        return missing;
    }

    std::int64_t row_bytes() const {
        std::int64_t bytes = 0;
        for (auto [start, width] : parts_) bytes += width;
        return bytes;
    }

  private:
    std::int64_t rows_ = 0;  // that all arrays have
    std::vector<std::pair<std::uintptr_t, std::uintptr_t>> parts_;  // an address, and the bytes of a row
    nb::list kept_;
};

}  // namespace

void bind_pages(nb::module_ &module) {
    using namespace nb::literals;
    nb::class_<Pages>(module, "Pages", "The pages of arrays ``[R, ...]`` in mapped files, each in one piece.")
        .def(nb::init<nb::sequence>(), "arrays"_a)
        .def("ask_for", &Pages::ask_for, "begins"_a, "ends"_a,
             "Ask for the pages of some rows that are not in memory. Nothing is read and nothing is changed.\n\n"
             "The pages come while others are asked for, and after the call. A page that two runs share and that is on "
             "its way counts as missing for each of them. ``begins`` and ``ends``, int64 ``[K]``, have the first row "
             "of each run and the row after its last. Returns how many pages were not in memory; 0 on systems that "
             "cannot be asked.")
        .def_prop_ro("row_bytes", &Pages::row_bytes, "The bytes of a row in all arrays.");
}

}  // namespace relive
