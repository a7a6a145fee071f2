// Owns: the addresses that Python wraps in capsules for jax.ffi.
#pragma once

namespace strata {

void* InstantiateHandler();
void* ExecuteHandler();
void* StateTypeId();
void* StateTypeInfo();

}  // namespace strata
