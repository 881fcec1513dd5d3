"""What a step is: its schema, its nested fields, its check, and the bridge between NumPy and torch."""
