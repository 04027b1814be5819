"""SGLang: field names, bodies, ids, aborts and metadata."""
