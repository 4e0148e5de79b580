"""What PySpark has no public method for; seen in Spark 4.3."""

from __future__ import annotations

from typing import Any


def task_slots(context: Any) -> int:
    """The number of tasks that the executors which have registered can run at the same time.

    Args:
        context: the `pyspark.SparkContext`.
    """
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))
