"""The forms of a batch: TensorDicts and padded sequences."""
