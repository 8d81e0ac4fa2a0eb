"""What a comparison consists of, everything decided."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specdemo.core.sampling import Sampling
from specdemo.methods import BASELINE

Schedule = Literal["race", "sequential"]
Messages = tuple[Mapping[str, str], ...]  # each with role and content


@dataclass(frozen=True)
class LaneSpec:
    """One speculative lane. k is the draft length, the depth of its budget.

    server: the address of a server on which it runs (servers/lane.py), served_model what the target is called there;
    method, model, k and options then say what that server is meant to run, which nobody checks.
    """

    method: str
    model: str | None = None
    k: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)
    acceptance: str = "lossless"
    name: str = ""
    server: str | None = None
    served_model: str | None = None


@dataclass(frozen=True)
class RunSpec:
    """A comparison. `lanes` are the speculative ones; plain decoding is always lane 0, here or on `server`. `follow_up`
    asks on."""

    preset: str
    target: str
    prompt: str
    lanes: tuple[LaneSpec, ...]
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    schedule: Schedule = "race"
    dtype: str = "auto"
    device: str = "auto"
    quantization: str | None = None
    server: str | None = None
    served_model: str | None = None
    chat: bool | None = None  # the prompt is a message in the model's chat template; None: where it has one
    system: str = ""
    history: tuple[Messages, ...] = ()  # of every lane, the baseline first: the chat before the prompt

    @property
    def all_lanes(self) -> tuple[LaneSpec, ...]:
        """Lane 0 too."""
        plain = LaneSpec(BASELINE, k=0, name="Baseline", server=self.server, served_model=self.served_model)
        return plain, *self.lanes

    @property
    def all_remote(self) -> bool:
        """True: no model is needed here."""
        return all(lane.server for lane in self.all_lanes)
