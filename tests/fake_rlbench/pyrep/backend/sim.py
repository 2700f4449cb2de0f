from rlbench import plan

sim_intparam_program_version = 1


def simGetInt32Parameter(parameter: int) -> int:  # noqa: N802 - PyRep's name
    assert parameter == sim_intparam_program_version
    return plan.get("version", 40100)
