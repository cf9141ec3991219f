"""The border to the Kubernetes API server: the only folder that imports kubernetes_asyncio.

`converge`, `resync` and `kubeconfig` call it. What should be in a cluster is left to `consumers.plan`.
"""
