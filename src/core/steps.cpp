#include "steps.hpp"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cstring>
#include <limits>
#include <string>

#include <nanobind/stl/string.h>

#include "adding.hpp"
#include "bindings.hpp"
#include "copies.hpp"
#include "gil.hpp"

namespace relive {

namespace {

// Bytes of all targets from which long rows are written past the caches. The oldest are not in a cache by the time that
// they are read, and new ones would drive out all else. Below that, a copy by way of the caches is twice as fast.
constexpr std::int64_t CACHES = 3 * (std::int64_t{1} << 24);
// Bytes of a long row.
constexpr std::size_t LONG_ROW = std::size_t{1} << 17;

// NumPy's letter of a dtype; 0 if NumPy lacks it.
char kind_of(DType dtype) {
    switch (dtype.code) {
    case INT: return 'i';
    case UINT: return 'u';
    case FLOAT: return 'f';
    case COMPLEX: return 'c';
    case BOOL: return 'b';
    default: return 0;
    }
}

// Store float64 numbers as float32.
void narrow(std::byte *target, const std::byte *source, std::size_t count) {
    auto *numbers = reinterpret_cast<const double *>(source);
    auto *stored = reinterpret_cast<float *>(target);
    for (std::size_t k = 0; k < count; ++k) stored[k] = static_cast<float>(numbers[k]);
}

// True if each of these numbers, stored as float32, is infinite only if it was. Sizes of float64 come in the order of
// their bits, NaN after infinity: none may lie between the largest float32 and infinity.
bool can_be_narrowed(const std::byte *source, std::size_t count) {
    constexpr auto most = std::bit_cast<std::uint64_t>(static_cast<double>(FLT_MAX));
    constexpr auto infinite = std::bit_cast<std::uint64_t>(std::numeric_limits<double>::infinity());
    std::uint64_t lost = 0;  // its sign, once both differences were negative
    for (std::size_t k = 0; k < count; ++k) {  // to the end, since a loop without a way out is compiled to vector code
        auto size = get<std::uint64_t>(source + k * sizeof(double)) & ~(std::uint64_t{1} << 63);
        lost |= (most - size) & (size - infinite);
    }
    return !(lost >> 63);
}

bool has_shape(PyArrayObject *array, const std::vector<std::int64_t> &shape) {
    if (static_cast<std::size_t>(PyArray_NDIM(array)) != shape.size()) return false;
    for (std::size_t axis = 0; axis < shape.size(); ++axis)
        if (PyArray_DIMS(array)[axis] != shape[axis]) return false;
    return true;
}

// Where a field is stored: an array `[R, N, *shape]` whose items have no gaps.
void note_target(StepField &field, PyArrayObject *target) {
    bool right = PyArray_NDIM(target) == static_cast<int>(field.shape.size()) + 1 && PyArray_ISWRITEABLE(target) &&
                 static_cast<std::size_t>(PyArray_ITEMSIZE(target)) == field.item;
    auto step = static_cast<std::ptrdiff_t>(field.item);
    for (auto axis = field.shape.size(); right && axis-- > 0;) {
        right = PyArray_DIMS(target)[axis + 1] == field.shape[axis];
        if (axis == 0 || !right) break;
        right = field.bytes == 0 || field.shape[axis] == 1 || PyArray_STRIDES(target)[axis + 1] == step;
        step *= field.shape[axis];
    }
    if (!right) throw nb::value_error("a step's fields: a target is not [R, N, *shape] of its field's dtype");
    auto count = field.shape[0];
    field.target = reinterpret_cast<std::byte *>(PyArray_BYTES(target)), field.rows = PyArray_DIMS(target)[0];
    field.stride = PyArray_STRIDES(target)[0], field.pitch = PyArray_STRIDES(target)[1];
    field.runs = count, field.size = count ? field.bytes / static_cast<std::size_t>(count) : 0;
    // the items of a row follow one another, so that a row is a single copy
    if (count == 1 || field.pitch == static_cast<std::ptrdiff_t>(field.size)) field.runs = 1, field.size = field.bytes;
    if (field.bytes == 0) field.runs = 0;
}

// A member of a dict, which other threads may change; invalid if there is none.
nb::object member_of(PyObject *dict, const nb::object &name) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *found = nullptr;
    PyDict_GetItemRef(dict, name.ptr(), &found);
    return nb::steal(found);
#else
    return nb::borrow(PyDict_GetItemWithError(dict, name.ptr()));
#endif
}

}  // namespace

StepFields::StepFields(nb::handle paths, nb::handle dtypes, nb::handle shapes, std::int64_t count, nb::handle targets)
    : count_(count), kept_(nb::tuple(targets)) {
    auto number = nb::len(paths);
    if (nb::len(dtypes) != number || nb::len(shapes) != number || nb::len(targets) != number || count < 0)
        throw nb::value_error("a step's fields: as many dtypes, shapes and targets as paths");
    std::int64_t stored = 0;
    for (std::size_t i = 0; i < number; ++i) {
        grow(root_, nb::tuple(paths[i]), 0, i);
        StepField field;
        field.torch_dtype = dtypes[i];
        field.dtype = dtype_of(field.torch_dtype.ptr()), field.kind = kind_of(field.dtype);
        field.shape.push_back(count);
        std::int64_t numbers = count;
        for (nb::handle size : shapes[i]) {
            field.shape.push_back(nb::cast<std::int64_t>(size));
            if (field.shape.back() < 0) throw nb::value_error("a step's fields: a size is negative");
            numbers *= field.shape.back();
        }
        field.item = nb::cast<std::size_t>(field.torch_dtype.attr("itemsize"));
        field.bytes = static_cast<std::size_t>(numbers) * field.item;
        bytes_ += static_cast<std::int64_t>(field.bytes);
        if (nb::object target = targets[i]; !target.is_none()) {
            if (!PyArray_Check(target.ptr())) throw nb::type_error("a step's fields: a target is an array or None");
            auto *array = reinterpret_cast<PyArrayObject *>(target.ptr());
            note_target(field, array);
            stored += PyArray_NBYTES(array);
            rows_ = rows_ < 0 ? field.rows : std::min(rows_, field.rows);
        }
        fields_.push_back(std::move(field));
    }
    for (auto &field : fields_) field.past = field.runs == 1 && field.size >= LONG_ROW && stored >= CACHES;
}

void StepFields::grow(Node &node, const nb::tuple &path, std::size_t depth, std::size_t leaf) {
    if (depth == path.size()) {
        if (depth == 0 || node.is_leaf || !node.members.empty())
            throw nb::value_error("a step's fields: a path names several fields, or none");
        node.leaf = leaf, node.is_leaf = true;
        return;
    }
    if (node.is_leaf) throw nb::value_error("a step's fields: a path goes on behind that of another field");
    auto text = nb::cast<std::string>(path[depth]);
    auto named = [&](const Node &member) { return nb::cast<std::string>(member.name) == text; };
    auto member = std::find_if(node.members.begin(), node.members.end(), named);
    if (member == node.members.end()) {
        node.numbered = (node.numbered || node.members.empty()) && text == std::to_string(node.members.size());
        node.members.emplace_back().name = nb::steal(PyUnicode_InternFromString(text.c_str()));
        member = node.members.end() - 1;
    }
    grow(*member, path, depth + 1, leaf);
}

bool StepFields::pick(PyObject *given, const Node &node, Step &step) {
    auto &members = node.members;
    auto count = static_cast<Py_ssize_t>(members.size());
    bool is_dict = PyDict_CheckExact(given);
    bool is_tuple = !is_dict && node.numbered && PyTuple_CheckExact(given);
    if (is_dict ? NB_DICT_GET_SIZE(given) != count : !is_tuple || NB_TUPLE_GET_SIZE(given) != count) return false;
    for (Py_ssize_t k = 0; k < count; ++k) {
        auto &member = members[static_cast<std::size_t>(k)];
        nb::object item = is_dict ? member_of(given, member.name) : nb::borrow(NB_TUPLE_GET_ITEM(given, k));
        if (!item.is_valid()) return PyErr_Clear(), false;
        if (member.is_leaf) step.set(member.leaf, item.release().ptr());
        else if (!pick(item.ptr(), member, step)) return false;
    }
    return true;
}

bool StepFields::accept(Source &source, const StepField &field) {
    if (PyArray_CheckExact(source.item)) {
        auto *array = reinterpret_cast<PyArrayObject *>(source.item);
        if (!PyArray_ISCARRAY_RO(array) || !has_shape(array, field.shape)) return false;
        source.data = reinterpret_cast<const std::byte *>(PyArray_BYTES(array));
        auto kind = PyArray_DESCR(array)->kind;
        auto itemsize = static_cast<std::size_t>(PyArray_ITEMSIZE(array));
        if (kind == field.kind && itemsize == field.item) return true;
        source.narrowed = kind == 'f' && itemsize == sizeof(double) && field.kind == 'f' &&
                          field.item == sizeof(float) && field.target;
        return source.narrowed && can_be_narrowed(source.data, field.bytes / sizeof(float));
    }
    if (!field.dtype.known() || field.dtype.code == COMPLEX) return false;
    Description found;
    if (!describe(source.item, found)) return false;
    source.data = found.data;
    return found.dtype == field.dtype && found.has_shape(field.shape) && found.contiguous();
}

std::int64_t StepFields::accept(nb::handle given, Step &step) const {
    if (PyTuple_CheckExact(given.ptr())) {
        if (NB_TUPLE_GET_SIZE(given.ptr()) != static_cast<Py_ssize_t>(size())) return 0;
        for (std::size_t i = 0; i < size(); ++i) step.set(i, Py_NewRef(NB_TUPLE_GET_ITEM(given.ptr(), i)));
    } else if (!pick(given.ptr(), root_, step)) {
        return 0;
    }
    for (std::size_t i = 0; i < size(); ++i)
        if (!accept(step[i], fields_[i])) return static_cast<std::int64_t>(i);
    return -1;
}

void StepFields::copy(const Step &step, std::int64_t row, std::size_t i) const {
    auto &field = fields_[i];
    auto *target = field.target + row * field.stride;
    auto *source = step[i].data;
    if (field.runs == 0) return;
    if (step[i].narrowed) {
        auto width = field.size / sizeof(float);
        for (std::int64_t run = 0; run < field.runs; ++run)
            narrow(target + run * field.pitch, source + run * width * sizeof(double), width);
    } else if (field.runs > 1) spread(target, field.pitch, source, field.runs, field.size);
    else if (field.past) copy_past(target, source, field.size);
    else std::memcpy(target, source, field.size);
}

void StepFields::copy(const Step &step, std::int64_t row) const {
    for (std::size_t i = 0; i < size(); ++i) copy(step, row, i);
}

namespace {

// Where the rows of a field of a step are stored.
struct Destination {
    std::byte *block;        // of a large field; null if it is part of the ring's packed rows
    std::int64_t width;      // bytes from a row of the block to the next
    std::ptrdiff_t at;       // the field's byte in a row
    std::size_t size;        // bytes of a row of the field
    bool is_final;           // it belongs to the final observation, which is stored only where an episode ended
    bool read;               // it has rewards or flags, which are staged as well
};

// Rows that are copied together, field after field, while they stay in a near cache.
constexpr std::int64_t TOGETHER = 64;

template <std::size_t SIZE>
void scatter_items(const std::byte *source, const std::int64_t *places, std::int64_t count, std::byte *target,
                   std::int64_t width) {
    for (std::int64_t i = 0; i < count; ++i)
        if (places[i] >= 0) __builtin_memcpy(target + places[i] * width, source + i * SIZE, SIZE);
}

// Items of a field to rows at `places`; a negative place to none.
void scatter_items(const std::byte *source, std::size_t size, bool narrowed, const std::int64_t *places,
                   std::int64_t count, std::byte *target, std::int64_t width) {
    if (narrowed) {
        for (std::int64_t i = 0; i < count; ++i)
            if (places[i] >= 0) narrow(target + places[i] * width, source + 2 * i * size, size / sizeof(float));
        return;
    }
    switch (size) {
    case 1: return scatter_items<1>(source, places, count, target, width);
    case 4: return scatter_items<4>(source, places, count, target, width);
    case 8: return scatter_items<8>(source, places, count, target, width);
    }
    for (std::int64_t i = 0; i < count; ++i)
        if (places[i] >= 0) copy_bytes(target + places[i] * width, source + i * size, size);
}

// Checks a step and adds its rows. Each field is copied to where it is stored; the fields' targets are the staged rows,
// of which rewards and flags alone are written and read.
class StepAdder {
  public:
    StepAdder(nb::object ring, nb::object staged, nb::object fields, nb::handle large, int mode)
        : ring_(nb::cast<Ring &>(ring)), staged_(nb::cast<StagedRows &>(staged)),
          fields_(nb::cast<const StepFields &>(fields)), mode_(mode),
          kept_(nb::make_tuple(ring, staged, fields, large)) {
        if (mode < NO_FINALS || mode > LINKED) throw nb::value_error("there is no such way of adding rows");
        auto count = staged_.size();
        if (fields_.count() != count || staged_.width != ring_.width)
            throw nb::value_error("a step's fields: these are not staged rows of this ring");
        for (auto &field : fields_.fields()) {
            auto size = count ? field.bytes / static_cast<std::size_t>(count) : 0;
            destinations_.push_back({nullptr, 0, 0, size, false, false});
            if (field.target) note_packed(field, destinations_.back());
        }
        for (nb::handle item : large) {
            auto block = nb::cast<Matrix<std::uint8_t>>(item[1]);
            auto i = nb::cast<std::size_t>(item[0]);
            bool fits = i < destinations_.size() && !fields_.fields()[i].target && block.rows == ring_.places() &&
                        (count == 0 || static_cast<std::size_t>(block.columns) == destinations_[i].size);
            if (!fits) throw nb::value_error("a step's fields: a block does not fit its field");
            auto &one = destinations_[i];
            one.block = reinterpret_cast<std::byte *>(block.first), one.width = block.stride;
            one.is_final = nb::cast<bool>(item[2]);
        }
        for (std::size_t i = 0; i < destinations_.size(); ++i)
            if (!fields_.fields()[i].target && !destinations_[i].block && destinations_[i].size)
                throw nb::value_error("a step's fields: a field is stored nowhere");
    }

    std::int64_t add(nb::handle given) {
        Step step(fields_.size());
        prepare(ring_, staged_);
        if (fields_.accept(given, step) >= 0 || reads_ring(step)) return UNFIT;
        // from here on nothing throws; `step` holds what is copied
        LongWork hold(fields_.bytes() > LONG_WORK);
        for (std::size_t i = 0; i < fields_.size(); ++i)
            if (destinations_[i].read) fields_.copy(step, 0, i);
        auto events = append_rows(ring_, staged_, mode_);
        if (events >= 0) store(step);
        return events;
    }

  private:
    // The field's byte in a row, by that in a staged row.
    void note_packed(const StepField &field, Destination &found) {
        auto count = staged_.size();
        auto inside = [&](const std::byte *rows) {
            return field.target >= rows && field.target + found.size <= rows + (count ? staged_.width : 0);
        };
        found.is_final = !inside(staged_.staged);
        auto *rows = found.is_final ? staged_.final : staged_.staged;
        if (!inside(rows) || (count > 1 && field.runs && field.pitch != staged_.width))
            throw nb::value_error("a step's fields: a target is not in the staged rows");
        found.at = field.target - rows;
        auto has = [&](const std::byte *column) {
            return field.target <= column && column < field.target + found.size;
        };
        found.read = has(staged_.reward.first) || has(staged_.terminated.first) || has(staged_.truncated.first);
        auto end = static_cast<std::size_t>(found.at) + found.size;
        if (end > (found.is_final ? ring_.obs_bytes : ring_.step_bytes))
            throw nb::value_error("a step's fields: a field is no part of a row");
    }

    // True if a field lies in the ring's own rows, such as a view of a row: it may be overwritten before it is read.
    bool reads_ring(const Step &step) const {
        auto *end = ring_.memory + ring_.places() * ring_.width;
        bool inside = false;
        for (std::size_t i = 0; i < destinations_.size(); ++i)
            inside |= step[i].data >= ring_.memory && step[i].data < end;
        return inside;
    }

    void store(const Step &step) const {
        for (std::int64_t low = 0; low < staged_.size(); low += TOGETHER) {
            auto count = std::min(TOGETHER, staged_.size() - low);
            for (std::size_t i = 0; i < destinations_.size(); ++i) {
                auto &one = destinations_[i];
                if (one.is_final && mode_ != FINALS) continue;
                auto *places = (one.is_final ? staged_.finals : staged_.places).data + low;
                auto *target = one.block ? one.block : ring_.memory + one.at;
                auto given = step[i].narrowed ? 2 * one.size : one.size;  // bytes of an item as it was given
                auto *source = step[i].data + low * static_cast<std::int64_t>(given);
                scatter_items(source, one.size, step[i].narrowed, places, count, target,
                              one.block ? one.width : ring_.width);
            }
        }
    }

    Ring &ring_;
    StagedRows &staged_;
    const StepFields &fields_;
    int mode_;
    std::vector<Destination> destinations_;
    nb::object kept_;
};

}  // namespace

void bind_steps(nb::module_ &module) {
    nb::class_<StepFields>(module, "StepFields",
                           "The fields of a step by path, and where they are stored: arrays `[R, N, *shape]` whose\n"
                           "items have no gaps, or None for a field that is only checked.")
        .def("__init__", [](StepFields *self, nb::handle paths, nb::handle dtypes, nb::handle shapes,
                            std::int64_t count, nb::handle targets) {
            new (self) StepFields(paths, dtypes, shapes, count, targets);
        }, nb::arg("paths"), nb::arg("dtypes"), nb::arg("shapes"), nb::arg("count"), nb::arg("targets"))
        .def("refused", [](const StepFields &self, nb::handle given) {
            Step step(self.size());
            return self.accept(given, step);
        }, nb::arg("step").none(),
             "The first field that cannot be copied as it is, or -1. `step` is a dict of the fields as the paths nest\n"
             "them, or a tuple of the leaves; fields that are missing, or one too many, make it 0.")
        .def("take", [](const StepFields &self, std::int64_t row, nb::handle given) {
            bool there = self.rows() < 0 || row < self.rows();  // without targets, no row is written
            if (row < 0 || !there) throw nb::index_error("a step's fields: there is no such row");
            Step step(self.size());
            if (self.accept(given, step) >= 0) return false;
            LongWork hold(self.bytes() > LONG_WORK);
            self.copy(step, row);
            return true;
        }, nb::arg("row"), nb::arg("step").none(),
             "Copy a step to a row, if each field can be copied as it is; else the row is as it was.");
    nb::class_<StepAdder>(module, "StepAdder", "Checks whole steps, stages them and adds their rows.")
        .def(nb::init<nb::object, nb::object, nb::object, nb::handle, int>(), nb::arg("ring"), nb::arg("staged"),
             nb::arg("fields"), nb::arg("large"), nb::arg("mode"))
        .def("add", &StepAdder::add, nb::arg("step").none(),
             "Add a step, a dict or a tuple of leaves. Returns what `add_rows` returns, or UNFIT if the step cannot\n"
             "be copied as it is. If that is negative, nothing that is stored has changed.");
}

}  // namespace relive
