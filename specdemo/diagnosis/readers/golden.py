"""Golden acceptance lengths of InferenceX: golden_al_distribution/*.yaml, as prediction/golden.py reads them."""

from specdemo.core.speedup import reach_probabilities
from specdemo.diagnosis.observation import Observation
from specdemo.diagnosis.readers.base import Output, OutputReader
from specdemo.prediction.golden import MODES, golden_curves
from specdemo.presets.reading import parse_yaml


class GoldenLengths(OutputReader):
    """Mean accepted lengths by draft length, of the first model and thinking mode in the file."""

    title = "InferenceX golden lengths, YAML"

    def read(self, output: Output) -> Observation | None:
        if output.json is not None or not any(f"{mode}:" in output.text for mode in MODES):
            return None
        curve = golden_curves(parse_yaml(output.text, "this output"))[0]
        k = max(curve.lengths)
        return Observation(
            source=self.title,
            target=curve.model,
            k=k,
            accepted_length=curve.lengths[k],
            by_position=tuple(reach_probabilities(curve.acceptance().rates)),
            thinking={"on": True, "off": False}.get(curve.thinking),
        )
