"""A second of collectives on two ranks, for `stratacl info --ledger`.

Run by each rank under the launcher; rank 0 prints its ledger as one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from .errors import StrataError

_MARK = "stratacl-ledger "
_ELEMENTS = 1 << 18  # 1 MiB of float32
_STEPS = 50
_DEADLINE_S = 120


def measure() -> dict[str, Any]:
    """Starts two ranks and returns the ledger of rank 0.

    Raises:
      StrataError: they failed; the message holds what they said.
    """
    # -P: this installation, even where a checkout of it is the working directory.
    command = [
        *(sys.executable, "-P", "-m", "stratacl_jax", "launch", "-n", "2"),
        *("--no-label", "--timeout", str(_DEADLINE_S), "-m", __name__),
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=_DEADLINE_S + 30, check=False
    )
    for line in result.stdout.splitlines():
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    raise StrataError(
        f"the two ranks ended with code {result.returncode}:\n{result.stderr.strip()}"
    )


def main() -> None:
    """What a rank does: a step that sums, gathers and makes a new operand."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    import stratacl_jax as scl

    scl.initialize()
    mesh = Mesh(np.array(jax.devices()), ("i",))

    @jax.jit
    def step(x: Any) -> Any:
        def on_one_rank(x: Any) -> Any:
            every = scl.all_gather(x + 1, "i")
            return jnp.mean(every, axis=0) + scl.psum(x, "i")

        return jax.shard_map(on_one_rank, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(
            x
        )

    x = jax.jit(
        lambda: jnp.zeros(mesh.size * _ELEMENTS),
        out_shardings=jax.NamedSharding(mesh, P("i")),
    )()
    begin = time.monotonic()
    for _ in range(_STEPS):
        x = step(x) * 0.25
    jax.block_until_ready(x)
    ledger = scl.ledger().as_dict() | {"seconds": time.monotonic() - begin}
    if jax.process_index() == 0:
        print(_MARK + json.dumps(ledger), flush=True)


if __name__ == "__main__":
    main()
