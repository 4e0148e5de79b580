"""Horovod's TensorFlow operations, imported where they are first needed."""

from __future__ import annotations

import functools
from typing import Any

from tfdist.errors import UsageError


@functools.cache
def operations() -> Any:
    """The module `horovod.tensorflow`. Horovod's own modules for Keras know Keras 2 only, and are left alone.

    Raises:
        UsageError: Horovod is not installed, or was built for another TensorFlow.
    """
    import tensorflow as tf

    try:
        import horovod.tensorflow
    except ImportError as error:
        raise UsageError(
            f"Horovod is not installed: {str(error).splitlines()[0]}",
            "run `make horovod` in tfdist's folder, or `scripts/install_horovod.sh VENV`",
        ) from error
    except (tf.errors.NotFoundError, OSError) as error:
        raise UsageError(
            f"Horovod was built for another TensorFlow than the `{tf.__version__}` that is installed: "
            f"{str(error).splitlines()[0]}",
            "build it anew with `scripts/install_horovod.sh VENV`",
        ) from error
    return horovod.tensorflow
