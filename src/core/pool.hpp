// The memory of batches: blocks that tensors share, and a pool that keeps them for later batches.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace relive {

// Memory that several tensors share; it goes when the last of them does, in whatever thread that is.
class Memory {
  public:
    void keep() { owners_.fetch_add(1, std::memory_order_relaxed); }
    void drop() { if (owners_.fetch_sub(1, std::memory_order_acq_rel) == 1) gone(); }

  protected:
    Memory() = default;
    ~Memory() = default;
    virtual void gone() = 0;  // nobody has it any more; may be called without the GIL
    std::atomic<std::int64_t> owners_{1};
};

struct Dropped { void operator()(Memory *memory) const { memory->drop(); } };
template <typename T> using Kept = std::unique_ptr<T, Dropped>;

struct Shelf;

// Memory of a batch, at a multiple of 64 bytes.
class BatchMemory : public Memory {
  public:
    std::byte *rows() { return rows_; }

  protected:
    std::byte *rows_ = nullptr;
};

// Uninitialised memory of a batch, from malloc.
class Block final : public BatchMemory {
    friend class Pool;
    friend struct Shelf;
    Block() = default;
    static Kept<Block> make(std::size_t bytes, std::size_t alignment);
    void gone() override;
    void release();
    void *memory_ = nullptr;  // with this object in it
    std::size_t capacity_ = 0;
    std::shared_ptr<Shelf> shelf_;  // where it goes back to, while it is in use
};

// Keeps up to 16 blocks of 512 KiB or more for later batches: fresh memory costs more than filling it, as the system
// finds and clears each page at its first touch.
class Pool {
  public:
    Pool();
    Kept<Block> take(std::size_t bytes);     // std::bad_alloc if there is no memory
    std::vector<std::size_t> kept() const;  // the bytes of each block that is not in use

  private:
    std::shared_ptr<Shelf> shelf_;
};

}  // namespace relive
