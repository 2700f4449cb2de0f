from enum import Enum


class PrimitiveShape(Enum):
    CUBOID = 0
