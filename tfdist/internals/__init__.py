"""The private parts of TensorFlow and Keras that tfdist uses, all of them."""
