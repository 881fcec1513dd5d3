// Reads tensors and arrays where they lie, and makes the tensors of a batch.
#include "tensors.hpp"

#include <array>
#include <cstdlib>
#include <cstring>

#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "copies.hpp"
#include "gil.hpp"
#include "windows.hpp"

namespace relive {

namespace {

// -- what torch offers ------------------------------------------------------------------------------------------------

// From dlpack.h, version 1. A struct's layout is the same in all of its minor versions.

struct DLTensor {
    void *data;
    std::int32_t device_type, device_id;
    std::int32_t ndim;
    DType dtype;
    std::int64_t *shape, *strides;  // in numbers
    std::uint64_t byte_offset;
};

struct ManagedTensor {
    std::uint32_t major, minor;
    void *context;
    void (*deleter)(ManagedTensor *);
    std::uint64_t flags;
    DLTensor tensor;
};

struct ExchangeApi {
    std::uint32_t major, minor;
    void *previous;
    void *allocate;
    int (*lend)(void *tensor, ManagedTensor **out);
    int (*adopt)(ManagedTensor *tensor, void **out);
    int (*describe)(void *tensor, DLTensor *out);
    void *stream;
};

constexpr std::int32_t CPU = 1;
constexpr std::uint32_t MAJOR = 1;
constexpr std::size_t MOST_AXES = 32;  // of a field; torch has 64 in all
constexpr DType BYTE{UINT, 8, 1};
constexpr std::int64_t BLOCK = 64;  // envs, or steps, that are packed together, while they stay in a near cache
constexpr std::int64_t NARROW = 8;  // envs that are packed together with several steps of each

struct Named { const char *name; DType dtype; };
constexpr Named NAMED[] = {
    {"float32", {FLOAT, 32, 1}}, {"float64", {FLOAT, 64, 1}}, {"int64", {INT, 64, 1}}, {"int32", {INT, 32, 1}},
    {"bool", {BOOL, 8, 1}}, {"uint8", BYTE}, {"int8", {INT, 8, 1}}, {"int16", {INT, 16, 1}}, {"uint16", {UINT, 16, 1}},
    {"uint32", {UINT, 32, 1}}, {"uint64", {UINT, 64, 1}}, {"float16", {FLOAT, 16, 1}}, {"bfloat16", {BFLOAT, 16, 1}},
    {"complex64", {COMPLEX, 64, 1}}, {"complex128", {COMPLEX, 128, 1}},
};

// What is known of torch. Found once and never changed but for `exchange`; its references are never given back.
struct Torch {
    nb::handle tensor, dispatch_modes;
    nb::handle increment_version;  // autograd sees that tensors have changed
    nb::handle is_neg, is_conj, dtype;  // names of methods
    const ExchangeApi *api = nullptr;
    std::vector<std::pair<nb::handle, DType>> dtypes;
    mutable std::atomic<bool> exchange{false};

    DType of(nb::handle torch_dtype) const {
        for (auto &[known, dtype] : dtypes) if (known.is(torch_dtype)) return dtype;
        return {};
    }
    bool exchanges() const { return exchange.load(std::memory_order_relaxed); }
};

// A tensor that is to be made of memory: what torch is lent.
struct Loan {
    ManagedTensor managed;
    Memory *memory;
    std::int64_t *sizes() { return reinterpret_cast<std::int64_t *>(this + 1); }

    static Loan *make(Memory &memory, std::byte *data, DType dtype, std::size_t axes) {
        auto *loan = static_cast<Loan *>(std::malloc(sizeof(Loan) + 2 * axes * sizeof(std::int64_t)));
        if (!loan) throw std::bad_alloc();
        loan->memory = &memory;
        auto *sizes = loan->sizes();
        loan->managed = {MAJOR, 0, loan, give_back, 0,
                         {data, CPU, 0, static_cast<std::int32_t>(axes), dtype, sizes, sizes + axes, 0}};
        memory.keep();
        return loan;
    }
    static void give_back(ManagedTensor *managed) {
        auto *loan = static_cast<Loan *>(managed->context);
        auto *memory = loan->memory;
        std::free(loan);
        memory->drop();
    }
    // The tensor; torch gives the loan back when nothing refers to its storage.
    nb::object adopted(const ExchangeApi &api) {
        void *made = nullptr;
        if (api.adopt(&managed, &made)) {
            give_back(&managed);
            nb::raise_python_error();
        }
        return nb::steal(static_cast<PyObject *>(made));
    }
};

std::unique_ptr<Torch> found_torch() {
    nb::object module = nb::module_::import_("torch");
    auto torch = std::make_unique<Torch>();
    torch->tensor = module.attr("Tensor").inc_ref();
    torch->is_neg = nb::str("is_neg").release();
    torch->is_conj = nb::str("is_conj").release();
    torch->dtype = nb::str("dtype").release();
    for (auto &[name, dtype] : NAMED)
        if (nb::object found = nb::getattr(module, name, nb::none()); !found.is_none())
            torch->dtypes.emplace_back(found.release(), dtype);
    constexpr const char *NAME = "dlpack_exchange_api";
    nb::object table = nb::getattr(torch->tensor, "__dlpack_c_exchange_api__", nb::none());
    // without it, nothing would tell that tensors are being traced, and then none may be made behind torch's back
    nb::object modes = nb::getattr(module.attr("_C"), "_len_torch_dispatch_stack", nb::none());
    if (!modes.is_none() && PyCapsule_IsValid(table.ptr(), NAME)) {
        auto *api = static_cast<const ExchangeApi *>(PyCapsule_GetPointer(table.ptr(), NAME));
        if (api->major == MAJOR && api->adopt && api->describe) torch->api = api;
    }
    if (torch->api) {
        nb::object increment = nb::getattr(module.attr("_C"), "_increment_version", nb::none());
        if (increment.is_none()) increment = nb::module_::import_("torch.autograd.graph").attr("increment_version");
        torch->increment_version = increment.release();
    }
    torch->dispatch_modes = modes.release();
    torch->exchange = torch->api != nullptr;
    return torch;
}

// torch's facts. It is imported at the first use. Threads may find them at the same time, and one of them is first: a
// lock would be held while Python runs.
const Torch &torch_facts() {
    static std::atomic<const Torch *> known{nullptr};
    if (auto *torch = known.load(std::memory_order_acquire)) return *torch;
    auto torch = found_torch();
    const Torch *first = nullptr;
    if (known.compare_exchange_strong(first, torch.get(), std::memory_order_acq_rel)) return *torch.release();
    return *first;  // the other's references stay: they are of things that live as long as torch
}

// -- reading ----------------------------------------------------------------------------------------------------------

nb::object plain(const char *function) { return nb::module_::import_("relive.core.plain").attr(function); }

bool is_true(PyObject *thing, nb::handle method) {
    nb::object answer = nb::steal(PyObject_VectorcallMethod(method.ptr(), &thing, 1, nullptr));
    if (!answer.is_valid()) nb::raise_python_error();
    return answer.is(Py_True);
}

// True if a tensor's numbers are not what lies in memory. Only floats can be negated, and complex ones conjugated.
// Negation is not in DLPack, so `Tensor.is_neg` is asked as well, before anything else is read, because Python may run
// there.
bool is_lazy(const Torch &torch, PyObject *tensor, DType dtype) {
    if (dtype.code == INT || dtype.code == UINT || dtype.code == BOOL) return false;
    return is_true(tensor, torch.is_neg) || (dtype.code == COMPLEX && is_true(tensor, torch.is_conj));
}

}  // namespace

DType dtype_of(PyObject *torch_dtype) { return torch_facts().of(torch_dtype); }

bool Description::has_no_gaps() const {
    std::uint64_t step = dtype.bytes();  // one number may stand for more than any memory has
    bool whole = true;
    for (auto axis = ndim; axis-- > 0; step *= static_cast<std::uint64_t>(shape[axis]))
        whole &= shape[axis] == 1 || static_cast<std::uint64_t>(stride(axis)) == step;
    return whole || empty();
}

// Integers of 1 to 7 bits share their names in DLPack with int8 and uint8, so a tensor of these is asked for its dtype.
bool describe_tensor(PyObject *thing, Description &out) try {
    auto &torch = torch_facts();
    if (!torch.tensor.is(reinterpret_cast<PyObject *>(Py_TYPE(thing)))) return false;
    out.array = false;
    if (torch.exchanges()) {
        DLTensor found;
        if (torch.api->describe(thing, &found)) nb::raise_python_error();
        if (found.device_type != CPU || found.byte_offset != 0 || found.dtype.lanes != 1) return false;
        if (is_lazy(torch, thing, found.dtype)) return false;
        // integers of 1 to 7 bits have the same name
        if (found.dtype.bits == 8 && torch.of(nb::handle(thing).attr(torch.dtype)) != found.dtype) return false;
        out.data = static_cast<std::byte *>(found.data);
        out.dtype = found.dtype;
        out.ndim = found.ndim;
        out.shape = found.shape;
        out.strides_ = found.strides;
        out.writeable = true;
        out.dense_ = false;
        out.unit_ = static_cast<std::ptrdiff_t>(out.dtype.bytes());
    } else {
        auto dtype = torch.of(nb::handle(thing).attr(torch.dtype));
        if (!dtype.known()) return false;
        out.lent_ = plain("array_of")(nb::handle(thing));  // raises an error for what is lazy
        if (out.lent_.is_none()) return false;
        out.bind(reinterpret_cast<PyArrayObject *>(out.lent_.ptr()));
        out.dtype = dtype;  // NumPy may have the bits alone
    }
    auto aligned = std::clamp<std::size_t>(out.dtype.bytes(), 1, 8);
    return reinterpret_cast<std::uintptr_t>(out.data) % aligned == 0 && (out.data || out.empty());
} catch (nb::python_error &error) {
    if (!error.matches(PyExc_Exception)) throw;
    return false;
}

// -- making -----------------------------------------------------------------------------------------------------------

struct Field {
    nb::object name;
    DType dtype;
    std::vector<std::int64_t> shape;  // of one item
    std::size_t at, item, bytes;      // its first byte in a row, the bytes of a number, and how many it has
    bool apart;                       // it does not lie in the row
    std::size_t branch;               // in which batch it stands, if the names are paths
    nb::object leaf;                  // and by what name
};

namespace {

// An array, kept by tensors over it.
class HeldArray final : public BatchMemory {
  public:
    explicit HeldArray(PyObject *array) : array_(Py_NewRef(array)) {}
    // Over bytes that begin at a multiple of 64.
    HeldArray(PyObject *array, std::byte *first) : HeldArray(array) { rows_ = first; }

  private:
    void gone() override {
        if (Py_IsInitialized()) {  // else the array has gone with all of Python's memory
            nb::gil_scoped_acquire held;
            Py_DECREF(array_);
        }
        delete this;
    }
    PyObject *array_;
};

// An array of bytes over memory that it keeps; its strides may be null.
nb::object array_over(Memory &memory, std::byte *first, std::span<std::int64_t> sizes, std::int64_t *strides) {
    auto array = array_or_raise(PyArray_New(
        &PyArray_Type, static_cast<int>(sizes.size()), reinterpret_cast<npy_intp *>(sizes.data()), NPY_UINT8,
        reinterpret_cast<npy_intp *>(strides), first, 0, NPY_ARRAY_WRITEABLE | NPY_ARRAY_ALIGNED, nullptr));
    memory.keep();
    Kept<Memory> kept(&memory);
    nb::capsule owner(&memory, [](void *held) noexcept { static_cast<Memory *>(held)->drop(); });
    kept.release();
    set_base(array, owner);
    return array;
}

}  // namespace

Fields::Fields(nb::handle facts, std::size_t width_) : width(width_), given(nb::tuple(facts)) {
    std::vector<nb::object> known{nb::tuple()};  // the paths of branches
    for (nb::handle one : given) {
        nb::tuple fact(one);
        require(fact.size() == 4, "a field is (name, dtype, shape, first byte)");
        auto item = nb::cast<std::size_t>(fact[1].attr("itemsize"));
        bool lies_apart = nb::handle(fact[3]).is_none();
        Field field{fact[0], dtype_of(nb::handle(fact[1]).ptr()), nb::cast<std::vector<std::int64_t>>(fact[2]),
                    lies_apart ? 0 : nb::cast<std::size_t>(fact[3]), item, item, lies_apart, 0, {}};
        bool right = item > 0 && field.shape.size() <= MOST_AXES;
        for (auto size : field.shape)
            right &= size >= 0 && !__builtin_mul_overflow(field.bytes, static_cast<std::size_t>(size), &field.bytes);
        bool inside = field.at <= width && field.bytes <= width - field.at && field.at % item == 0;
        require(right && (inside || field.apart), "a field lies beyond its row, or across words");
        if (field.apart) apart.push_back(field.bytes);
        widest_ = std::max(widest_, static_cast<std::int64_t>(item));
        exchanged_ &= field.dtype.known();
        auto depth = PyTuple_CheckExact(field.name.ptr()) ? NB_TUPLE_GET_SIZE(field.name.ptr()) : 0;
        paths_ &= depth > 0;
        for (Py_ssize_t i = 0; i < depth; ++i) {
            auto name = nb::borrow(NB_TUPLE_GET_ITEM(field.name.ptr(), i));
            if (i + 1 == depth) {
                field.leaf = name;
                break;
            }
            auto path = nb::steal(PyTuple_GetSlice(field.name.ptr(), 0, i + 1));
            auto found = std::ranges::find_if(known, [&](auto &other) { return other.equal(path); });
            auto k = static_cast<std::size_t>(found - known.begin());
            if (found == known.end()) {
                known.push_back(path);
                branches_.push_back({field.branch, name});
            }
            field.branch = k;
        }
        fields_.push_back(std::move(field));
    }
}

Fields::~Fields() = default;

namespace {

// As a dict does it: a batch has a way of its own to take a path, which need not run here.
void set_item(nb::handle into, nb::handle name, nb::handle value) {
    if (PyDict_SetItem(into.ptr(), name.ptr(), value.ptr()) < 0) nb::raise_python_error();
}

void merge(nb::handle into, nb::handle tensors) {
    if (PyDict_Update(into.ptr(), tensors.ptr()) < 0) nb::raise_python_error();
}

constexpr std::size_t MOST_MADE = 64;  // several for each kind of batch

// The memory of an array that a function of Python has made.
Kept<BatchMemory> given_memory(nb::object array, std::size_t bytes) {
    Description found;
    require(PyArray_CheckExact(array.ptr()) && describe(array.ptr(), found) && found.dtype == BYTE && found.ndim == 1 &&
                found.shape[0] == static_cast<std::int64_t>(bytes) && found.contiguous() && found.writeable &&
                reinterpret_cast<std::uintptr_t>(found.data) % 64 == 0,
            "standing memory: expected an array uint8 [nbytes] without gaps, at a multiple of 64 bytes");
    return Kept<BatchMemory>(new HeldArray(array.ptr(), found.data));
}

}  // namespace

Kept<BatchMemory> Slot::fill(Pool &pool, nb::handle take, std::size_t bytes) {
    if (!block_ || bytes_ != bytes) {
        forget();
        if (take.is_none()) block_ = pool.take(bytes);
        else block_ = given_memory(take(bytes), bytes);
        bytes_ = bytes;
    } else if (tensors_.size()) {
        torch_facts().increment_version(tensors_);
    }
    block_->keep();
    return Kept<BatchMemory>(block_.get());
}

nb::object Slot::find(const Fields &fields, const PackedRows &rows, Use use) const {
    for (auto &made : made_)
        if (made.fields.is(fields.given) && made.use == use && made.first == rows.first &&
            std::ranges::equal(made.sizes, rows.sizes) && std::ranges::equal(made.strides, rows.strides))
            return made.tensors;
    return {};
}

void Slot::keep(const Fields &fields, const PackedRows &rows, Use use, nb::object tensors) {
    for (auto [name, tensor] : nb::borrow<nb::dict>(tensors))
        if (nb::cast<bool>(tensor.attr("is_inference")())) return forget();
    if (made_.size() == MOST_MADE) return forget();  // each batch is of other fields: a view is set again and again
    for (auto [name, tensor] : nb::borrow<nb::dict>(tensors)) tensors_.append(tensor);
    made_.push_back({fields.given, rows.first, {rows.sizes.begin(), rows.sizes.end()},
                     {rows.strides.begin(), rows.strides.end()}, use, std::move(tensors)});
}

Target::Target(nb::handle standing, Pool &pool, std::size_t bytes, std::size_t large) {
    if (!standing.is_none()) {
        Standing *found = nullptr;
        if (!nb::try_cast(standing, found) || !found) throw nb::type_error("expected standing memory, or None");
        kept = nb::borrow(standing);
        slot = &found->next();
        auto all = bytes;
        if (large && __builtin_add_overflow(Fields::to_next(bytes), large, &all)) throw std::bad_alloc();
        block = slot->fill(pool, found->take, all);
        apart = {block.get(), block->rows() + (large ? Fields::to_next(bytes) : 0)};
    } else {
        block = pool.take(bytes);
        if (large) large_ = pool.take(large);
        auto *memory = large ? large_.get() : block.get();
        apart = {memory, memory->rows()};
    }
}

std::size_t Fields::apart_bytes(std::int64_t count) const {
    std::size_t all = 0, size = 0;
    for (auto bytes : apart)
        if (__builtin_mul_overflow(static_cast<std::size_t>(count), bytes, &size) || size > SIZE_MAX - 63 ||
            __builtin_add_overflow(all, to_next(size), &all))
            throw std::bad_alloc();
    return all;
}

nb::dict Fields::made(Memory &memory, const PackedRows &rows, Use use, Slot *slot) const {
    if (nb::object standing = slot ? slot->find(*this, rows, use) : nb::object(); standing.is_valid())
        return nb::borrow<nb::dict>(standing);
    auto &torch = torch_facts();
    auto lead = rows.sizes.size();
    require(apart.empty() || rows.apart.memory, "rows of these fields have columns apart");
    auto *column = rows.apart.first;
    std::int64_t count = 1;
    for (auto size : rows.sizes) count *= size;
    nb::dict into;
    // no tensor is made behind the back of a mode that sees each operation, such as one that traces
    if (!exchanged_ || !torch.exchanges() || nb::cast<int>(torch.dispatch_modes()) != 0) {
        std::vector<std::int64_t> sizes(rows.sizes.begin(), rows.sizes.end());
        std::vector<std::int64_t> strides(rows.strides.begin(), rows.strides.end());
        sizes.push_back(static_cast<std::int64_t>(width));
        strides.push_back(1);
        nb::dict by_name;
        nb::list columns;
        for (auto bytes : apart) {
            std::array<std::int64_t, 2> shape{count, static_cast<std::int64_t>(bytes)};
            columns.append(array_over(*rows.apart.memory, column, shape, nullptr));
            column += to_next(static_cast<std::size_t>(count) * bytes);
        }
        plain("put_fields")(array_over(memory, rows.first, sizes, strides.data()), given, by_name, columns);
        if (slot) slot->forget();
        if (use == Use::Names) return by_name;
        for (auto &field : fields_) set_item(into, field.leaf, by_name[field.name]);
        return into;
    }
    for (auto &field : fields_) {
        auto axes = lead + field.shape.size();
        auto item = static_cast<std::int64_t>(field.dtype.bytes());
        auto *loan = field.apart ? Loan::make(*rows.apart.memory, column, field.dtype, axes)
                                 : Loan::make(memory, rows.first + field.at, field.dtype, axes);
        auto *sizes = loan->sizes(), *strides = sizes + axes;
        auto apart_by = static_cast<std::int64_t>(field.bytes);  // from one item of a column to the next
        for (auto axis = lead; axis-- > 0;) {
            sizes[axis] = rows.sizes[axis];
            strides[axis] = (field.apart ? apart_by : rows.strides[axis]) / item;
            apart_by *= std::max<std::int64_t>(sizes[axis], 1);
        }
        if (field.apart) column += to_next(static_cast<std::size_t>(count) * field.bytes);
        std::int64_t step = 1;
        for (auto axis = axes; axis-- > lead; step *= std::max<std::int64_t>(sizes[axis], 1)) {
            sizes[axis] = field.shape[axis - lead];
            strides[axis] = step;
        }
        set_item(into, use == Use::Names ? field.name : field.leaf, loan->adopted(*torch.api));
    }
    if (slot) slot->keep(*this, rows, use, into);
    return into;
}

void Fields::put(Memory &memory, const PackedRows &rows, nb::dict into, Slot *slot) const {
    merge(into, made(memory, rows, Use::Names, slot));
}

nb::object Fields::batch(Memory &memory, const PackedRows &rows, nb::handle kind, Slot *slot) const {
    require(paths_, "a batch: expected fields that are named by paths");
    bool flat = branches_.empty();
    auto tensors = made(memory, rows, flat ? Use::Leaves : Use::Names, slot);
    std::vector<nb::object> batches;
    auto open = [&] {
        batches.push_back(kind());
        if (!PyDict_Check(batches.back().ptr())) throw nb::type_error("a batch: expected a kind of dict");
    };
    open();
    if (flat) {
        merge(batches[0], tensors);
        return batches[0];
    }
    for (auto &field : fields_) {
        while (batches.size() <= field.branch) {  // the names above stand where their first leaf would
            auto &branch = branches_[batches.size() - 1];
            open();
            set_item(batches[branch.in], branch.name, batches.back());
        }
        set_item(batches[field.branch], field.leaf, tensors[field.name]);
    }
    return batches[0];
}

nb::dict Fields::tensors(nb::handle rows) const {
    Description found;
    auto right = PyArray_CheckExact(rows.ptr()) && describe(rows.ptr(), found) && found.dtype == BYTE && found.ndim > 0;
    auto lead = right ? static_cast<std::size_t>(found.ndim - 1) : 0;
    right = right && static_cast<std::size_t>(found.shape[lead]) == width;
    bool none = !right || found.empty();  // then strides say nothing, as that of an axis of one item
    right = right && (none || width == 1 || found.stride(found.ndim - 1) == 1);
    std::vector<std::int64_t> strides(lead);
    auto step = static_cast<std::int64_t>(width);
    for (auto axis = lead; axis-- > 0; step *= std::max<std::int64_t>(found.shape[axis], 1)) {
        strides[axis] = found.shape[axis] > 1 && !none ? found.stride(static_cast<std::int32_t>(axis)) : step;
        right = right && strides[axis] >= 0 && strides[axis] % widest_ == 0;
    }
    require(right, "rows: expected uint8 [..., W] without gaps");
    Kept<Memory> memory(new HeldArray(rows.ptr()));
    nb::dict into;
    put(*memory, PackedRows{found.data, {found.shape, lead}, strides}, into);
    return into;
}

std::vector<Description> Fields::described(nb::tuple columns, std::int64_t rows, const char *expected) const {
    require(columns.size() == fields_.size(), "columns: expected one for each field");
    std::vector<Description> found(fields_.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
        auto right = describe(columns[i].ptr(), found[i]) && found[i].ndim > 0;
        std::vector<std::int64_t> wanted{rows < 0 && right ? rows = found[i].shape[0] : rows};
        wanted.insert(wanted.end(), fields_[i].shape.begin(), fields_[i].shape.end());
        require(right && found[i].dtype.bytes() == fields_[i].item && found[i].has_shape(wanted) &&
                    found[i].contiguous(),
                expected);
    }
    return found;
}

void Fields::pack(nb::handle columns, Matrix<std::uint8_t> rows, std::int64_t steps) const {
    require_packed();
    require(steps > 0 && rows.rows % steps == 0 && static_cast<std::size_t>(rows.columns) == width,
            "rows: expected [N * T, width]");
    nb::tuple kept(columns);
    auto found = described(kept, rows.rows, "columns: expected [N * T, *shape] without gaps in RAM for each field");
    auto envs = rows.rows / steps, wide = steps == 1 ? BLOCK : NARROW;
    LongWork hold(rows.rows * rows.columns > LONG_WORK);
    for (std::int64_t first = 0; first < steps; first += BLOCK)
        for (std::int64_t low = 0; low < envs; low += wide)
            for (std::size_t i = 0; i < found.size(); ++i) {
                auto size = static_cast<std::int64_t>(fields_[i].bytes);
                for (auto t = first; size && t < std::min(first + BLOCK, steps); ++t)
                    spread(rows.first + (low * steps + t) * rows.stride + fields_[i].at, steps * rows.stride,
                           found[i].data + (t * envs + low) * size, std::min(low + wide, envs) - low, size);
            }
}

namespace {

// Rows of `size` bytes, at places in range, to places `pitch` bytes apart.
void pick(std::byte *target, std::size_t pitch, const std::byte *source, std::span<const std::int64_t> places,
          std::size_t size) {
    with_size(size, [=](auto bytes) {
        auto *to = target;
        for (auto place : places) {
            copy_bytes(to, source + static_cast<std::size_t>(place) * bytes, bytes);
            to += pitch;
        }
    });
}

}  // namespace

std::int64_t Fields::gather(nb::handle columns, Vector<const std::int64_t> index, std::byte *out) const {
    require_packed();
    nb::tuple kept(columns);
    auto found = described(kept, -1, "columns: expected [R, *shape] without gaps in RAM for each field");
    auto rows = found.empty() ? 0 : found[0].shape[0], count = index.size();
    LongWork hold(count * static_cast<std::int64_t>(width) > LONG_WORK);
    std::array<std::int64_t, BLOCK> memory;
    for (std::int64_t first = 0; first < count; first += BLOCK) {
        auto size = std::min(BLOCK, count - first);
        for (std::int64_t i = 0; i < size; ++i) {  // copied: another thread may write another number after the check
            memory[static_cast<std::size_t>(i)] = index[first + i];
            if (memory[static_cast<std::size_t>(i)] < 0 || memory[static_cast<std::size_t>(i)] >= rows) return first + i;
        }
        std::span<const std::int64_t> places{memory.data(), static_cast<std::size_t>(size)};
        auto *target = out + static_cast<std::size_t>(first) * width;
        for (std::size_t k = 0; k < found.size(); ++k) {
            auto bytes = fields_[k].bytes;
            if (bytes > LINE)  // long rows: each is on its way while those before it are copied
                for (auto place : places) fetch(found[k].data + static_cast<std::size_t>(place) * bytes, bytes);
            if (bytes) pick(target + fields_[k].at, width, found[k].data, places, bytes);
        }
    }
    return -1;
}

// -- the module -------------------------------------------------------------------------------------------------------

namespace {

std::int64_t take_rows(Bytes source, Places index, Rows out) {
    require(out.rows == index.size() && out.columns == source.columns, "out: expected a row for each place of index");
    LongWork hold(out.rows * out.columns > LONG_WORK);
    for (std::int64_t i = 0; i < index.size(); ++i)
        if (index[i] < 0) return i;  // that would give zeros
    return gather_rows(source, index, out, 0, out.columns);
}

nb::object nested(nb::handle given, nb::handle kind, nb::object into, nb::tuple last) {
    nb::dict leaves;
    if (!nb::try_cast(given, leaves)) throw nb::type_error("nested: expected a dict of paths");
    auto made = [&] {
        nb::object batch = kind();
        if (!PyDict_Check(batch.ptr())) throw nb::type_error("nested: expected a kind of dict");
        return batch;
    };
    auto is_last = [&](PyObject *name) {
        auto found = PySequence_Contains(last.ptr(), name);
        if (found < 0) nb::raise_python_error();
        return found > 0;
    };
    auto batch = into.is_none() ? made() : std::move(into);
    if (!PyDict_Check(batch.ptr())) throw nb::type_error("nested: expected a dict to fill");
    for (auto [path, leaf] : leaves) {
        auto last_at = PyTuple_CheckExact(path.ptr()) ? NB_TUPLE_GET_SIZE(path.ptr()) - 1 : -1;
        require(last_at >= 0, "nested: expected paths");
        if (last.size() && last_at == 0 && is_last(NB_TUPLE_GET_ITEM(path.ptr(), 0))) continue;
        nb::handle branch = batch;
        for (Py_ssize_t i = 0; i < last_at; ++i) {
            auto *name = NB_TUPLE_GET_ITEM(path.ptr(), i);
            auto *found = PyDict_GetItemWithError(branch.ptr(), name);
            if (!found && PyErr_Occurred()) nb::raise_python_error();
            if (!found) {
                auto inner = made();
                set_item(branch, name, inner);
                found = inner.ptr();  // the branch keeps it
            }
            require(PyDict_Check(found), "nested: a field is both a tensor and a branch");
            branch = found;
        }
        set_item(branch, NB_TUPLE_GET_ITEM(path.ptr(), last_at), leaf);
    }
    for (nb::handle name : last) set_item(batch, name, leaves[nb::make_tuple(name)]);
    return batch;
}

// Empty a batch, and those nested in it, and make it one of the kind that refuses use. Its tensors may live on.
void give_back(nb::handle refusing, nb::handle batch) {
    if (!PyDict_Check(refusing.ptr())) throw nb::type_error("give_back: expected a dict of kinds");
    auto kind = nb::borrow(PyDict_GetItemWithError(refusing.ptr(), reinterpret_cast<PyObject *>(Py_TYPE(batch.ptr()))));
    if (!kind.is_valid()) {
        if (PyErr_Occurred()) nb::raise_python_error();
        return;
    }
    nb::list nested;  // taken from the batch first: what runs as its values go could change it
    PyObject *name, *value;
    for (Py_ssize_t at = 0; PyDict_Next(batch.ptr(), &at, &name, &value);)
        if (PyDict_Check(value)) nested.append(nb::handle(value));
    nb::setattr(batch, "__class__", kind);
    PyDict_Clear(batch.ptr());
    for (nb::handle inner : nested) give_back(refusing, inner);
}

// Put tensors over the rows of a block, as the fields of each part, into its dict.
void put_parts(const Target &block, std::int64_t count, std::size_t width, nb::tuple parts, nb::tuple dicts) {
    require(parts.size() == dicts.size(), "parts of rows: expected a dict for each");
    for (std::size_t i = 0; i < parts.size(); ++i) {
        auto &part = nb::cast<const Fields &>(parts[i]);
        require(part.width == width, "parts of rows: they are of another width");
        part.put(*block, block->rows(), count, nb::cast<nb::dict>(dicts[i]), block.slot);
    }
}

std::int64_t take_fields(Bytes source, Places index, nb::tuple parts, nb::tuple dicts, Pool &pool,
                         nb::handle standing) {
    std::size_t bytes;
    require(!__builtin_mul_overflow(index.size(), source.columns, &bytes), "take_fields: too many rows");
    Target block(standing, pool, bytes);
    auto bad = take_rows(source, index, {block->rows(), source.columns, index.size(), source.columns});
    if (bad < 0) put_parts(block, index.size(), static_cast<std::size_t>(source.columns), parts, dicts);
    return bad;
}

std::int64_t take_columns(nb::handle columns, const Fields &fields, Places index, nb::tuple parts, nb::tuple dicts,
                          Pool &pool, nb::handle standing) {
    std::size_t bytes;
    require(!__builtin_mul_overflow(index.size(), fields.width, &bytes), "take_columns: too many rows");
    Target block(standing, pool, bytes);
    auto bad = fields.gather(columns, index, block->rows());
    if (bad < 0) put_parts(block, index.size(), fields.width, parts, dicts);
    return bad;
}

}  // namespace

void bind_tensors(nb::module_ &module) {
    using namespace nb::literals;
    nb::class_<Pool>(module, "Pool", "Keeps memory of batches that nothing refers to any more, for later ones.")
        .def(nb::init<>())
        .def("take", [](Pool &self, std::size_t nbytes) {
            auto block = self.take(nbytes);
            auto count = static_cast<std::int64_t>(nbytes);
            return array_over(*block, block->rows(), {&count, 1}, nullptr);
        }, "nbytes"_a, "Uninitialised memory, uint8 ``[nbytes]``.")
        .def_prop_ro("kept", &Pool::kept, "How many bytes each block has that is kept for a later batch.")
        .def("__reduce__", [](nb::handle self) { return nb::make_tuple(self.type(), nb::make_tuple()); });
    nb::class_<Standing>(module, "Standing", "Memory of batches that is filled in turn, with tensors that are made once.")
        .def("__init__", [](Standing *self, std::int64_t slots, nb::object take) {
            require(0 < slots && slots <= 1024, "standing memory: expected 1 to 1024 slots");
            new (self) Standing(static_cast<std::size_t>(slots), std::move(take));
        }, "slots"_a, "take"_a = nb::none(),
             "``take(nbytes)`` gives the memory of a slot, uint8 ``[nbytes]``; by default the pool of the batches does.")
        .def_prop_ro("lent", [](const Standing &self) { return !self.take.is_none(); }, "Whether ``take`` was given.");
    nb::class_<Fields>(module, "Fields",
                       "The fields of packed rows: tuples (name, dtype, shape, first byte). Without a first byte, a\n"
                       "field lies apart, as a column of its own.")
        .def(nb::init<nb::handle, std::size_t>(), "fields"_a, "width"_a)
        .def("__reduce__", [](nb::handle self) {
            auto &fields = nb::cast<const Fields &>(self);
            return nb::make_tuple(self.type(), nb::make_tuple(fields.given, fields.width));
        })
        .def("tensors", nb::overload_cast<nb::handle>(&Fields::tensors, nb::const_), "rows"_a,
             "Name -> tensor ``[..., *shape]`` over an array of rows, uint8 ``[..., width]``.")
        .def("pack", &Fields::pack, "columns"_a, "rows"_a, "steps"_a = 1,
             "Pack a column ``[T * N, *shape]`` for each field env by env into ``rows``, uint8 ``[N * T, width]``.");
    module.def("take_rows", &take_rows, "source"_a, "index"_a, "out"_a,
               "Copy rows of ``source``, uint8 ``[R, W]``; -1, or the first entry of ``index`` that is none.");
    module.def("take_fields", &take_fields, "source"_a, "index"_a, "parts"_a, "dicts"_a, "pool"_a,
               "standing"_a = nb::none(),
               "``take_rows`` into memory of the pool, with tensors over the fields of each part in its dict.");
    module.def("take_columns", &take_columns, "columns"_a, "fields"_a, "index"_a, "parts"_a, "dicts"_a, "pool"_a,
               "standing"_a = nb::none(),
               "As ``take_fields``, of a column ``[R, *shape]`` for each field, whose rows are packed on the way.");
    module.def("nested", &nested, "leaves"_a, "kind"_a, "into"_a = nb::none(), "last"_a = nb::tuple(),
               "The values by path as dicts of this kind, nested, in the order of their first leaves; those of the\n"
               "names in ``last``, which are there, after all others. The outermost is ``into``, unless that is None.");
    module.def("give_back", &give_back, "refusing"_a, "batch"_a.none(),
               "Empty a batch and those nested in it, and give each the kind that stands by its own in ``refusing``.");
    // only tests know this module: how a thing is read, and what older versions of torch do, tried with a newer one
    auto tests = module.def_submodule("_tests");
    tests.def("use_exchange", [](bool wanted) {
        auto &torch = torch_facts();
        return torch.exchange.exchange(wanted && torch.api);
    }, "wanted"_a, "Use torch's exchange from now on, if it has one, or do not; returns what was before.");
    tests.def("described", [](nb::handle thing) -> nb::object {
        Description found;
        if (!describe(thing.ptr(), found)) return nb::none();
        nb::list shape, strides;
        for (std::int32_t axis = 0; axis < found.ndim; ++axis) {
            shape.append(found.shape[axis]);
            strides.append(found.stride(axis));
        }
        return nb::make_tuple(reinterpret_cast<std::uintptr_t>(found.data), int(found.dtype.code),
                              int(found.dtype.bits), nb::tuple(shape), nb::tuple(strides));
    }, "thing"_a.none(), "Address, dtype's code and bits, shape and strides in bytes, or None if it cannot be read.");
}

}  // namespace relive
