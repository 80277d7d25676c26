"""General helpers, which import nothing else of `models`."""
