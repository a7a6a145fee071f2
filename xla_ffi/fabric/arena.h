// Owns: the address space plan and the mappings.  Invariant: a byte of process
// p's arena has the same address in every process of the job on this host
// (shadow address); there it is read-only, except to its owner.  A second,
// writable view (alias) of a peer's arena is private to the engine, which
// writes acknowledgements, doorbells and parts of results through it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fabric/allocator.h"
#include "fabric/quarantine.h"
#include "fabric/signals.h"

namespace strata {

// Bases every process tries, in order; the first that is free in all wins.
std::vector<uint64_t> CandidateBases();
// Whether [base, base + bytes) is free in this process.
bool RangeIsFree(uint64_t base, size_t bytes);

struct ControlGeometry {
  size_t eager_bytes = 0;  // largest payload inside a post
  size_t payload_stride = 0;
  size_t control_bytes = 0;  // one rank's Control and payloads
  explicit ControlGeometry(size_t eager = 8192);
};

class Arena {
 public:
  // processes == 1 uses private memory and no descriptor.  Throws Error
  // (ResourceExhausted, Unsupported) with the limit that was hit.
  Arena(int process, int processes, uint64_t base, size_t span,
        const ControlGeometry& geometry);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  int memfd() const { return memfd_; }
  // Maps peer p from its descriptor (not kept): shadow and alias.
  void Attach(int p, int fd);

  uint64_t base() const { return base_; }
  size_t span() const { return span_; }
  int process() const { return process_; }
  int processes() const { return processes_; }
  const ControlGeometry& geometry() const { return geometry_; }

  // Readable control block of rank `local` of process p, at its shadow address.
  Control* Shadow(int p, int local) const;
  // The same block, writable.
  Control* Writable(int p, int local) const;
  unsigned char* Payload(Control* c, int slot) const {
    return reinterpret_cast<unsigned char*>(c) + sizeof(Control) +
           static_cast<size_t>(slot) * geometry_.payload_stride;
  }

  // Memory of this process; nullptr when the span is used up.
  void* Allocate(size_t bytes);
  void Free(void* p);
  // As Allocate, for XLA's blocks, which the limit holds for: what must be
  // copied to reach peers finds room beyond it.
  void* AllocateForXla(size_t bytes);
  // As Free, for blocks that XLA held: one that a peer may still store to
  // stays until that is over.
  void FreeForXla(void* p);
  size_t SizeOf(const void* p) const;
  bool Contains(const void* p, size_t bytes) const;
  uint64_t heap_begin() const { return Start(process_) + heap_offset_; }
  uint64_t heap_end() const { return Start(process_) + span_; }
  const Allocator& allocator() const { return *allocator_; }
  // Allocating past this heap offset rings the registrar.
  void RingAbove(size_t offset) {
    ring_above_.store(offset, std::memory_order_relaxed);
  }
  // Bytes beyond which XLA gets no more; 0 = no limit.
  void set_limit(size_t bytes) { limit_ = bytes; }
  size_t limit() const { return limit_; }
  Quarantine& quarantine() { return quarantine_; }

  // The engine's view of an address in the heap of process p.
  void* WritableAt(int p, void* shadow) const {
    return p == process_ ? shadow
                         : alias_[static_cast<size_t>(p)] +
                               (reinterpret_cast<uint64_t>(shadow) - Start(p));
  }
  uint64_t HeapOf(int p) const { return Start(p) + heap_offset_; }

  // Ahead of use (the registrar calls these).  Pages of [begin, end), offsets
  // in the heap: of the own one, present and huge; of a peer's, mapped here.
  void Warm(size_t begin, size_t end);
  void Populate(int p, size_t begin, size_t end);
  // If the heap was used past `keep` (or, if `beyond`, in any case) and is free
  // there: gives the memory from there up to `upto` back and returns where that
  // begins, else kFull.
  size_t Trim(size_t keep, size_t upto, bool beyond = false);

  // The fabric is left: peers are unmapped, own blocks stay where they are.
  // `unread`: no peer reads this memory any more, so that unused pages can go.
  void Detach(bool unread);
  // If it is detached and no block is left, there will be none any more, and
  // Unmap may follow.  The object stays usable for who is about to ask it.
  bool Close();
  void Unmap();

 private:
  // Gives the pages of a range of the own heap back; it reads as zeros.
  void Punch(size_t offset, size_t bytes);
  uint64_t Start(int p) const { return base_ + span_ * static_cast<size_t>(p); }

  int process_, processes_;
  uint64_t base_;
  size_t span_;
  ControlGeometry geometry_;
  size_t heap_offset_;
  int memfd_ = -1;
  std::vector<unsigned char*> alias_;
  std::unique_ptr<Allocator> allocator_;
  size_t limit_ = 0;
  std::atomic<size_t> ring_above_{~size_t{0}};
  Quarantine quarantine_;
  std::atomic<bool> detached_{false};
  bool mapped_ = true;
};

}  // namespace strata
