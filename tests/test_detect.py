"""Jobs that other programs started, from what they put into the environment."""

import pytest

from stratacl_jax.runtime.detect import detect_cluster
from stratacl_jax.runtime.errors import InvalidUsage

SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_NODELIST": "node[01-02]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-1@1",
}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}


def test_alone():
    assert detect_cluster({}) is None
    assert detect_cluster({**SLURM, "SLURM_NTASKS": "1"}) is None
    # In a batch script, outside a step.
    assert detect_cluster({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None


def test_where_jax_knows_the_coordinator():
    found = detect_cluster(SLURM)
    assert found[:3] == (None, 4, 3) and found.source == "srun"
    old = {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:5"}
    assert detect_cluster(old)[:3] == (None, 4, 2)


@pytest.mark.parametrize("env, place", [(OPEN_MPI, (4, 2)), (HYDRA, (2, 1))])
def test_one_host_agrees_on_a_port(env, place):
    found = detect_cluster(env)
    assert found[1:3] == place
    host, port = found.coordinator.split(":")
    assert host == "127.0.0.1" and 61440 <= int(port) < 65536
    assert detect_cluster(dict(env)) == found


def test_ports_differ_between_jobs():
    other = {**OPEN_MPI, "PMIX_NAMESPACE": "prterun-host-2@1"}
    assert detect_cluster(other).coordinator != detect_cluster(OPEN_MPI).coordinator


def test_several_hosts_need_an_address():
    env = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(InvalidUsage, match="JAX_COORDINATOR_ADDRESS"):
        detect_cluster(env)
    found = detect_cluster({**env, "JAX_COORDINATOR_ADDRESS": "head:1234"})
    assert found[:3] == ("head:1234", 4, 2)


def test_no_number():
    with pytest.raises(InvalidUsage, match="PMI_SIZE='two'"):
        detect_cluster({**HYDRA, "PMI_SIZE": "two"})
