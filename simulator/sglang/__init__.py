"""SGLang's HTTP interface over the simulated engine."""
