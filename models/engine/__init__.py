"""Generation on the host: `Engine`, `generate` and `stream`, their scheduler and page pools."""
