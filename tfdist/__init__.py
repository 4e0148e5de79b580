"""One interface over TensorFlow's distribution strategies for Keras 3."""

__version__ = "0.1.0"
