from rlbench import plan

from pyrep.objects import world


def Dummy(name: str) -> world.Tree:  # noqa: N802 - PyRep's name
    """Stands for a reset too: the world is placed anew, by the global generator as RLBench does."""
    plan.strike("measure")
    return world.api(world.World.drawn()).Dummy(name)
