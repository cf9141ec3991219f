"""spur-events: makes Kubernetes follow an HPC accounting database within seconds, over NATS JetStream."""
