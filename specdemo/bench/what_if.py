"""Predictions as text: a line that says it, a table of draft lengths, a table of batches."""

from collections.abc import Sequence

from specdemo.bench.table import table
from specdemo.core.estimate import Estimate
from specdemo.prediction.predict import Prediction


def what_if_report(predictions: Sequence[Prediction]) -> str:
    """Of one machine and batch all draft lengths, of several the best one of each."""
    lines = [*dict.fromkeys(note for one in predictions for note in one.notes)]
    lines += [one.sentence for one in predictions]
    lines += ["", _loads(predictions)]
    if len(predictions) == 1:
        lines += ["", _lengths(predictions[0])]
    unmeasured = {one.scene.device.profile.title for one in predictions if not one.scene.device.profile.passes}
    if unmeasured:
        lines += [
            "",
            f"By datasheet alone: {', '.join(sorted(unmeasured))}; `specdemo profile` measures one.",
        ]
    return "\n".join(lines)


def _lengths(one: Prediction) -> str:
    header = ["k", "tokens a pass", "c", "v", "step ms", "tokens/s", "speed-up", "95 %", "limited by"]
    rows = [
        [
            str(row.k),
            f"{row.tokens.value:.2f}",
            f"{row.c:.3f}",
            f"{row.v:.3f}",
            f"{row.step_ms:.2f}",
            f"{row.tokens_per_s.value:.0f}",
            f"{row.speedup.value:.2f}x",
            row.speedup.interval(),
            row.limit,
        ]
        for row in one.rows
    ]
    return table(header, rows)


def _loads(predictions: Sequence[Prediction]) -> str:
    priced = any(one.scene.price is not None for one in predictions)
    header = ["device", "batch", "plain tokens/s", "best k", "tokens/s", "speed-up", "95 %", "memory GB"]
    header += ["a million", "plain"] * priced + [""]
    return table(header, [_load(one, priced) for one in predictions])


def _load(one: Prediction, priced: bool) -> list[str]:
    best = one.best
    rate = best.tokens_per_s if one.best_k else one.plain_tokens_per_s
    speed = best.speedup if one.best_k else Estimate(1.0)
    cells = [one.scene.device.profile.name, str(one.scene.batch), f"{one.plain_tokens_per_s.value:.0f}"]
    cells += [str(one.best_k or "off"), f"{rate.value:.0f}", f"{speed.value:.2f}x", speed.interval()]
    cells += [f"{one.memory_gb:.1f}"]
    costs = [one.per_million(value.value) for value in (rate, one.plain_tokens_per_s)] if priced else []
    return [*cells, *["" if cost is None else f"{cost:.3f}" for cost in costs], "" if one.fits else "does not fit"]
