"""Generation on the host: requests, batches, the prefix cache, `generate` and `stream`."""
