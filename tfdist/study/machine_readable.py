"""The results of a study as JSON, for programs; docs/compare.md describes the fields."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tfdist.study import doubts, ratios, summary
from tfdist.study.ratios import Ratio
from tfdist.study.results import Comparison, MedianOf, Row

FIGURES = tuple(name for name, value in vars(Row).items() if isinstance(value, MedianOf))


def text(comparisons: Sequence[Comparison]) -> str:
    """Returns the JSON document."""
    content = {
        "schema_version": 1,
        "headline": summary.headline(comparisons),
        "confidence": 1 - ratios.ERROR,
        "cases": [_case(comparison) for comparison in comparisons],
    }
    return json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"


def _case(comparison: Comparison) -> dict[str, Any]:
    fastest = comparison.fastest
    return {
        **asdict(comparison.case),
        "answer": summary.answer(comparison),
        "base": comparison.base.cell.name,
        "fastest": None if fastest is None else fastest.cell.name,
        "faster": [row.cell.name for row in comparison.faster],
        "doubts": doubts.of(comparison),
        "rows": [_row(row) for row in comparison.rows],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": row.cell.name,
        "strategy": row.cell.strategy,
        "workers": row.cell.workers,
        "times_as_fast": None if row.speed is None else _ratio(row.speed),
        "marks": row.marks,
        "runs": len(row.runs),
        "failed": len(summary.failures(row)),
        **{name: getattr(row, name) for name in FIGURES},
    }


def _ratio(ratio: Ratio) -> dict[str, Any]:
    return asdict(ratio) | {"is_difference": ratio.is_difference, "is_equal": ratio.is_equal}


def _finite(value: Any) -> Any:
    """Replaces numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
