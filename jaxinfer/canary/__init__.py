"""What is known of a canary beside the stable version, and whether it is worse: pure, no JAX."""
