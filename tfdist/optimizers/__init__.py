"""Updates of variables: fused kernels, and optimizer state that is sharded over processes."""
