"""From NATS to Kubernetes: every account is made to look as its state in the bucket says."""
