// Tensors of torch and arrays of NumPy, read and made without a line of Python and without linking to torch.
//
// Arrays are read by NumPy's C API, tensors by the DLPack exchange API, a table of C functions that newer versions of
// torch offer. With older ones, `relive.core.plain` makes arrays of tensors, and tensors of arrays.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "arrays.hpp"
#include "pool.hpp"

namespace relive {

// A dtype, as DLPack names it.
struct DType {
    std::uint8_t code = 0, bits = 0;
    std::uint16_t lanes = 0;  // 0: of no dtype
    bool operator==(const DType &) const = default;
    std::size_t bytes() const { return bits / 8; }
    bool known() const { return lanes != 0; }
};

enum DTypeCode : std::uint8_t { INT = 0, UINT = 1, FLOAT = 2, BFLOAT = 4, COMPLEX = 5, BOOL = 6 };

// The dtype of a torch.dtype; one of no dtype if DLPack has no name for it.
DType dtype_of(PyObject *torch_dtype);

// The dtypes of NumPy's numbers, in its order.
template <typename T> constexpr DType sized(std::uint8_t code) { return {code, 8 * sizeof(T), 1}; }
inline constexpr DType NUMPY_DTYPES[] = {
    {BOOL, 8, 1}, sized<char>(INT), sized<char>(UINT), sized<short>(INT), sized<short>(UINT), sized<int>(INT),
    sized<int>(UINT), sized<long>(INT), sized<long>(UINT), sized<long long>(INT), sized<long long>(UINT),
    {FLOAT, 32, 1}, {FLOAT, 64, 1}, {}, {COMPLEX, 64, 1}, {COMPLEX, 128, 1},
};

// Where the numbers of an array or of a tensor in RAM lie. It points into the object: it is good as long as that lives
// and nobody else is let change it.
class Description {
  public:
    std::byte *data = nullptr;  // null only if there are no numbers
    DType dtype;
    std::int32_t ndim = 0;
    const std::int64_t *shape = nullptr;
    bool array = false;  // it is one of NumPy
    bool writeable = true;

    std::ptrdiff_t stride(std::int32_t axis) const { return strides_[axis] * unit_; }  // in bytes
    // True if the numbers lie one behind the other. Axes of one item may have any stride.
    bool contiguous() const { return dense_ || has_no_gaps(); }
    bool has_shape(std::span<const std::int64_t> wanted) const {
        bool same = wanted.size() == sizes().size();
        for (std::size_t axis = 0; same && axis < wanted.size(); ++axis) same = shape[axis] == wanted[axis];
        return same;
    }
    bool empty() const { return std::ranges::count(sizes(), 0) > 0; }

  private:
    friend bool describe(PyObject *thing, Description &out);
    friend bool describe_tensor(PyObject *thing, Description &out);
    bool has_no_gaps() const;
    void bind(PyArrayObject *found) {
        auto number = static_cast<std::size_t>(PyArray_TYPE(found));
        dtype = number < std::size(NUMPY_DTYPES) ? NUMPY_DTYPES[number] : DType{FLOAT, 16, number == NPY_HALF};
        data = reinterpret_cast<std::byte *>(PyArray_DATA(found));
        ndim = PyArray_NDIM(found);
        shape = reinterpret_cast<const std::int64_t *>(PyArray_DIMS(found));
        strides_ = reinterpret_cast<const std::int64_t *>(PyArray_STRIDES(found));
        unit_ = 1;
        writeable = PyArray_ISWRITEABLE(found);
        dense_ = PyArray_IS_C_CONTIGUOUS(found);
    }
    std::span<const std::int64_t> sizes() const { return {shape, static_cast<std::size_t>(ndim)}; }
    const std::int64_t *strides_ = nullptr;
    std::ptrdiff_t unit_ = 1;
    bool dense_ = false;  // an array that says that it is contiguous
    nb::object lent_;  // the array that Python made of a tensor
};

// True if `thing` is exactly an array of NumPy or a tensor of torch (no subclass, such as a Parameter) in RAM whose
// numbers can be read where they lie: in the machine's byte order, aligned, neither negated nor conjugated lazily.
// A tensor that needs a gradient is read like others. The GIL is held. With the exchange, nothing of Python runs but
// what a TorchFunctionMode does when it is asked for `is_neg`. What is raised but no Exception, as by Ctrl-C, is
// thrown.
bool describe_tensor(PyObject *thing, Description &out);
inline bool describe(PyObject *thing, Description &out) {
    if (!PyArray_CheckExact(thing)) return describe_tensor(thing, out);
    auto *array = reinterpret_cast<PyArrayObject *>(thing);
    out.bind(array);
    out.array = true;
    return out.dtype.known() && PyArray_ISNOTSWAPPED(array) && PyArray_ISALIGNED(array);
}

// Where fields lie that are apart from packed rows: in which memory, and from where on.
struct Apart {
    Memory *memory = nullptr;
    std::byte *first = nullptr;
};

// How rows lie in memory: `sizes` of the axes before a row's bytes, and how many bytes are from one to the next.
struct PackedRows {
    std::byte *first = nullptr;
    std::span<const std::int64_t> sizes;
    std::span<const std::int64_t> strides;
    Apart apart{};
};

struct Field;
class Fields;

// What tensors are named by: the names of their fields, or the last ones of these, which are paths then.
enum class Use { Names, Leaves };

// Memory of one batch that later batches are written to, and the tensors over it, which are made once.
class Slot {
  public:
    // The memory, for a batch of so many bytes: of the pool, or what `take` gives. What autograd saved of the tensors is
    // void from now on.
    Kept<BatchMemory> fill(Pool &pool, nb::handle take, std::size_t bytes);
    // Take other memory the next time: there are tensors over this one that could not show that it has changed.
    void forget() { block_.reset(), made_.clear(), tensors_.clear(); }
    // The tensors over these rows of the memory by such names, or an empty object where they are not made yet.
    nb::object find(const Fields &fields, const PackedRows &rows, Use use) const;
    void keep(const Fields &fields, const PackedRows &rows, Use use, nb::object tensors);

  private:
    struct Made {
        nb::tuple fields;  // what they are made of: kept, so that no others come to lie at its address
        std::byte *first;
        std::vector<std::int64_t> sizes, strides;
        Use use;
        nb::object tensors;
    };
    Kept<BatchMemory> block_;
    std::size_t bytes_ = 0;
    std::vector<Made> made_;
    nb::list tensors_;  // all that were made
};

// Slots that take turns: a batch is valid until its slot's turn comes again.
class Standing {
  public:
    Standing(std::size_t slots, nb::object take) : take(std::move(take)), slots_(slots) {}
    Standing(const Standing &) = delete;
    Slot &next() { return slots_[turn_++ % slots_.size()]; }
    const nb::object take;  // a function that gives memory, such as that which a GPU reads by itself; None: the pool does

  private:
    std::vector<Slot> slots_;
    std::size_t turn_ = 0;
};

// Where a batch is written: to fresh memory of a pool, or to the next slot of `standing`, unless it is None.
struct Target {
    Target() = default;
    // Memory for so many bytes, and for so many more of what lies apart. Fresh memory of that is by itself, so that a
    // small tensor that somebody keeps does not keep large ones. Columns of no bytes, as of no rows, lie anywhere.
    Target(nb::handle standing, Pool &pool, std::size_t bytes, std::size_t apart = 0);
    BatchMemory *operator->() const { return block.get(); }
    BatchMemory &operator*() const { return *block; }
    nb::object kept;  // what the slot belongs to
    Slot *slot = nullptr;
    Kept<BatchMemory> block;
    Apart apart;

  private:
    Kept<BatchMemory> large_;  // the memory of `apart`, if it is not that of the block
};

// The fields of packed rows, and some that lie apart, a column `[*sizes, *shape]` without gaps each.
class Fields {
  public:
    // Of tuples (name, torch.dtype, shape, first byte) and the bytes of a row. Those without a first byte lie apart.
    Fields(nb::handle facts, std::size_t width);
    ~Fields();
    // Put a tensor `[*sizes, *shape]` for each field of rows in `memory` into a dict. The tensors keep the memory. Where
    // it is that of a slot, they are made once.
    void put(Memory &memory, const PackedRows &rows, nb::dict into, Slot *slot = nullptr) const;
    // The same for `count` rows that follow one another from `first` on.
    void put(Memory &memory, std::byte *first, std::int64_t count, nb::dict into, Slot *slot = nullptr) const {
        auto stride = static_cast<std::int64_t>(width);
        put(memory, PackedRows{first, {&count, 1}, {&stride, 1}}, into, slot);
    }
    // The same as a batch of this kind of dict, nested as the paths say that the fields are named by; in the order of
    // first leaves.
    nb::object batch(Memory &memory, const PackedRows &rows, nb::handle kind, Slot *slot) const;
    // The bytes of all columns of `count` rows that lie apart, or std::bad_alloc.
    std::size_t apart_bytes(std::int64_t count) const;
    // From one such column, of so many bytes, to the next: each begins at a multiple of 64 bytes.
    static std::size_t to_next(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
    // Name -> tensor over an array of rows, uint8 `[..., width]`.
    nb::dict tensors(nb::handle rows) const;
    // Pack a column `[T * N, *shape]` for each field into `rows`: row t * N + n of a column goes to row n * T + t,
    // where T is `steps`.
    void pack(nb::handle columns, Matrix<std::uint8_t> rows, std::int64_t steps) const;
    // Pack the rows `index` of a column `[R, *shape]` for each field, all of one R, one after another from `out` on.
    // -1, or the position of the first that is no row's.
    std::int64_t gather(nb::handle columns, Vector<const std::int64_t> index, std::byte *out) const;

    std::size_t width;  // bytes of a row
    nb::tuple given;    // the tuples
    std::vector<std::size_t> apart;  // the bytes of a row, of each field that lies apart

  private:
    // Those where no field may lie apart.
    void require_packed() const { require(apart.empty(), "fields of packed rows: some of them lie apart"); }
    // The tensors over rows by the names of the fields, or by the last names of their paths.
    nb::dict made(Memory &memory, const PackedRows &rows, Use use, Slot *slot) const;

    // Names that hold further ones: in which batch each stands, of those before it, where 0 is the outermost.
    struct Branch {
        std::size_t in;
        nb::object name;
    };
    // The columns `[R, *shape]` of these fields; R is `rows`, or any if negative.
    std::vector<Description> described(nb::tuple columns, std::int64_t rows, const char *expected) const;
    std::vector<Field> fields_;
    std::vector<Branch> branches_;
    bool paths_ = true;        // all names are paths
    std::int64_t widest_ = 1;  // bytes of a number, of any field
    bool exchanged_ = true;    // DLPack has names for all dtypes
};

}  // namespace relive
