"""Steps: their schema, nested fields and checks, and the bridge between NumPy and torch."""
