// Finds the fields of a step in the objects that a user passes, and copies them to where they are stored.
#include "steps.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include <nanobind/stl/string.h>

#include "adding.hpp"
#include "bindings.hpp"
#include "copies.hpp"
#include "gil.hpp"
#include "listed.hpp"
#include "numbers.hpp"

namespace relive {

namespace {

// Bytes of all targets from which long rows are written past the caches. The oldest are not in a cache by the time that
// they are read, and new ones would drive out all else. Below that, a copy by way of the caches is twice as fast.
// At 96 MB of columns a row of 128 KB takes 18 µs past the caches instead of 24; at 32 MB it would take 18 instead of
// 12. Minibatches and stacks of frames never go past them, as their reader would have to fetch the batch again.
constexpr std::int64_t CACHES = 3 * (std::int64_t{1} << 24);
// Bytes of a long row.
constexpr std::size_t LONG_ROW = std::size_t{1} << 17;

// The most names of a path: it is walked by recursion.
constexpr std::size_t DEEPEST = 256;

// NumPy's name of a dtype, or of its bits where it lacks the dtype.
int type_of(DType dtype) {
    constexpr int NAMES[][5] = {
        {NPY_INT8, NPY_INT16, NPY_INT32, NPY_INT64}, {NPY_UINT8, NPY_UINT16, NPY_UINT32, NPY_UINT64},
        {0, NPY_FLOAT16, NPY_FLOAT32, NPY_FLOAT64}, {}, {0, NPY_INT16}, {0, 0, 0, NPY_COMPLEX64, NPY_COMPLEX128},
        {NPY_BOOL},
    };
    return NAMES[dtype.code][std::countr_zero(dtype.bytes())];
}

// The array that NumPy makes of a list, a tuple or a single number, or of an array whose bytes lie otherwise; invalid if
// this is none, or cannot become one.
// Strided arrays and tensors, other dtypes, masks and debug mode take 1.0 to 2.0 times as long as a plain step of
// arrays, since one call reads them all; they took 5 to 80 times as long when Python checked them. NumPy reads lists,
// in 10 µs for 200 numbers. Tensors cost twice what arrays cost.
nb::object array_of(PyObject *given) {
    bool known = PyList_CheckExact(given) || PyTuple_CheckExact(given) || PyArray_IsAnyScalar(given);
    if (!known && !PyArray_CheckExact(given)) return {};
    if (nb::object array = array_of_list(given); array.is_valid()) return array;
    constexpr int WAYS = NPY_ARRAY_NOTSWAPPED | NPY_ARRAY_ALIGNED;
    nb::object array = nb::steal(PyArray_CheckFromAny(given, nullptr, 0, 0, WAYS, nullptr));
    if (array.is_valid()) return array;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) nb::raise_python_error();
    PyErr_Clear();
    return {};
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
    field.target = reinterpret_cast<std::byte *>(PyArray_BYTES(target));
    field.rows = PyArray_DIMS(target)[0];
    field.stride = PyArray_STRIDES(target)[0];
    field.pitch = PyArray_STRIDES(target)[1];
    field.runs = count;
    field.size = count ? field.bytes / static_cast<std::size_t>(count) : 0;
    // the items of a row follow one another, so that a row is a single copy
    if (count == 1 || field.pitch == static_cast<std::ptrdiff_t>(field.size)) {
        field.runs = 1;
        field.size = field.bytes;
    }
    if (field.bytes == 0) field.runs = 0;
}

// A member of a dict; invalid if there is none.
nb::object member_of(PyObject *dict, const nb::object &name) {
    return nb::borrow(PyDict_GetItemWithError(dict, name.ptr()));
}

}  // namespace

StepFields::StepFields(nb::handle paths, nb::handle dtypes, nb::handle shapes, std::int64_t count, nb::handle targets,
                       nb::handle finite, nb::handle defaults)
    : count_(count), defaults_(static_cast<Py_ssize_t>(nb::len(defaults))), kept_(nb::tuple(targets)) {
    auto number = nb::len(paths);
    auto left_out = static_cast<std::size_t>(defaults_);
    if (nb::len(dtypes) != number || nb::len(shapes) != number || nb::len(targets) != number || left_out > number ||
        count < 0)
        throw nb::value_error("a step's fields: as many dtypes, shapes and targets as paths");
    nb::set watched(finite);
    std::int64_t stored = 0;
    for (std::size_t i = 0; i < number; ++i) {
        nb::object names = paths[i];  // an accessor itself becomes a tuple without a look at what it is
        nb::tuple path{nb::handle(names)};
        if (path.size() > DEEPEST) throw nb::value_error("a step's fields: a path has too many names");
        grow(root_, path, 0, i);
        StepField field;
        nb::object dtype = dtypes[i];
        field.dtype = dtype_of(dtype.ptr());
        field.finite = watched.contains(paths[i]);
        field.shape.push_back(count);
        field.item = nb::cast<std::size_t>(dtype.attr("itemsize"));
        // the product without its zeros: what is computed of a part of the sizes does not overflow either
        auto most = static_cast<std::int64_t>(std::max<std::size_t>(field.item, 1));
        bool fits = most > 0 && !__builtin_mul_overflow(most, std::max<std::int64_t>(count, 1), &most);
        bool none = count == 0;
        for (nb::handle size : shapes[i]) {
            auto length = nb::cast<std::int64_t>(size);
            if (length < 0) throw nb::value_error("a step's fields: a size is negative");
            fits = fits && !__builtin_mul_overflow(most, std::max<std::int64_t>(length, 1), &most);
            none |= length == 0;
            field.shape.push_back(length);
        }
        field.bytes = none || field.item == 0 ? 0 : static_cast<std::size_t>(most);
        if (i >= number - left_out) {
            field.otherwise = defaults[i - (number - left_out)];
            Description found;
            if (!describe(field.otherwise.ptr(), found) || !(found.dtype == field.dtype) || !found.contiguous() ||
                !found.has_shape(field.shape))
                throw nb::value_error("a step's fields: a default is not [N, *shape] of its field's dtype");
            field.default_data = static_cast<const std::byte *>(found.data);
        }
        fits = fits && !__builtin_add_overflow(bytes_, static_cast<std::int64_t>(field.bytes), &bytes_);
        if (!fits) throw nb::value_error("a step's fields: a step has too many bytes for any memory");
        if (nb::object target = targets[i]; !target.is_none()) {
            if (!PyArray_Check(target.ptr())) throw nb::type_error("a step's fields: a target is an array or None");
            auto *array = reinterpret_cast<PyArrayObject *>(target.ptr());
            note_target(field, array);
            stored += PyArray_NBYTES(array);
            rows_ = rows_ < 0 ? field.rows : std::min(rows_, field.rows);
        }
        fields_.push_back(std::move(field));
    }
    for (auto &field : fields_) {
        field.past = field.runs == 1 && field.size >= LONG_ROW && stored >= CACHES;
        if (!field.target || field.rows == 0) continue;
        const std::byte *end = field.target + (field.rows - 1) * field.stride + field.extent();
        low_ = low_ ? std::min<const std::byte *>(low_, field.target) : field.target;
        high_ = std::max(high_, end);
    }
}

void StepFields::grow(Node &node, const nb::tuple &path, std::size_t depth, std::size_t leaf) {
    if (depth == path.size()) {
        if (depth == 0 || node.is_leaf || !node.members.empty())
            throw nb::value_error("a step's fields: a path names several fields, or none");
        node.leaf = leaf;
        node.is_leaf = true;
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

bool StepFields::pick(PyObject *given, const Node &node, Step &step, Py_ssize_t others) const {
    auto &members = node.members;
    auto count = static_cast<Py_ssize_t>(members.size());
    bool is_dict = PyDict_CheckExact(given);
    bool is_tuple = !is_dict && node.numbered && PyTuple_CheckExact(given);
    if (!is_dict && !is_tuple) return false;
    if (is_tuple && NB_TUPLE_GET_SIZE(given) != count) return false;
    Py_ssize_t expected = count + others;  // members of the dict
    bool without = is_dict && NB_DICT_GET_SIZE(given) == expected - defaults_;  // all that may be are left out
    for (Py_ssize_t k = 0; k < count; ++k) {
        auto &member = members[static_cast<std::size_t>(k)];
        const StepField *optional = member.is_leaf ? &fields_[member.leaf] : nullptr;
        if (optional && !optional->default_data) optional = nullptr;
        nb::object item;
        if (!is_dict) item = nb::borrow(NB_TUPLE_GET_ITEM(given, k));
        else if (!optional || !without) item = member_of(given, member.name);
        if (!item.is_valid()) {
            if (!optional || PyErr_Occurred()) {
                PyErr_Clear();
                return false;
            }
            step.set_default(member.leaf, *optional);
            --expected;
        } else if (member.is_leaf) step.set(member.leaf, item.release().ptr());
        else if (!pick(item.ptr(), member, step, 0)) return false;
    }
    return is_tuple || NB_DICT_GET_SIZE(given) == expected;
}

bool StepFields::accept(const StepField &field, Source &source, Step &step) const {
    Description found;
    bool known = describe(source.item, found);
    if (!known || found.dtype != field.dtype || !found.has_shape(field.shape) || !found.contiguous())
        return read(field, source, step, known ? &found : nullptr);
    source.data = found.data;
    return true;
}

bool StepFields::read(const StepField &field, Source &source, Step &step, const Description *found) const {
    Description listed;
    nb::object made;
    if (!found) {
        made = array_of(source.item);
        if (!made.is_valid() || !describe(made.ptr(), listed)) return false;
        found = &listed;
    }
    // with one env, its axis may be left out
    std::span<const std::int64_t> shape(field.shape);
    bool fits = found->has_shape(shape) || (count_ == 1 && found->has_shape(shape.subspan(1)));
    if (!fits || !field.dtype.known()) return false;
    auto *data = step.take(field.bytes);
    source.data = data;
    source.read = true;
    LongWork hold(static_cast<std::int64_t>(field.bytes) > LONG_WORK);
    return read_numbers(*found, field.dtype, data);
}

bool StepFields::accept(nb::handle given, Step &step, Py_ssize_t others) const {
    if (PyTuple_CheckExact(given.ptr())) {
        auto there = static_cast<std::size_t>(NB_TUPLE_GET_SIZE(given.ptr()));
        if (there > size()) return false;
        for (std::size_t i = 0; i < size(); ++i) {
            if (i < there) step.set(i, Py_NewRef(NB_TUPLE_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i))));
            else if (fields_[i].default_data) step.set_default(i, fields_[i]);
            else return false;
        }
    } else if (!pick(given.ptr(), root_, step, others)) {
        return false;
    }
    for (std::size_t i = 0; i < size(); ++i)
        if (!step[i].data && !accept(fields_[i], step[i], step)) return false;
    return true;
}

bool StepFields::is_finite(const Step &step, std::size_t i) const {
    return !fields_[i].finite || all_finite(fields_[i].dtype, step[i].data, fields_[i].bytes);
}

nb::tuple StepFields::leaves(const Step &step) const {
    nb::list leaves;
    for (std::size_t i = 0; i < size(); ++i) {
        auto &field = fields_[i];
        if (!step[i].read) {
            leaves.append(nb::handle(step[i].item));
            continue;
        }
        std::vector<npy_intp> shape(field.shape.begin(), field.shape.end());
        auto array = array_or_raise(
            PyArray_SimpleNew(static_cast<int>(shape.size()), shape.data(), type_of(field.dtype)));
        std::memcpy(numbers_of<std::byte>(array), step[i].data, field.bytes);
        leaves.append(array);
    }
    return nb::tuple(leaves);
}

void StepFields::set_aside(Step &step, std::int64_t row) const {
    for (std::size_t i = 0; i < size(); ++i) {
        auto bytes = fields_[i].bytes;
        auto &data = step[i].data;
        if (data >= high_ || data + bytes <= low_) continue;
        for (auto &other : fields_) {
            auto *begin = other.target + row * other.stride;
            if (!other.target || data >= begin + other.extent() || data + bytes <= begin) continue;
            auto *copied = step.take(bytes);
            std::memcpy(copied, data, bytes);
            data = copied;
            break;
        }
    }
}

void StepFields::copy(const Step &step, std::int64_t row, std::size_t i) const {
    auto &field = fields_[i];
    auto *target = field.target + row * field.stride;
    auto *source = step[i].data;
    if (field.runs == 0) return;
    if (field.runs > 1) spread(target, field.pitch, source, field.runs, field.size);
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

// Checks a step and adds its rows. Each field is copied to where it is stored; the fields' targets are the staged rows,
// of which rewards and flags alone are written and read.
class StepAdder {
  public:
    StepAdder(nb::object ring, nb::object staged, nb::object fields, nb::handle large, int mode)
        : ring_(nb::cast<Ring &>(ring)), staged_(nb::cast<StagedRows &>(staged)),
          fields_(nb::cast<const StepFields &>(fields)), mode_(mode), places_(ring_.places()),
          mask_name_(nb::steal(PyUnicode_InternFromString("mask"))),
          kept_(nb::make_tuple(ring, staged, fields, large)) {
        require_mode(mode);
        auto count = staged_.size();
        mask_.dtype = {BOOL, 8, 1};
        mask_.shape = {count};
        mask_.item = 1;
        mask_.bytes = static_cast<std::size_t>(count);
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
            one.block = reinterpret_cast<std::byte *>(block.first);
            one.width = block.stride;
            one.is_final = nb::cast<bool>(item[2]);
        }
        for (std::size_t i = 0; i < destinations_.size(); ++i)
            if (!fields_.fields()[i].target && !destinations_[i].block && destinations_[i].size)
                throw nb::value_error("a step's fields: a field is stored nowhere");
    }

    std::int64_t add(nb::handle given, bool finite) {
        auto count = fields_.size();
        Step step(count + 1);  // the last is the mask
        bool masked = PyDict_CheckExact(given.ptr()) && NB_DICT_GET_SIZE(given.ptr()) > fields_.names();
        if (masked) {
            auto mask = member_of(given.ptr(), mask_name_);
            if (!mask.is_valid()) {
                PyErr_Clear();
                return UNFIT;
            }
            step.set(count, mask.release().ptr());
            if (!fields_.accept(mask_, step[count], step)) return UNFIT;
        }
        if (!fields_.accept(given, step, masked) || reads_ring(step, count + masked)) return UNFIT;
        prepare(ring_, staged_);  // the last that runs before the change: Python may have run until here
        if (ring_.places() != places_) throw nb::value_error("a step's fields: the ring was bound to other rows");
        // from here on nothing throws; `step` holds what is copied
        LongWork hold(fields_.bytes() > LONG_WORK);
        for (std::size_t i = 0; i < count; ++i)
            if (destinations_[i].read) fields_.copy(step, 0, i);
        if (finite && !is_finite(step)) return UNFIT;
        staged_.mask = masked ? step[count].data : nullptr;
        auto events = append_rows(ring_, staged_, mode_, [&](std::int64_t low, std::int64_t rows) {
            store(step, low, rows);
        });
        staged_.mask = nullptr;
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

    // True if one of the first `count` values lies in memory of the ring, such as a view of a row or of a block: it may
    // be overwritten before it is read.
    bool reads_ring(const Step &step, std::size_t count) const {
        auto inside = [&](const std::byte *memory, std::int64_t width) {
            auto *end = memory + ring_.places() * width;
            bool found = false;
            for (std::size_t i = 0; i < count; ++i) found |= step[i].data >= memory && step[i].data < end;
            return found;
        };
        bool found = inside(ring_.memory, ring_.width);
        for (auto &one : destinations_)
            if (one.block) found |= inside(one.block, one.width);
        return found;
    }

    // Of final observations, only those of ended episodes count.
    bool is_finite(const Step &step) const {
        bool finite = true;
        for (std::size_t i = 0; finite && i < destinations_.size(); ++i) {
            finite = fields_.is_finite(step, i);
            if (finite || !destinations_[i].is_final) continue;
            finite = true;
            auto *item = step[i].data;
            for (std::int64_t n = 0; n < staged_.size(); ++n, item += destinations_[i].size)
                finite &= !staged_.ended(n) || all_finite(fields_.fields()[i].dtype, item, destinations_[i].size);
        }
        return finite;
    }

    void store(const Step &step, std::int64_t low, std::int64_t count) const {
        for (std::size_t i = 0; i < destinations_.size(); ++i) {
            auto &one = destinations_[i];
            if (one.is_final && mode_ != FINALS) continue;
            Vector<std::int64_t> places{(one.is_final ? staged_.finals : staged_.places).data + low, count};
            auto size = static_cast<std::int64_t>(one.size);
            auto *target = one.block ? one.block : ring_.memory + one.at;
            scatter(step[i].data + low * size, size, places, target, one.block ? one.width : ring_.width, one.size);
        }
        for (auto i = low; staged_.mask && i < low + count; ++i)  // a row that is left out has no end
            if (auto place = staged_.places[i]; staged_.leaves_out(i) && place >= 0)
                ring_.terminated[place] = ring_.truncated[place] = 0;
    }

    Ring &ring_;
    StagedRows &staged_;
    const StepFields &fields_;
    int mode_;
    Place places_;  // of the ring, and of its blocks
    std::vector<Destination> destinations_;
    StepField mask_;
    nb::object mask_name_, kept_;
};

}  // namespace

void bind_steps(nb::module_ &module) {
    nb::class_<StepFields>(module, "StepFields",
                           "The fields of a step by path, and where they are stored: arrays `[R, N, *shape]` whose\n"
                           "items have no gaps, or None for a field that is only checked. A step may leave out the last\n"
                           "fields, as many as there are `defaults`, arrays `[N, *shape]` that are taken instead.")
        .def("__init__", [](StepFields *self, nb::handle paths, nb::handle dtypes, nb::handle shapes,
                            std::int64_t count, nb::handle targets, nb::handle finite, nb::handle defaults) {
            new (self) StepFields(paths, dtypes, shapes, count, targets, finite, defaults);
        }, nb::arg("paths"), nb::arg("dtypes"), nb::arg("shapes"), nb::arg("count"), nb::arg("targets"),
           nb::arg("finite") = nb::make_tuple(), nb::arg("defaults") = nb::make_tuple())
        .def("leaves", [](const StepFields &self, nb::handle given) -> nb::object {
            Step step(self.size());
            if (!self.accept(given, step)) return nb::none();
            return self.leaves(step);
        }, nb::arg("step").none(),
             "The leaves of a step, each of its field's dtype and shape and without gaps, or None if one cannot be\n"
             "read here. `step` is a dict of the fields as the paths nest them, or a tuple of the leaves. A leaf that\n"
             "is so already is returned itself; for others there are new arrays.")
        .def("take", [](const StepFields &self, std::int64_t row, nb::handle given, bool finite) {
            bool there = self.rows() < 0 || row < self.rows();  // without targets, no row is written
            if (row < 0 || !there) throw nb::index_error("a step's fields: there is no such row");
            Step step(self.size());
            if (!self.accept(given, step)) return false;
            LongWork hold(self.bytes() > LONG_WORK);
            for (std::size_t i = 0; finite && i < self.size(); ++i)
                if (!self.is_finite(step, i)) return false;
            self.set_aside(step, row);
            self.copy(step, row);
            return true;
        }, nb::arg("row"), nb::arg("step").none(), nb::arg("finite") = false,
             "Copy a step to a row if each field can be read; else the row is as it was. If `finite`, those fields\n"
             "have to be so, too.");
    nb::class_<StepAdder>(module, "StepAdder", "Checks whole steps, stages them and adds their rows.")
        .def(nb::init<nb::object, nb::object, nb::object, nb::handle, int>(), nb::arg("ring"), nb::arg("staged"),
             nb::arg("fields"), nb::arg("large"), nb::arg("mode"))
        .def("add", &StepAdder::add, nb::arg("step").none(), nb::arg("finite") = false,
             "Add a step, a dict or a tuple of leaves. A dict may have a mask, bool `[N]`: rows where it is False are\n"
             "left out, and the episodes of their envs do not go on. If `finite`, those fields have to be so.\n\n"
             "Returns what `add_rows` returns, or UNFIT if the step cannot be read here. If that is negative, nothing\n"
             "that is stored has changed.");
}

}  // namespace relive
