// Keeps memory that no tensor refers to any more for later batches, without a lock.
#include "pool.hpp"

#include <array>
#include <cstdlib>
#include <new>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

namespace relive {

namespace {

constexpr std::size_t SMALL = std::size_t{1} << 19;  // below, malloc reuses memory by itself, and faster
constexpr std::size_t HUGE_PAGE = std::size_t{1} << 21;
constexpr std::size_t MOST = std::size_t{1} << 40;  // of no batch
constexpr std::size_t HEADER = 64;  // bytes before the rows, for the block itself

std::size_t up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

// The blocks that are not in use. There is no lock, which a fork could find taken: who takes a block from its place, by
// an exchange, alone has it.
struct Shelf {
    std::array<std::atomic<Block *>, 16> places{};

    ~Shelf() {
        for (auto &place : places)
            if (auto *block = place.load()) block->release();
    }
    // Where no place is free, the smallest block makes way.
    void put(Block *block) {
        for (auto &place : places) {
            Block *none = nullptr;
            if (!place.load() && place.compare_exchange_strong(none, block)) return;
        }
        for (auto &place : places) {
            auto *other = place.exchange(nullptr);
            if (!other || other->capacity_ < block->capacity_) std::swap(block, other);
            if (auto *new_one = place.exchange(other)) new_one->release();  // of another thread, just now
            if (!block) return;
        }
        block->release();
    }
    // The smallest block of at least so many bytes, or null.
    Block *take(std::size_t bytes) {
        Block *best = nullptr;
        for (auto &place : places) {
            auto *block = place.load() ? place.exchange(nullptr) : nullptr;
            bool better = block && block->capacity_ >= bytes && (!best || block->capacity_ < best->capacity_);
            if (better) std::swap(block, best);
            if (block) put(block);
        }
        return best;
    }
};

Kept<Block> Block::make(std::size_t bytes, std::size_t alignment) {
    static_assert(sizeof(Block) <= HEADER);
    // not aligned_alloc: what that gave back is rarely used again, so each batch would find new pages. Fresh memory for
    // 32 stacks of frames takes 720 µs, and that of a dropped batch 62
    auto *memory = std::malloc(alignment + HEADER + bytes);
    if (!memory) throw std::bad_alloc();
    auto *rows = reinterpret_cast<std::byte *>(up(reinterpret_cast<std::uintptr_t>(memory) + HEADER, alignment));
    auto *block = new (rows - HEADER) Block;
    block->memory_ = memory;
    block->rows_ = rows;
    block->capacity_ = bytes;
    return Kept<Block>(block);
}

void Block::gone() {
    auto shelf = std::move(shelf_);
    if (shelf) shelf->put(this);
    else release();
}

void Block::release() {
    auto *memory = memory_;
    this->~Block();
    std::free(memory);
}

Pool::Pool() : shelf_(std::make_shared<Shelf>()) {}

Kept<Block> Pool::take(std::size_t bytes) {
    if (bytes >= MOST) throw std::bad_alloc();
    if (bytes < SMALL) return Block::make(bytes, 64);
    Kept<Block> block(shelf_->take(bytes));
    if (!block) {
        auto size = up(bytes + bytes / 8, 64);  // batches differ a little in size
        bool huge = 2 * size >= HUGE_PAGE;      // most of a huge page: then all of it, and whole ones
        block = huge ? Block::make(up(size, HUGE_PAGE), HUGE_PAGE) : Block::make(size, 64);
#ifdef MADV_HUGEPAGE
        if (huge) madvise(block->rows_, block->capacity_, MADV_HUGEPAGE);
#endif
    }
    block->owners_ = 1;
    block->shelf_ = shelf_;
    return block;
}

std::vector<std::size_t> Pool::kept() const {
    std::vector<std::size_t> found;
    for (auto &place : shelf_->places)
        if (auto *block = place.exchange(nullptr)) {
            found.push_back(block->capacity_);
            shelf_->put(block);
        }
    return found;
}

}  // namespace relive
