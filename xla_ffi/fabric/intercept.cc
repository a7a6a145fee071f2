#include "fabric/intercept.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "fabric/world.h"

namespace strata {
namespace {

constexpr const char* kLibrary = "libjax_common.so";
constexpr int kMaxArenas = 64;  // of one process at one time

// Arenas that blocks may belong to.  An entry is set before a block of the
// arena is handed out, and cleared after the last one has come back; who holds
// a block therefore sees its entry, by way of whoever gave it the block.
std::atomic<Arena*> known[kMaxArenas];
std::atomic<int> known_count{0};      // entries past it were never set
std::mutex known_mutex;               // of changes
std::atomic<Arena*> source{nullptr};  // of new blocks
std::atomic<size_t> smallest{~size_t{0}};
std::atomic<uint64_t> blocks{0}, fallback_bytes{0};

Arena* ArenaOf(const void* p) {
  const uint64_t a = reinterpret_cast<uint64_t>(p);
  const int n = known_count.load(std::memory_order_acquire);
  for (int i = 0; i < n; ++i) {
    Arena* arena = known[i].load(std::memory_order_acquire);
    if (arena != nullptr && a >= arena->heap_begin() && a < arena->heap_end()) {
      return arena;
    }
  }
  return nullptr;
}

void GiveBack(Arena* arena, void* p) {
  // The child's arena pages are its parent's: it leaves them alone.
  if (InForkedChild()) return;
  arena->FreeForXla(p);
}

void* TakeFrom(size_t alignment, size_t size) {
  // relaxed: an allocation that races with Arm may come from either side.
  if (size < smallest.load(std::memory_order_relaxed)) return nullptr;
  Arena* arena = source.load(std::memory_order_acquire);
  if (arena == nullptr || InForkedChild()) return nullptr;
  const bool odd = alignment < sizeof(void*) ||
                   (alignment & (alignment - 1)) != 0 ||
                   alignment > Allocator::kGranule;
  if (odd) return nullptr;  // libc knows what to say
  void* p = arena->AllocateForXla(size);
  if (p == nullptr) {
    fallback_bytes.fetch_add(size, std::memory_order_relaxed);
  } else {
    blocks.fetch_add(1, std::memory_order_relaxed);
  }
  return p;
}

// What jaxlib calls.  posix_memalign does not touch errno, nor does free.
int HookedPosixMemalign(void** out, size_t alignment, size_t size) {
  void* p = TakeFrom(alignment, size);
  if (p == nullptr) return posix_memalign(out, alignment, size);
  *out = p;
  return 0;
}

void HookedFree(void* p) {
  if (Arena* arena = ArenaOf(p)) {
    GiveBack(arena, p);
  } else {
    free(p);
  }
}

void* HookedRealloc(void* p, size_t size) {
  Arena* arena = p == nullptr ? nullptr : ArenaOf(p);
  if (arena == nullptr) return realloc(p, size);
  if (size == 0) {
    GiveBack(arena, p);
    return nullptr;
  }
  void* q = malloc(size);
  if (q == nullptr) return nullptr;
  // A child of fork() may have inherited a locked allocator.  What it copies
  // too much is readable, and nobody looks at it.
  const size_t held = InForkedChild()
                          ? arena->heap_end() - reinterpret_cast<uint64_t>(p)
                          : arena->SizeOf(p);
  memcpy(q, p, held < size ? held : size);
  GiveBack(arena, p);
  return q;
}

#if defined(__x86_64__)
constexpr uint32_t kJumpSlot = R_X86_64_JUMP_SLOT, kGlobDat = R_X86_64_GLOB_DAT,
                   kAbsolute = R_X86_64_64;
#elif defined(__aarch64__)
constexpr uint32_t kJumpSlot = R_AARCH64_JUMP_SLOT,
                   kGlobDat = R_AARCH64_GLOB_DAT, kAbsolute = R_AARCH64_ABS64;
#else
constexpr uint32_t kJumpSlot = ~0u, kGlobDat = ~0u, kAbsolute = ~0u;
#endif

struct Table {
  bool found = false;
  std::vector<void**> free_slots, realloc_slots, memalign_slots;
  uint64_t relro_begin = 0, relro_end = 0;
};

void Scan(const ElfW(Rela) * rela, size_t count, ElfW(Addr) base,
          const ElfW(Sym) * symbols, const char* names, Table* table) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t type = ELF64_R_TYPE(rela[i].r_info);
    const uint32_t symbol = ELF64_R_SYM(rela[i].r_info);
    const bool ours = type == kJumpSlot || type == kGlobDat ||
                      (type == kAbsolute && rela[i].r_addend == 0);
    if (symbol == 0 || !ours) continue;
    const char* name = names + symbols[symbol].st_name;
    void** slot = reinterpret_cast<void**>(base + rela[i].r_offset);
    if (strcmp(name, "free") == 0) table->free_slots.push_back(slot);
    if (strcmp(name, "realloc") == 0) table->realloc_slots.push_back(slot);
    if (strcmp(name, "posix_memalign") == 0) {
      table->memalign_slots.push_back(slot);
    }
  }
}

int Visit(dl_phdr_info* info, size_t, void* data) {
  Table* table = static_cast<Table*>(data);
  const char* file = strrchr(info->dlpi_name, '/');
  if (strcmp(file == nullptr ? info->dlpi_name : file + 1, kLibrary) != 0) {
    return 0;
  }
  const ElfW(Dyn)* dynamic = nullptr;
  const ElfW(Addr) base = info->dlpi_addr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) & h = info->dlpi_phdr[i];
    if (h.p_type == PT_DYNAMIC) {
      dynamic = reinterpret_cast<const ElfW(Dyn)*>(base + h.p_vaddr);
    }
    if (h.p_type == PT_GNU_RELRO) {
      table->relro_begin = base + h.p_vaddr;
      table->relro_end = table->relro_begin + h.p_memsz;
    }
  }
  if (dynamic == nullptr) return 1;
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela)* rela = nullptr, *plt = nullptr;
  size_t rela_bytes = 0, plt_bytes = 0, relative = 0;
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    const ElfW(Addr) p = dynamic->d_un.d_ptr;
    switch (dynamic->d_tag) {
      case DT_SYMTAB:
        symbols = reinterpret_cast<const ElfW(Sym)*>(p);
        break;
      case DT_STRTAB:
        names = reinterpret_cast<const char*>(p);
        break;
      case DT_RELA:
        rela = reinterpret_cast<const ElfW(Rela)*>(p);
        break;
      case DT_RELASZ:
        rela_bytes = dynamic->d_un.d_val;
        break;
      case DT_RELACOUNT:
        relative = dynamic->d_un.d_val;
        break;
      case DT_JMPREL:
        plt = reinterpret_cast<const ElfW(Rela)*>(p);
        break;
      case DT_PLTRELSZ:
        plt_bytes = dynamic->d_un.d_val;
        break;
      default:
        break;
    }
  }
  if (symbols == nullptr || names == nullptr) return 1;
  table->found = true;
  const size_t count = rela_bytes / sizeof(ElfW(Rela));
  if (rela != nullptr && count > relative) {
    Scan(rela + relative, count - relative, base, symbols, names, table);
  }
  if (plt != nullptr) {
    Scan(plt, plt_bytes / sizeof(ElfW(Rela)), base, symbols, names, table);
  }
  return 1;
}

bool Patch(const Table& table, void** slot, void* target) {
  const uint64_t page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t at = reinterpret_cast<uint64_t>(slot);
  void* page = reinterpret_cast<void*>(at / page_bytes * page_bytes);
  const bool sealed = at >= table.relro_begin && at < table.relro_end;
  if (sealed && mprotect(page, page_bytes, PROT_READ | PROT_WRITE) != 0) {
    return false;
  }
  // Other threads call through the slot meanwhile: old or new, never half.
  __atomic_store_n(slot, target, __ATOMIC_RELEASE);
  if (sealed) mprotect(page, page_bytes, PROT_READ);
  return true;
}

// Once a process.  `free` first: no block of ours may meet the old one.
std::string PatchOnce() {
  Table table;
  dl_iterate_phdr(&Visit, &table);
  if (!table.found) {
    return std::string(kLibrary) + " is not loaded: an unknown jaxlib";
  }
  if (table.free_slots.empty() || table.memalign_slots.empty()) {
    return std::string(kLibrary) +
           " does not import posix_memalign and free: an unknown jaxlib";
  }
  const auto all = [&](const std::vector<void**>& slots, void* target) {
    bool good = true;
    for (void** slot : slots) good = Patch(table, slot, target) && good;
    return good;
  };
  if (!all(table.free_slots, reinterpret_cast<void*>(&HookedFree)) ||
      !all(table.realloc_slots, reinterpret_cast<void*>(&HookedRealloc)) ||
      !all(table.memalign_slots,
           reinterpret_cast<void*>(&HookedPosixMemalign))) {
    return std::string("jaxlib's import table cannot be written: ") +
           strerror(errno);
  }
  return "";
}

}  // namespace

std::string Interception::Arm(Arena* arena, size_t threshold) {
  std::lock_guard<std::mutex> lock(known_mutex);
  static const std::string impossible = PatchOnce();
  if (!impossible.empty()) return impossible;
  int at = 0;
  while (at < kMaxArenas &&
         known[at].load(std::memory_order_relaxed) != nullptr) {
    ++at;
  }
  if (at == kMaxArenas) {
    return "arrays of " + std::to_string(kMaxArenas) +
           " earlier initialize() calls are still alive";
  }
  known[at].store(arena, std::memory_order_release);
  if (at == known_count.load(std::memory_order_relaxed)) {
    known_count.store(at + 1, std::memory_order_release);
  }
  blocks.store(0, std::memory_order_relaxed);
  fallback_bytes.store(0, std::memory_order_relaxed);
  smallest.store(threshold, std::memory_order_relaxed);
  source.store(arena, std::memory_order_release);
  return "";
}

void Interception::Disarm() {
  source.store(nullptr, std::memory_order_release);
}

void Interception::DropEmpty() {
  std::lock_guard<std::mutex> lock(known_mutex);
  const int n = known_count.load(std::memory_order_relaxed);
  for (int i = 0; i < n; ++i) {
    Arena* arena = known[i].load(std::memory_order_relaxed);
    if (arena == nullptr || !arena->Close()) continue;
    // Before its addresses can belong to anybody else.
    known[i].store(nullptr, std::memory_order_release);
    arena->Unmap();
  }
}

Interception::Counts Interception::counts() {
  return {blocks.load(std::memory_order_relaxed),
          fallback_bytes.load(std::memory_order_relaxed)};
}

}  // namespace strata
