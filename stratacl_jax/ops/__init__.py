"""The operators: one file each, always in the same order.

Public function, primitive, abstract evaluation, lowering, batching, jvp,
transpose. What they share is in `_call` (the custom call) and `_axes` (names,
groups, varying axes).
"""
