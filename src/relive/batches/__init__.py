"""What readers hand out: TensorDicts, and padded sequences."""
