"""The programs of `matching` with a persistent compilation cache; counts its hits.

jaxlib 0.10.2 gives each process of a job its own key, and JAX lets only the first
write: as things are, rank 0 loads what the others compile. With "one-key" all
ranks share the entries, as on a jaxlib whose keys do not depend on the process.
"""

import collections
import sys

import jax
from jax._src import cache_key

EVENTS: collections.Counter = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: EVENTS.update([name]))
if sys.argv[1] == "one-key":
    assert hasattr(cache_key, "_hash_accelerator_config")
    cache_key._hash_accelerator_config = lambda *_: None

import matching  # noqa: E402
from ranks import run_all, say  # noqa: E402

chosen = sys.argv[2:]
try:
    run_all([c for c in matching.CASES if not chosen or c.__name__ in chosen])
finally:
    say("hits", EVENTS["/jax/compilation_cache/cache_hits"])
    say("misses", EVENTS["/jax/compilation_cache/cache_misses"])
