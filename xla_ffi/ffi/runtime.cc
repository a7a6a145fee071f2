#include "ffi/runtime.h"

namespace strata {

std::atomic<Runtime*>& CurrentRuntime() {
  static std::atomic<Runtime*> current{nullptr};
  return current;
}

namespace {
std::mutex scope_mutex;
std::shared_ptr<Module>& Scope() {
  static auto* scope = new std::shared_ptr<Module>();
  return *scope;
}
}  // namespace

void ModuleScope::Begin() {
  std::lock_guard<std::mutex> lock(scope_mutex);
  Scope() = std::make_shared<Module>();
}

void ModuleScope::End() {
  std::lock_guard<std::mutex> lock(scope_mutex);
  Scope().reset();
}

std::shared_ptr<Module> ModuleScope::Current() {
  std::lock_guard<std::mutex> lock(scope_mutex);
  return Scope();
}

}  // namespace strata
