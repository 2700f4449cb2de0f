class BoundaryError(Exception):
    pass


class InvalidActionError(Exception):
    pass


class TaskEnvironmentError(Exception):
    pass
