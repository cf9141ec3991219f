"""The planner: from an account's state to the Kubernetes objects that it should have. Pure, no I/O.

`converge` and `resync` call it; `consumers.kube` carries the plan out.
"""
