"""All private parts of TensorFlow and Keras that tfdist uses."""
