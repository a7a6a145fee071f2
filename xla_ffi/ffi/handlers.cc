// The XLA FFI handler: Instantiate decodes the attributes and builds the plan,
// Execute posts and runs.  Execute is a raw handler: the typed one decodes into
// temporaries and always makes a promise.
#include "ffi/handlers.h"

#include <cstring>

#include "ffi/runtime.h"
#include "xla/ffi/api/ffi.h"

namespace strata {
namespace ffi = xla::ffi;

struct InstanceState {
  static ffi::TypeId id;
  static ffi::TypeInfo info;
  Runtime* runtime = nullptr;
  std::unique_ptr<Instance> instance;
};
ffi::TypeId InstanceState::id = {};
ffi::TypeInfo InstanceState::info = ffi::MakeTypeInfo<InstanceState>();

namespace {

std::string Tagged(const Failure& f) {
  return std::string("stratacl: ") + NameOf(f.kind) + ": " + f.message;
}

XLA_FFI_Error_Code CodeOf(ErrorKind k) {
  switch (k) {
    case ErrorKind::kInvalidUsage:
      return XLA_FFI_Error_Code_INVALID_ARGUMENT;
    case ErrorKind::kMismatch:
      return XLA_FFI_Error_Code_FAILED_PRECONDITION;
    case ErrorKind::kPeerLost:
      return XLA_FFI_Error_Code_UNAVAILABLE;
    case ErrorKind::kDeadlineExceeded:
      return XLA_FFI_Error_Code_DEADLINE_EXCEEDED;
    case ErrorKind::kResourceExhausted:
      return XLA_FFI_Error_Code_RESOURCE_EXHAUSTED;
    case ErrorKind::kUnsupported:
      return XLA_FFI_Error_Code_UNIMPLEMENTED;
    case ErrorKind::kNone:
      break;
  }
  return XLA_FFI_Error_Code_INTERNAL;
}

XLA_FFI_Error* MakeError(const XLA_FFI_Api* api, const Failure& f) {
  const std::string text = Tagged(f);
  XLA_FFI_Error_Create_Args args;
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.extension_start = nullptr;
  args.message = text.c_str();
  args.errc = CodeOf(f.kind);
  return api->XLA_FFI_Error_Create(&args);
}

// Reads the one attribute that every call carries; see ops/_call.py, which
// writes it.
Spec Decode(ffi::Span<const int64_t> words) {
  size_t at = 0;
  auto next = [&]() -> int64_t {
    if (at >= words.size()) {
      throw Error(ErrorKind::kInvalidUsage, "truncated call specification");
    }
    return words[at++];
  };
  constexpr int64_t kVersion = 1;
  if (next() != kVersion) {
    throw Error(ErrorKind::kInvalidUsage,
                "the program was compiled by another version of stratacl_jax");
  }
  Spec s;
  s.op = static_cast<OpKind>(next());
  s.reduce = static_cast<ReduceOp>(next());
  s.channel = next();
  for (int64_t n = next(); n > 0; --n) {
    Leaf l;
    l.dtype = static_cast<DType>(next());
    l.count = next();
    l.element_bytes = next();
    s.leaves.push_back(l);
  }
  for (int64_t n = next(); n > 0; --n) s.dims.push_back(next());
  for (int64_t n = next(); n > 0; --n) {
    std::vector<int64_t> group;
    for (int64_t m = next(); m > 0; --m) group.push_back(next());
    s.groups.push_back(std::move(group));
  }
  for (int64_t n = next(); n > 0; --n) {
    const int64_t from = next();
    s.permutation.emplace_back(static_cast<int>(from),
                               static_cast<int>(next()));
  }
  return s;
}

ffi::ErrorOr<std::unique_ptr<InstanceState>> Instantiate(
    ffi::Span<const int64_t> spec) {
  auto fail = [](ErrorKind kind, const std::string& what) {
    return ffi::Unexpected(ffi::Error(static_cast<ffi::ErrorCode>(CodeOf(kind)),
                                      Tagged(Failure{kind, what})));
  };
  Runtime* rt = CurrentRuntime().load(std::memory_order_acquire);
  if (rt == nullptr) {
    return fail(ErrorKind::kInvalidUsage,
                "call stratacl_jax.initialize() before this program is loaded");
  }
  std::shared_ptr<Module> module = ModuleScope::Current();
  if (module == nullptr) {
    return fail(ErrorKind::kUnsupported,
                "the program was compiled on a path that stratacl_jax does not "
                "know, so equal calls in it cannot be told apart");
  }
  try {
    auto state = std::make_unique<InstanceState>();
    state->runtime = rt;
    state->instance = std::make_unique<Instance>(
        rt->world.get(), rt->comms.get(), Decode(spec), std::move(module));
    return state;
  } catch (const Error& e) {
    return fail(e.kind(), e.what());
  } catch (const std::invalid_argument& e) {
    return fail(ErrorKind::kInvalidUsage, e.what());
  } catch (const std::exception& e) {
    return fail(ErrorKind::kResourceExhausted, e.what());
  }
}

XLA_FFI_DEFINE_HANDLER(
    kInstantiate, Instantiate,
    ffi::Ffi::BindInstantiate().Attr<ffi::Span<const int64_t>>("spec"));

// Metadata queries and version checks are left to a typed handler.
ffi::Error Unreachable(InstanceState*) { return ffi::Error::Success(); }
XLA_FFI_DEFINE_HANDLER(kMetadata, Unreachable,
                       ffi::Ffi::Bind().Ctx<ffi::State<InstanceState>>());

constexpr int64_t kStackLeaves = 32;

XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start != nullptr) return kMetadata(frame);
  const XLA_FFI_Api* api = frame->api;

  XLA_FFI_State_Get_Args state_args;
  state_args.struct_size = XLA_FFI_State_Get_Args_STRUCT_SIZE;
  state_args.extension_start = nullptr;
  state_args.ctx = frame->ctx;
  state_args.stage = XLA_FFI_ExecutionStage_INSTANTIATE;
  state_args.type_id = &InstanceState::id;
  state_args.state = nullptr;
  if (XLA_FFI_Error* e = api->XLA_FFI_State_Get(&state_args)) return e;
  auto* state = static_cast<InstanceState*>(state_args.state);

  XLA_FFI_DeviceOrdinal_Get_Args device;
  device.struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE;
  device.extension_start = nullptr;
  device.ctx = frame->ctx;
  if (XLA_FFI_Error* e = api->XLA_FFI_DeviceOrdinal_Get(&device)) return e;

  XLA_FFI_RunId_Get_Args run;
  run.struct_size = XLA_FFI_RunId_Get_Args_STRUCT_SIZE;
  run.extension_start = nullptr;
  run.ctx = frame->ctx;
  if (XLA_FFI_Error* e = api->XLA_FFI_RunId_Get(&run)) return e;

  Runtime* rt = state->runtime;
  Failure failure;
  if (!rt->open.load(std::memory_order_acquire)) {
    return MakeError(api, {ErrorKind::kInvalidUsage,
                           "used after stratacl_jax.shutdown(); call "
                           "initialize() and compile again"});
  }
  if (InForkedChild()) {
    return MakeError(api, {ErrorKind::kInvalidUsage,
                           "a child made by fork() has no rank; start workers "
                           "with the 'spawn' method"});
  }
  Binding* b = state->instance->Of(device.device_ordinal);
  if (b == nullptr) {
    return MakeError(
        api, {ErrorKind::kInvalidUsage,
              "device " + std::to_string(device.device_ordinal) +
                  " belongs to no group of " + state->instance->Describe()});
  }
  if (state->instance->cloned() && rt->world->divergent_programs()) {
    failure = {ErrorKind::kMismatch, kDivergentPrograms};
    rt->engine->Refuse(b, run.run_id, &failure);
    return MakeError(api, failure);
  }

  // By value: XLA reuses the frame as soon as this returns.
  const int64_t n = frame->args.size;
  const void* in_stack[kStackLeaves];
  void* out_stack[kStackLeaves];
  std::vector<const void*> in_heap;
  std::vector<void*> out_heap;
  const void** in = in_stack;
  void** out = out_stack;
  if (n > kStackLeaves) {
    in_heap.resize(static_cast<size_t>(n));
    out_heap.resize(static_cast<size_t>(n));
    in = in_heap.data();
    out = out_heap.data();
  }
  for (int64_t i = 0; i < n; ++i) {
    in[i] = static_cast<XLA_FFI_Buffer*>(frame->args.args[i])->data;
    out[i] = static_cast<XLA_FFI_Buffer*>(frame->rets.rets[i])->data;
  }

  std::unique_ptr<Op> pending;
  const Outcome o =
      rt->engine->Start(b, run.run_id, in, out, &pending, &failure);
  if (o == Outcome::kDone) return nullptr;
  if (o == Outcome::kFailed) return MakeError(api, failure);

  XLA_FFI_Future_Create_Args create;
  create.struct_size = XLA_FFI_Future_Create_Args_STRUCT_SIZE;
  create.extension_start = nullptr;
  create.future = nullptr;
  if (XLA_FFI_Error* e = api->XLA_FFI_Future_Create(&create)) return e;
  XLA_FFI_Future* future = create.future;
  frame->future = future;
  rt->pool.Submit(
      std::move(pending), [api, future](Outcome done, const Failure& f) {
        XLA_FFI_Error* e = nullptr;
        if (done == Outcome::kDone) {
          XLA_FFI_Future_SetAvailable_Args args;
          args.struct_size = XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE;
          args.extension_start = nullptr;
          args.future = future;
          e = api->XLA_FFI_Future_SetAvailable(&args);
        } else {
          XLA_FFI_Future_SetError_Args args;
          args.struct_size = XLA_FFI_Future_SetError_Args_STRUCT_SIZE;
          args.extension_start = nullptr;
          args.future = future;
          args.error = MakeError(api, f);
          e = api->XLA_FFI_Future_SetError(&args);
        }
        if (e != nullptr) {
          XLA_FFI_Error_Destroy_Args destroy;
          destroy.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
          destroy.extension_start = nullptr;
          destroy.error = e;
          api->XLA_FFI_Error_Destroy(&destroy);
        }
      });
  return nullptr;
}

}  // namespace

void* InstantiateHandler() { return reinterpret_cast<void*>(kInstantiate); }
void* ExecuteHandler() { return reinterpret_cast<void*>(&Execute); }
void* StateTypeId() { return &InstanceState::id; }
void* StateTypeInfo() { return &InstanceState::info; }

}  // namespace strata
