#include "plan/describe.h"

#include <sstream>

namespace strata {
namespace {

// {0-3, 7}
std::string Set(const std::vector<uint16_t>& ranks) {
  std::string text = "{";
  for (size_t i = 0; i < ranks.size();) {
    size_t j = i;
    while (j + 1 < ranks.size() && ranks[j + 1] == ranks[j] + 1) ++j;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (j > i) text += "-" + std::to_string(ranks[j]);
    i = j + 1;
  }
  return text + "}";
}

std::string Text(const Addr& addr) {
  if (addr.space == Space::kZero) return "zeros";
  std::string rank = "r" + std::to_string(addr.rank);
  std::string buffer = "[" + std::to_string(addr.buffer) + "]";
  std::string offset = "+" + std::to_string(addr.offset);
  switch (addr.space) {
    case Space::kInput:
      return rank + ".input" + buffer + offset;
    case Space::kOutput:
      return rank + ".output" + buffer + offset;
    case Space::kWindow:
      return rank + ".window" + offset;
    case Space::kZero:
      break;
  }
  return rank + ".unknown" + offset;
}

const char* Verb(const Slice& slice) {
  if (slice.src.space == Space::kZero) return "zero ";
  bool load = slice.action == Action::kLoad;
  // Who executes: a load writes its own memory, a store reads it.
  if (slice.peer == (load ? slice.dst.rank : slice.src.rank)) return "copy ";
  return load ? "load " : "store";
}

}  // namespace

const char* NameOf(OpKind op) {
  switch (op) {
    case OpKind::kPsum:
      return "psum";
    case OpKind::kPsumScatter:
      return "psum_scatter";
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kPpermute:
      return "ppermute";
    case OpKind::kBarrier:
      return "barrier";
  }
  return "unknown";
}

const char* NameOf(DType dtype) {
  switch (dtype) {
    case DType::kPred:
      return "pred";
    case DType::kS8:
      return "s8";
    case DType::kS16:
      return "s16";
    case DType::kS32:
      return "s32";
    case DType::kS64:
      return "s64";
    case DType::kU8:
      return "u8";
    case DType::kU16:
      return "u16";
    case DType::kU32:
      return "u32";
    case DType::kU64:
      return "u64";
    case DType::kF16:
      return "f16";
    case DType::kF32:
      return "f32";
    case DType::kF64:
      return "f64";
    case DType::kC64:
      return "c64";
    case DType::kBF16:
      return "bf16";
    case DType::kC128:
      return "c128";
  }
  return "unknown";
}

const char* NameOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMin:
      return "min";
  }
  return "unknown";
}

std::string Describe(const Plan& plan) {
  std::ostringstream out;
  out << plan.algorithm << ": " << plan.stages.size()
      << (plan.stages.size() == 1 ? " stage" : " stages") << ", window "
      << plan.window_bytes << " B, reads " << Set(plan.sources) << ", read by "
      << Set(plan.readers) << "\n";
  for (size_t k = 0; k < plan.stages.size(); ++k) {
    const Stage& stage = plan.stages[k];
    out << "stage " << k;
    if (!stage.needs.empty()) {
      std::string what =
          k == 0 ? "the arrival" : "stage " + std::to_string(k - 1);
      out << ", after " << what << " of " << Set(stage.needs);
    }
    out << "\n";
    for (const Slice& slice : stage.slices) {
      out << "  " << Verb(slice) << "  " << Text(slice.src) << " -> "
          << Text(slice.dst) << ", " << slice.bytes << " B\n";
    }
    for (const Reduce& reduce : stage.reduces) {
      out << "  " << NameOf(reduce.op) << "    " << reduce.count << " "
          << NameOf(reduce.dtype) << ": ";
      for (size_t i = 0; i < reduce.srcs.size(); ++i) {
        out << (i > 0 ? ", " : "") << Text(reduce.srcs[i]);
      }
      out << " -> " << Text(reduce.dst);
      for (const Addr& copy : reduce.copies) out << ", " << Text(copy);
      out << "\n";
    }
  }
  return out.str();
}

}  // namespace strata
