"""From examples to global batches: order, decoding, augmentation, and the parts that replicas take."""
