#include "ffi/plan_binding.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/describe.h"
#include "plan/plan.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace strata {
namespace {

template <typename T>
T Choose(const char* what, const std::string& name,
         std::initializer_list<std::pair<const char*, T>> choices) {
  std::string known;
  for (const auto& [text, value] : choices) {
    if (name == text) return value;
    known += (known.empty() ? "" : ", ") + std::string(text);
  }
  throw std::invalid_argument(std::string(what) + " \"" + name +
                              "\" is not one of " + known);
}

using LeafTuple = std::tuple<int64_t, int, int64_t>;

Problem ProblemOf(const std::string& op, const std::string& reduce,
                  const std::vector<LeafTuple>& leaves, int ranks, int me,
                  const std::vector<std::pair<int, int>>& permutation,
                  const std::string& transport, int64_t chunk_bytes,
                  const std::string& algorithm) {
  Problem problem;
  problem.op = Choose<OpKind>("op", op,
                              {{"psum", OpKind::kPsum},
                               {"psum_scatter", OpKind::kPsumScatter},
                               {"all_gather", OpKind::kAllGather},
                               {"ppermute", OpKind::kPpermute},
                               {"barrier", OpKind::kBarrier}});
  problem.reduce = Choose<ReduceOp>("reduce", reduce,
                                    {{"sum", ReduceOp::kSum},
                                     {"max", ReduceOp::kMax},
                                     {"min", ReduceOp::kMin}});
  problem.transport = Choose<Transport>(
      "transport", transport,
      {{"staged", Transport::kStaged}, {"direct", Transport::kDirect}});
  problem.algorithm = Choose<Algorithm>("algorithm", algorithm,
                                        {{"auto", Algorithm::kAuto},
                                         {"one_shot", Algorithm::kOneShot},
                                         {"two_phase", Algorithm::kTwoPhase}});
  for (const auto& [count, dtype, element_bytes] : leaves) {
    if (dtype < 0 || dtype > 255) {
      throw std::invalid_argument("type code " + std::to_string(dtype) +
                                  " is not one of XLA's");
    }
    problem.leaves.push_back({count, static_cast<DType>(dtype), element_bytes});
  }
  problem.ranks = ranks;
  problem.me = me;
  problem.permutation = permutation;
  problem.chunk_bytes = chunk_bytes;
  return problem;
}

nb::tuple ToPython(const Addr& addr) {
  const char* space = "zero";
  if (addr.space == Space::kInput) space = "input";
  if (addr.space == Space::kOutput) space = "output";
  if (addr.space == Space::kWindow) space = "window";
  return nb::make_tuple(space, addr.rank, addr.buffer, addr.offset);
}

nb::dict ToPython(const Slice& slice) {
  nb::dict d;
  d["peer"] = slice.peer;
  d["src"] = ToPython(slice.src);
  d["dst"] = ToPython(slice.dst);
  d["bytes"] = slice.bytes;
  d["action"] = slice.action == Action::kLoad ? "load" : "store";
  return d;
}

nb::dict ToPython(const Reduce& reduce) {
  nb::list srcs;
  for (const Addr& src : reduce.srcs) srcs.append(ToPython(src));
  nb::dict d;
  d["srcs"] = srcs;
  nb::list copies;
  for (const Addr& copy : reduce.copies) copies.append(ToPython(copy));
  d["dst"] = ToPython(reduce.dst);
  d["copies"] = copies;
  d["count"] = reduce.count;
  d["dtype"] = static_cast<int>(reduce.dtype);
  d["op"] = NameOf(reduce.op);
  return d;
}

nb::dict ToPython(const Plan& plan) {
  nb::list stages;
  for (const Stage& stage : plan.stages) {
    nb::list slices, reduces;
    for (const Slice& slice : stage.slices) slices.append(ToPython(slice));
    for (const Reduce& reduce : stage.reduces) reduces.append(ToPython(reduce));
    nb::dict d;
    d["slices"] = slices;
    d["reduces"] = reduces;
    d["needs"] = nb::cast(stage.needs);
    stages.append(d);
  }
  nb::dict d;
  d["algorithm"] = plan.algorithm;
  d["stages"] = stages;
  d["window_bytes"] = plan.window_bytes;
  d["sources"] = nb::cast(plan.sources);
  d["readers"] = nb::cast(plan.readers);
  return d;
}

template <typename Function>
void Bind(nb::module_& m, const char* name, Function function,
          const char* doc) {
  m.def(
      name,
      [function](const std::string& op, const std::string& reduce,
                 const std::vector<LeafTuple>& leaves, int ranks, int me,
                 const std::vector<std::pair<int, int>>& permutation,
                 const std::string& transport, int64_t chunk_bytes,
                 const std::string& algorithm) {
        return function(
            BuildPlan(ProblemOf(op, reduce, leaves, ranks, me, permutation,
                                transport, chunk_bytes, algorithm)));
      },
      nb::kw_only(), "op"_a, "reduce"_a = "sum",
      "leaves"_a = std::vector<LeafTuple>{}, "ranks"_a, "me"_a,
      "permutation"_a = std::vector<std::pair<int, int>>{},
      "transport"_a = "staged", "chunk_bytes"_a = 0, "algorithm"_a = "auto",
      doc);
}

}  // namespace

void BindPlan(nb::module_& m) {
  Bind(
      m, "build_plan", [](const Plan& plan) { return ToPython(plan); },
      R"(The plan of one rank for one operator call, as plain dicts and lists.

op: "psum", "psum_scatter", "all_gather", "ppermute" or "barrier".
reduce: "sum", "max" or "min".
leaves: (elements of the input leaf, XLA type code, bytes an element), each.
ranks, me: size of the group and position in it.
permutation: (source, destination) positions, for ppermute.
transport: "staged" or "direct".  chunk_bytes: 0 does not cut.
algorithm: "auto", "one_shot" or "two_phase", for psum.

Addresses are (space, rank, buffer, offset in bytes).
Raises ValueError, with a sentence that says what to change.)");
  Bind(
      m, "describe_plan", [](const Plan& plan) { return Describe(plan); },
      "The plan that build_plan(...) returns, as text for people.");
}

}  // namespace strata
