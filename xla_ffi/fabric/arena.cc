#include "fabric/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "fabric/errors.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace strata {
namespace {

constexpr size_t RoundUp(size_t n, size_t to) { return (n + to - 1) / to * to; }

std::string Errno() { return std::strerror(errno); }

// A limit that would raise a signal (SIGXFSZ) or fail half-way is found here,
// before anything is mapped.
void CheckLimits(size_t span, int processes) {
  rlimit r;
  if (getrlimit(RLIMIT_FSIZE, &r) == 0 && r.rlim_cur != RLIM_INFINITY &&
      r.rlim_cur < span) {
    throw Error(ErrorKind::kResourceExhausted,
                "RLIMIT_FSIZE (ulimit -f) is " + std::to_string(r.rlim_cur) +
                    " bytes, the arena needs " + std::to_string(span) +
                    "; raise it or set STRATACL_ARENA_SPAN");
  }
  const size_t need = span * (2 * static_cast<size_t>(processes) - 1);
  if (getrlimit(RLIMIT_AS, &r) == 0 && r.rlim_cur != RLIM_INFINITY &&
      r.rlim_cur < need) {
    throw Error(ErrorKind::kResourceExhausted,
                "RLIMIT_AS (ulimit -v) is " + std::to_string(r.rlim_cur) +
                    " bytes, the fabric reserves " + std::to_string(need) +
                    " of address space; raise it or set STRATACL_ARENA_SPAN");
  }
}

int NewMemfd(size_t span) {
  int fd = memfd_create("stratacl-arena",
                        MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) {  // before Linux 6.3
    fd = memfd_create("stratacl-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  }
  if (fd < 0) {
    throw Error(ErrorKind::kUnsupported, "memfd_create failed: " + Errno());
  }
  // Sealed against truncation: a peer's load can never raise SIGBUS.
  if (ftruncate(fd, static_cast<off_t>(span)) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const std::string why = Errno();
    close(fd);
    throw Error(ErrorKind::kResourceExhausted,
                "cannot size the arena's memfd: " + why);
  }
  return fd;
}

}  // namespace

std::vector<uint64_t> CandidateBases() {
  std::vector<uint64_t> bases;
#if defined(__aarch64__)
  // 39-bit kernels end at 512 GiB, 48-bit ones at 256 TiB.
  for (uint64_t i = 0; i < 4; ++i) bases.push_back((64 + 64 * i) << 30);
  for (uint64_t i = 0; i < 8; ++i) bases.push_back(0x200000000000 + (i << 41));
#elif STRATACL_TSAN
  // ThreadSanitizer keeps application memory to a few fixed ranges, and ends
  // the process where others are asked for.  This is the one where x86-64
  // kernels place mappings.
  for (uint64_t i = 0; i < 16; ++i) bases.push_back(0x7e8000000000 + (i << 36));
#else
  // A process that left the fabric keeps its old range for its arrays.
  for (uint64_t i = 0; i < 36; ++i) bases.push_back(0x200000000000 + (i << 41));
#endif
  return bases;
}

bool RangeIsFree(uint64_t base, size_t bytes) {
  void* want = reinterpret_cast<void*>(base);
  void* p = mmap(
      want, bytes, PROT_NONE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (p == MAP_FAILED) return false;
  munmap(p, bytes);
  return p == want;  // kernels before 4.17 take the address as a hint
}

ControlGeometry::ControlGeometry(size_t eager) {
  eager_bytes = RoundUp(eager, 64);
  payload_stride = RoundUp(eager_bytes, 64);
  control_bytes = RoundUp(sizeof(Control) + kSlots * payload_stride, 1 << 21);
}

Arena::Arena(int process, int processes, uint64_t base, size_t span,
             const ControlGeometry& geometry)
    : process_(process),
      processes_(processes),
      base_(base),
      span_(span),
      geometry_(geometry),
      heap_offset_(geometry.control_bytes * kMaxLocalRanks),
      alias_(static_cast<size_t>(processes), nullptr) {
  if (heap_offset_ + (size_t{1} << 30) > span) {
    throw Error(ErrorKind::kInvalidUsage,
                "STRATACL_ARENA_SPAN of " + std::to_string(span) +
                    " bytes leaves no room beside the posting tables of " +
                    std::to_string(heap_offset_) +
                    "; raise it or lower STRATACL_EAGER_BYTES");
  }
  CheckLimits(span, processes);
  const size_t all = span * static_cast<size_t>(processes);
  void* want = reinterpret_cast<void*>(base);
  if (mmap(want, all, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE,
           -1, 0) != want) {
    throw Error(ErrorKind::kResourceExhausted,
                "cannot reserve the arenas' address range: " + Errno());
  }
  int flags = MAP_FIXED | MAP_NORESERVE;
  if (processes > 1) {
    memfd_ = NewMemfd(span);
    flags |= MAP_SHARED;
  } else {
    flags |= MAP_PRIVATE | MAP_ANONYMOUS;
  }
  void* mine = reinterpret_cast<void*>(Start(process));
  if (mmap(mine, span, PROT_READ | PROT_WRITE, flags, memfd_, 0) != mine) {
    const std::string why = Errno();
    munmap(want, all);
    if (memfd_ >= 0) close(memfd_);
    throw Error(ErrorKind::kResourceExhausted, "cannot map the arena: " + why);
  }
  alias_[static_cast<size_t>(process)] = static_cast<unsigned char*>(mine);
  allocator_ = std::make_unique<Allocator>(span - heap_offset_);
}

Arena::~Arena() {
  Detach(/*unread=*/false);
  Unmap();
}

void Arena::Unmap() {
  if (!mapped_) return;
  mapped_ = false;
  munmap(reinterpret_cast<void*>(Start(process_)), span_);
  if (memfd_ >= 0) close(memfd_);
  memfd_ = -1;
}

bool Arena::Close() {
  return detached_.load(std::memory_order_acquire) && allocator_->Close();
}

void Arena::Detach(bool unread) {
  // release: who finds it detached finds the quarantine sealed.
  if (detached_.load(std::memory_order_relaxed)) return;
  quarantine_.Seal();
  detached_.store(true, std::memory_order_release);
  for (int p = 0; p < processes_; ++p) {
    if (p == process_) continue;
    munmap(reinterpret_cast<void*>(Start(p)), span_);
    auto*& alias = alias_[static_cast<size_t>(p)];
    if (alias != nullptr) munmap(alias, span_);
    alias = nullptr;
  }
  // A peer may still be about to find a post, or read a window: then the pages
  // go with its mapping.
  if (!unread) return;
  Writable(process_, 0)->left.store(1, std::memory_order_release);
  // The first page says so, and the launches that ended here in an error still
  // have to be found by peers; posts and payloads do not.
  constexpr size_t kPage = 4096;
  static_assert(offsetof(Control, left) < kPage);
  constexpr size_t kSlotsBegin = RoundUp(offsetof(Control, slots), kPage);
  constexpr size_t kSlotsEnd = offsetof(Control, comms) / kPage * kPage;
  constexpr size_t kRestBegin = RoundUp(offsetof(Control, more_acks), kPage);
  for (size_t rank = 0; memfd_ >= 0 && rank < kMaxLocalRanks; ++rank) {
    const size_t at = rank * geometry_.control_bytes;
    const auto punch = [&](size_t begin, size_t end) {
      fallocate(memfd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                static_cast<off_t>(at + begin),
                static_cast<off_t>(end - begin));
    };
    punch(kSlotsBegin, kSlotsEnd);
    punch(kRestBegin, geometry_.control_bytes);
  }
  Trim(0, span_, /*beyond=*/true);
}

void Arena::Attach(int p, int fd) {
  struct stat st;
  if (fstat(fd, &st) != 0 || static_cast<size_t>(st.st_size) != span_) {
    throw Error(ErrorKind::kInvalidUsage,
                "process " + std::to_string(p) +
                    " has an arena of another size; STRATACL_ARENA_SPAN must "
                    "be the same on all ranks");
  }
  void* shadow = reinterpret_cast<void*>(Start(p));
  if (mmap(shadow, span_, PROT_READ, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd,
           0) != shadow) {
    throw Error(ErrorKind::kResourceExhausted,
                "cannot map the arena of process " + std::to_string(p) + ": " +
                    Errno());
  }
  void* alias = mmap(nullptr, span_, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (alias == MAP_FAILED) {
    throw Error(ErrorKind::kResourceExhausted,
                "cannot map the arena of process " + std::to_string(p) +
                    " for stores: " + Errno());
  }
  alias_[static_cast<size_t>(p)] = static_cast<unsigned char*>(alias);
}

Control* Arena::Shadow(int p, int local) const {
  return reinterpret_cast<Control*>(Start(p) + geometry_.control_bytes *
                                                   static_cast<size_t>(local));
}

Control* Arena::Writable(int p, int local) const {
  return reinterpret_cast<Control*>(alias_[static_cast<size_t>(p)] +
                                    geometry_.control_bytes *
                                        static_cast<size_t>(local));
}

void* Arena::AllocateForXla(size_t bytes) {
  // Threads that come at once may pass it together; it is a cap on memory and
  // not on addresses.
  if (limit_ != 0 && (bytes > limit_ || allocator_->used() > limit_ - bytes)) {
    return nullptr;
  }
  return Allocate(bytes);
}

void* Arena::Allocate(size_t bytes) {
  const size_t offset = allocator_->Allocate(bytes);
  if (offset == Allocator::kFull) return nullptr;
  // relaxed: a hint to the registrar, which looks at the mark itself.
  if (offset + bytes > ring_above_.load(std::memory_order_relaxed)) {
    ring_above_.store(~size_t{0}, std::memory_order_relaxed);
    RingExtents(Writable(process_, 0));
  }
  return reinterpret_cast<void*>(Start(process_) + heap_offset_ + offset);
}

void Arena::Free(void* p) {
  allocator_->Free(reinterpret_cast<uint64_t>(p) - Start(process_) -
                   heap_offset_);
}

void Arena::FreeForXla(void* p) {
  const bool detached = detached_.load(std::memory_order_acquire);
  const bool holding = quarantine_.holding();
  const size_t bytes = detached || holding ? SizeOf(p) : 0;
  if (quarantine_.Keeps(p, bytes)) return;
  // Nobody will allocate here again.
  if (detached) Punch(reinterpret_cast<uint64_t>(p) - heap_begin(), bytes);
  Free(p);
}

size_t Arena::SizeOf(const void* p) const {
  return allocator_->SizeOf(reinterpret_cast<uint64_t>(p) - heap_begin());
}

void Arena::Warm(size_t begin, size_t end) {
  void* at = reinterpret_cast<void*>(heap_begin() + begin);
  // Each is a help and no more: without it pages come when they are touched.
  if (madvise(at, end - begin, MADV_POPULATE_WRITE) == 0) {
    madvise(at, end - begin, MADV_COLLAPSE);
  }
}

void Arena::Populate(int p, size_t begin, size_t end) {
  madvise(reinterpret_cast<void*>(HeapOf(p) + begin), end - begin,
          MADV_POPULATE_READ);
  madvise(alias_[static_cast<size_t>(p)] + heap_offset_ + begin, end - begin,
          MADV_POPULATE_WRITE);
}

void Arena::Punch(size_t offset, size_t bytes) {
  if (memfd_ >= 0) {
    fallocate(memfd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(heap_offset_ + offset),
              static_cast<off_t>(bytes));
  } else {
    madvise(reinterpret_cast<void*>(heap_begin() + offset), bytes,
            MADV_DONTNEED);
  }
}

size_t Arena::Trim(size_t keep, size_t upto, bool beyond) {
  // Taken out of the allocator while its pages go, so that nobody gets it.
  size_t end;
  const size_t begin = allocator_->TakeTail(keep, upto, beyond, &end);
  if (begin == Allocator::kFull) return begin;
  Punch(begin, end - begin);
  allocator_->Free(begin);
  allocator_->LowerHighWater(begin);
  return begin;
}

bool Arena::Contains(const void* p, size_t bytes) const {
  const uint64_t a = reinterpret_cast<uint64_t>(p);
  const uint64_t begin = Start(process_) + heap_offset_;
  return a >= begin && a + bytes <= Start(process_) + span_;
}

}  // namespace strata
