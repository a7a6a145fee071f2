// Built as libjax_common.so: stands for jaxlib in the interception test.  It
// imports what jaxlib imports, in the ways in which an import table can hold
// it: called, and by address in data.
#include <cstddef>
#include <cstdlib>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

using Free = void (*)(void*);
using Realloc = void* (*)(void*, size_t);

struct Pointers {
  Free release;
  Realloc resize;
};
// volatile: the addresses are loaded, not folded into calls.
volatile Pointers pointers = {&free, &realloc};

}  // namespace

EXPORTED int StandInMemalign(void** out, size_t alignment, size_t size) {
  return posix_memalign(out, alignment, size);
}
EXPORTED void StandInFree(void* p) { free(p); }
EXPORTED void* StandInRealloc(void* p, size_t size) { return realloc(p, size); }
EXPORTED void StandInFreeByPointer(void* p) {
  const Free release = pointers.release;
  release(p);
}
EXPORTED void* StandInReallocByPointer(void* p, size_t size) {
  const Realloc resize = pointers.resize;
  return resize(p, size);
}
