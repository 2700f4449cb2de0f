from pyrep.objects import world

VisionSensor = world.Camera
