"""Training by hand, on one device, with gradients at the weights of before the last update: what `2bw` promises."""

import tensorflow as tf


def train(model, x, y, batch_size, epochs):
    """Trains a compiled `model` in the order of the examples; an epoch begins with gradients at the newest weights."""
    weights = model.trainable_variables
    for _ in range(epochs):
        previous = values(weights)
        for begin in range(0, len(x), batch_size):
            newest = values(weights)
            assign(weights, previous)
            part = slice(begin, begin + batch_size)
            with tf.GradientTape() as tape:
                loss = model.compute_loss(y=y[part], y_pred=model(x[part], training=True))
                loss = model.optimizer.scale_loss(loss)
            gradients = tape.gradient(loss, [one.value for one in weights])
            assign(weights, newest)
            model.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            previous = newest
    model.optimizer.finalize_variable_values(weights)


def values(variables):
    return [one.numpy() for one in variables]


def assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
