"""vLLM: headers, ids, aborts and metadata."""
