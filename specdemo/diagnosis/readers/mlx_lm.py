"""Statistics of mlx-lm: mlx_lm/generate.py prints tokens and speed, nothing about drafts."""

import re

from specdemo.diagnosis.observation import Observation
from specdemo.diagnosis.readers.base import Output, OutputReader, find_last

SPEED = re.compile(r"Generation: [0-9]{1,9} tokens, ([0-9.]{1,12}) tokens-per-sec")


class MLXGenerate(OutputReader):
    """Output of `mlx_lm.generate`, with or without a draft model."""

    title = "mlx_lm.generate"

    def read(self, output: Output) -> Observation | None:
        speeds = SPEED.findall(output.text)
        if not speeds:
            return None
        k = find_last(r"--num-draft-tokens[ =]([0-9]{1,3})\b", output.text)
        return Observation(
            engine="mlx-lm",
            source=self.title,
            method="draft_model" if "--draft-model" in output.text else "",
            target=find_last(r"--model[ =]([\w./-]{1,200})", output.text),
            drafter=find_last(r"--draft-model[ =]([\w./-]{1,200})", output.text),
            k=int(k) or None if k else None,
            tokens_per_s=float(speeds[-1]) or None,
            batch_size=1.0,
        )
