"""A stand-in for the RLBench package: the names `envs/rlbench_child.py` uses, our own code, a world of one joint.

On the path of the child only; never imported by a test.  Its faults are those of `plan.py`.
"""
