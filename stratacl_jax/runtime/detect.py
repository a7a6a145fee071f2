"""Ranks that somebody else started: `srun`, `mpirun` or `mpiexec`."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from .errors import InvalidUsage


class Cluster(NamedTuple):
    """Where this process stands in a job.

    Attributes:
      coordinator: "host:port" of JAX's coordination service, which process 0 will
        start, or None where JAX knows it by itself.
      num_processes: processes in the job, at least 2.
      process_id: this process's number, from 0.
      source: what told us, for messages.
    """

    coordinator: str | None
    num_processes: int
    process_id: int
    source: str

    def connect(self) -> None:
        """Calls `jax.distributed.initialize` as this job needs it."""
        import jax

        if self.coordinator is None:
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(
                self.coordinator,
                self.num_processes,
                self.process_id,
                cluster_detection_method="deactivate",
            )


class _Starter(NamedTuple):
    """A way to start ranks and the variables it sets."""

    source: str
    count_env: str
    number_env: str
    local_count_env: str  # processes of the job on this host
    marks: tuple[str, ...] = ()  # also set
    jax_knows: bool = False  # JAX's own detection finds the coordinator


_STARTERS = (
    _Starter(
        "srun",
        *("SLURM_NTASKS", "SLURM_PROCID", ""),
        marks=("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_LOCALID"),
        jax_knows=True,
    ),
    _Starter(
        "mpirun (Open MPI 4)",
        *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", ""),
        marks=("OMPI_MCA_orte_hnp_uri",),
        jax_knows=True,
    ),
    _Starter(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Starter("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
)


def detect_cluster(environ: Mapping[str, str] | None = None) -> Cluster | None:
    """The job this process was started in, or None if it stands alone.

    A job of one process is none. `stratacl launch` is not looked for: under it JAX
    is connected already.

    Raises:
      InvalidUsage: processes on several hosts, and nothing says where they meet;
        or a count or number that is none.
    """
    env = os.environ if environ is None else environ
    for starter in _STARTERS:
        names = (starter.count_env, starter.number_env, *starter.marks)
        if all(name in env for name in names):
            return _cluster(starter, env)
    return None


def _cluster(starter: _Starter, env: Mapping[str, str]) -> Cluster | None:
    try:
        count, number = int(env[starter.count_env]), int(env[starter.number_env])
    except ValueError:
        raise InvalidUsage(
            f"{starter.count_env}={env[starter.count_env]!r} and "
            f"{starter.number_env}={env[starter.number_env]!r} from "
            f"{starter.source} should be whole numbers"
        ) from None
    if count <= 1:
        return None
    coordinator = env.get("JAX_COORDINATOR_ADDRESS") or None
    if coordinator is None and not starter.jax_knows:
        if env.get(starter.local_count_env) != str(count):
            raise InvalidUsage(
                f"{starter.source} started {count} processes on several hosts, which "
                "do not know where to meet: set JAX_COORDINATOR_ADDRESS=HOST:PORT "
                "for all of them (the host of process 0, a free port), or call "
                "jax.distributed.initialize(...) first"
            )
        coordinator = f"127.0.0.1:{_port(env)}"
    return Cluster(coordinator, count, number, starter.source)


def _port(env: Mapping[str, str]) -> int:
    """A port that the processes of one job on one host agree on.

    From the job's name, or from the starter's process, which is the parent of all.
    The range is above the ports that Linux hands out; JAX uses it in the same way.
    """
    job = env.get("PMIX_NAMESPACE") or str(os.getppid())
    return 61440 + zlib.crc32(f"{os.getuid()} {job}".encode()) % 4096
