"""Race detector: vector clocks, the happens-before relation, and shadow memory."""
