#include "engine/instance.h"

#include <algorithm>

namespace strata {
namespace {

std::mutex sites_mutex;
std::unordered_set<uint64_t>& SiteSet() {
  static auto* set = new std::unordered_set<uint64_t>();
  return *set;
}

}  // namespace

void Sites::Add(uint64_t site) {
  std::lock_guard<std::mutex> lock(sites_mutex);
  SiteSet().insert(site);
}

bool Sites::Known(uint64_t site) {
  std::lock_guard<std::mutex> lock(sites_mutex);
  return SiteSet().count(site) != 0;
}

uint64_t SiteOf(const Spec& spec) {
  uint64_t h =
      HashBytes("stratacl", 8,
                static_cast<uint64_t>(spec.op) | uint64_t(spec.reduce) << 8);
  auto add = [&h](int64_t v) { h = HashBytes(&v, sizeof(v), h); };
  add(spec.channel);
  for (int64_t d : spec.dims) add(d);
  for (const Leaf& l : spec.leaves) {
    add(static_cast<int64_t>(l.dtype));
    add(l.count);
    add(l.element_bytes);
  }
  for (const auto& [s, d] : spec.permutation) {
    add(s);
    add(d);
  }
  return h;
}

const char* OpName(OpKind op, ReduceOp reduce) {
  switch (op) {
    case OpKind::kPsum:
      return reduce == ReduceOp::kSum   ? "psum"
             : reduce == ReduceOp::kMax ? "pmax"
                                        : "pmin";
    case OpKind::kPsumScatter:
      return "psum_scatter";
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kPpermute:
      return "ppermute";
    case OpKind::kBarrier:
      return "barrier";
  }
  return "collective";
}

std::string DTypeName(DType t) {
  switch (t) {
    case DType::kPred:
      return "bool";
    case DType::kS8:
      return "int8";
    case DType::kS16:
      return "int16";
    case DType::kS32:
      return "int32";
    case DType::kS64:
      return "int64";
    case DType::kU8:
      return "uint8";
    case DType::kU16:
      return "uint16";
    case DType::kU32:
      return "uint32";
    case DType::kU64:
      return "uint64";
    case DType::kF16:
      return "float16";
    case DType::kF32:
      return "float32";
    case DType::kF64:
      return "float64";
    case DType::kC64:
      return "complex64";
    case DType::kBF16:
      return "bfloat16";
    case DType::kC128:
      return "complex128";
  }
  return "type" + std::to_string(static_cast<int>(t));
}

std::string DescribeCall(OpKind op, ReduceOp reduce, DType dtype,
                         const std::vector<int64_t>& dims, size_t leaves,
                         size_t group) {
  std::string s = OpName(op, reduce);
  if (op != OpKind::kBarrier) {
    s += " of " + DTypeName(dtype) + "[";
    for (size_t i = 0; i < dims.size(); ++i) {
      s += (i ? "," : "") + std::to_string(dims[i]);
    }
    s += "]";
    if (leaves > 1) s += " and " + std::to_string(leaves - 1) + " more arrays";
  }
  return s + " over " + std::to_string(group) + " ranks";
}

Instance::Instance(World* world, CommRegistry* comms, Spec spec,
                   std::shared_ptr<Module> module)
    : spec_(std::move(spec)), site_(SiteOf(spec_)), module_(std::move(module)) {
  for (const auto& group : spec_.groups) Bind(world, comms, group);
  Sites::Add(site_);
  std::lock_guard<std::mutex> lock(module_->mutex);
  module_->instances.push_back(this);
  for (const auto& b : bindings_) {
    auto& all = module_->comms;
    if (std::find(all.begin(), all.end(), b->comm) == all.end()) {
      all.push_back(b->comm);
    }
  }
}

Instance::~Instance() {
  std::lock_guard<std::mutex> lock(module_->mutex);
  // Order and count are part of keys: keep the place.
  std::replace(module_->instances.begin(), module_->instances.end(), this,
               static_cast<Instance*>(nullptr));
}

void Instance::Bind(World* world, CommRegistry* comms,
                    const std::vector<int64_t>& group) {
  std::vector<int> members;
  bool any_mine = false;
  for (int64_t id : group) {
    const int r = world->RankOfDevice(id);
    if (r < 0) {
      throw Error(ErrorKind::kInvalidUsage,
                  "device " + std::to_string(id) +
                      " is not a rank of this job; groups hold the ids of "
                      "jax.devices()");
    }
    members.push_back(r);
    any_mine = any_mine || world->rank(r).mine;
  }
  if (!any_mine) return;
  int64_t bytes = 0;
  for (const Leaf& l : spec_.leaves) bytes += l.count * l.element_bytes;
  for (size_t me = 0; me < members.size(); ++me) {
    if (!world->rank(members[me]).mine) continue;
    auto b = std::make_unique<Binding>();
    b->instance = this;
    b->comm = comms->Get(members, static_cast<int>(me));
    b->site = site_;
    b->operand_bytes = static_cast<uint64_t>(bytes);
    const int64_t packed = WindowLayout(spec_.leaves).back();
    const bool eager =
        static_cast<uint64_t>(packed) <= world->arena().geometry().eager_bytes;
    const bool reachable =
        b->comm->one_process()
            ? world->settings().direct
            : world->settings().registration != Registration::kStaged;
    b->transport =
        !eager && reachable ? Transport::kDirect : Transport::kStaged;
    Problem p;
    p.op = spec_.op;
    p.reduce = spec_.reduce;
    p.leaves = spec_.leaves;
    p.ranks = static_cast<int>(members.size());
    p.me = static_cast<int>(me);
    p.permutation = spec_.permutation;
    p.transport = b->transport;
    p.chunk_bytes = static_cast<int64_t>(world->settings().chunk_bytes);
    p.algorithm = eager ? Algorithm::kOneShot
                        : static_cast<Algorithm>(world->settings().algorithm);
    b->plan = BuildPlan(p);
    while (b->prologue < static_cast<int>(b->plan.stages.size()) &&
           b->plan.stages[static_cast<size_t>(b->prologue)].needs.empty()) {
      ++b->prologue;
    }
    // A direct plan's stages without needs still run after the post when the
    // post must precede them; they have none of that, so they may run before.
    const auto& readers = b->plan.readers;
    const Stage* last =
        b->plan.stages.empty() ? nullptr : &b->plan.stages.back();
    for (const Stage& s : b->plan.stages) {
      for (const Reduce& r : s.reduces) {
        b->stored_to = b->stored_to || !r.copies.empty();
      }
    }
    // Symmetric: who stores to peers is stored to.  Then the last stage says
    // that they are through with this rank's memory.
    b->awaits_readers =
        b->transport == Transport::kDirect &&
        !(b->stored_to && last->reduces.empty() && last->slices.empty());
    const auto outputs = [&](const Leaf& l) {
      const int64_t bytes = l.count * l.element_bytes;
      const int64_t n = static_cast<int64_t>(members.size());
      return spec_.op == OpKind::kAllGather     ? bytes * n
             : spec_.op == OpKind::kPsumScatter ? bytes / n
                                                : bytes;
    };
    for (const Leaf& l : spec_.leaves) {
      b->in_bytes.push_back(static_cast<uint64_t>(l.count * l.element_bytes));
      b->out_bytes.push_back(static_cast<uint64_t>(outputs(l)));
    }
    b->all_read_me = readers.size() + 1 == members.size() && !readers.empty();
    if (!b->all_read_me && !readers.empty()) {
      if (readers.size() > 1) {
        throw Error(ErrorKind::kUnsupported,
                    "a plan whose operand is read by some but not all ranks");
      }
      b->one_reader = readers[0];
    }
    Description& d = b->description;
    d.op = static_cast<uint8_t>(spec_.op);
    d.reduce = static_cast<uint8_t>(spec_.reduce);
    d.dtype =
        spec_.leaves.empty() ? 0 : static_cast<uint8_t>(spec_.leaves[0].dtype);
    d.dims_used =
        static_cast<uint8_t>(std::min<size_t>(spec_.dims.size(), kShapeDims));
    for (size_t i = 0; i < d.dims_used; ++i) {
      d.dims[i] = static_cast<uint64_t>(spec_.dims[i]);
    }
    d.leaves = static_cast<uint16_t>(spec_.leaves.size());
    d.group_size = static_cast<uint16_t>(members.size());
    d.member_mask = b->comm->member_mask();
    bindings_.push_back(std::move(b));
  }
}

uint64_t Instance::Clone() {
  const uint64_t known = clone_.load(std::memory_order_relaxed);
  if (known != 0) return known;
  std::lock_guard<std::mutex> lock(module_->mutex);
  uint64_t index = 0, count = 0;
  for (const Instance* i : module_->instances) {
    if (i == this) index = count;
    if (i != nullptr && i->site_ == site_) ++count;
  }
  const uint64_t packed = index << 52 | count << 40;
  clone_.store(packed, std::memory_order_relaxed);
  return packed;
}

std::string Instance::Describe() const {
  return DescribeCall(
      spec_.op, spec_.reduce,
      spec_.leaves.empty() ? DType::kPred : spec_.leaves[0].dtype, spec_.dims,
      spec_.leaves.size(), bindings_.empty() ? 0 : bindings_[0]->comm->size());
}

}  // namespace strata
