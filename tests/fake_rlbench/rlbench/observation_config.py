from __future__ import annotations


class CameraConfig:
    def __init__(self) -> None:
        self.rgb = self.depth = self.mask = self.point_cloud = True
        self.image_size = (128, 128)

    def set_all(self, value: bool) -> None:
        self.rgb = self.depth = self.mask = self.point_cloud = value


class ObservationConfig:
    def __init__(self) -> None:
        self.left_shoulder_camera = CameraConfig()
        self.right_shoulder_camera = CameraConfig()
        self.overhead_camera = CameraConfig()
        self.wrist_camera = CameraConfig()
        self.front_camera = CameraConfig()
        self.joint_positions = self.gripper_open = self.gripper_pose = True
        self.task_low_dim_state = False

    def cameras(self) -> dict[str, CameraConfig]:
        return {k.removesuffix("_camera"): v for k, v in vars(self).items() if isinstance(v, CameraConfig)}

    def set_all(self, value: bool) -> None:
        for camera in self.cameras().values():
            camera.set_all(value)
        self.joint_positions = self.gripper_open = self.gripper_pose = self.task_low_dim_state = value
