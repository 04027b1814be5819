"""vLLM's HTTP interface on top of the simulated engine."""
