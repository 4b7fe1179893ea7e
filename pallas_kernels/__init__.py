"""Device kernels as pure array functions. Imports jax and nothing of ours."""
