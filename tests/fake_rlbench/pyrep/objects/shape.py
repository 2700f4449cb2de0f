from pyrep.objects import world


class Shape:
    def __new__(cls, name: str) -> world.Thing:
        return world.World.latest.things[name]

    create = world.Probe
