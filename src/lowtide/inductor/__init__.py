"""Plans that run with the kernels that Inductor generates."""
