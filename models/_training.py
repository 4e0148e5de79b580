"""How a model is usually trained: its optimizer, and its learning rate for a batch of a certain size.

A learning rate is chosen for a reference batch. For other sizes it is scaled: by the ratio of the sizes with SGD (P.
Goyal and others, "Accurate, large minibatch SGD: training ImageNet in 1 hour", arXiv 1706.02677, section 2.1), and by
the square root of the ratio with optimizers that divide by the size of the gradient (S. Malladi and others, "On the
SDEs and scaling rules for adaptive gradient algorithms", NeurIPS 2022).

Synopsis:

    >>> resnet = Training("sgd", learning_rate=0.1, batch_size=256, momentum=0.9, weight_decay=1e-4)
    >>> resnet.rate(32), resnet.rate(1024)
    (0.0125, 0.4)
    >>> Training("adam", learning_rate=1e-3, batch_size=32).rate(128)
    0.002
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """The usual optimizer of a model, and its settings.

    Attributes:
        optimizer: the class name of one of Keras' optimizers in lower case.
        learning_rate: the rate for `batch_size`.
        batch_size: the reference batch: the examples per update that `learning_rate` was chosen for.
        momentum: of SGD.
        weight_decay: with SGD the factor of the kernels in the gradient, that is L2 regularization; with other
            optimizers decoupled from the gradient (Loshchilov and Hutter, ICLR 2019).
        beta_1: of Adam and its variants.
    """

    optimizer: str
    learning_rate: float
    batch_size: int
    momentum: float | None = None
    weight_decay: float | None = None
    beta_1: float | None = None

    def rate(self, batch_size: int) -> float:
        """The learning rate for updates of `batch_size` examples."""
        ratio = batch_size / self.batch_size
        return self.learning_rate * (ratio if self.optimizer == "sgd" else math.sqrt(ratio))
