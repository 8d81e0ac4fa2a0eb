"""Answer of a server: JSON of one request with the statistics of its drafts, as servers/engines/ reads them."""

from collections.abc import Mapping

from specdemo.analysis.observation import Observation
from specdemo.analysis.readers.base import Output, OutputReader, OutputTotals, below, count, number, text_of
from specdemo.servers.engines import engines

PREDICTION = "Generated prediction: {"  # in the log of LM Studio


class ServerAnswer(OutputReader):
    """Answer of vLLM, SGLang, llama.cpp, LM Studio since 0.3.10, mlx-vlm, FastDeploy or an OpenAI-like gateway."""

    title = "answer of a server, JSON"

    def read(self, output: Output) -> Observation | None:
        data = output.json
        if PREDICTION in output.text and not data:
            data = _last_prediction(output)
        if not isinstance(data, Mapping) or not {"usage", "stats", "timings", "metrics", "sglext"} & data.keys():
            return None
        chunk = {str(name): value for name, value in data.items()}
        for engine in engines():
            stats = engine.acceptance(chunk)
            if stats is None or "accepted" not in stats.counters:
                continue
            accepted, drafted = stats.counters["accepted"] or 0.0, stats.counters["drafted"] or 0.0
            steps, tokens = stats.counters.get("steps") or 0.0, _tokens(data)
            after_first = max(tokens - 1.0, 0.0) if tokens else None
            totals = OutputTotals(speeds=[_speed(data) or 0.0], batches=[1.0])
            bars = stats.accept_histogram
            if bars:
                totals.add_histogram(bars, drafted, after_first)
            else:
                totals.add(drafted, accepted, steps, tokens=after_first)
            k = count(below(data, "metrics", "speculative_decoding", "num_spec_tokens"))
            return Observation(
                engine=engine.name,
                source=f"{self.title}, {engine.title}",
                target=text_of(data.get("model")),
                drafter=text_of(below(data, "stats", "draft_model")),
                method="draft_model" if below(data, "stats", "draft_model") else _kind(data),
                k=k or None,
                **totals.values(),
            )
        speed = _speed(data)
        return Observation(source=self.title, target=text_of(data.get("model")), tokens_per_s=speed) if speed else None


def _last_prediction(output: Output) -> object:
    """Return the last answer in a log of LM Studio, None if it is incomplete."""
    text = output.text[output.text.rindex(PREDICTION) + len(PREDICTION) - 1 :]
    end = text.find("\n}")
    return output.parse(text[: end + 2]) if end >= 0 else None


def _kind(data: Mapping[str, object]) -> str:
    return text_of(below(data, "timings", "draft_kind"))


def _tokens(data: Mapping[str, object]) -> float | None:
    return number(below(data, "usage", "completion_tokens")) or number(below(data, "timings", "predicted_n"))


def _speed(data: Mapping[str, object]) -> float | None:
    found = number(below(data, "stats", "tokens_per_second")) or number(below(data, "timings", "predicted_per_second"))
    return found or None
