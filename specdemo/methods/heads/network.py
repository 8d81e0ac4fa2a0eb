"""Base class of the networks of heads."""

from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

import torch
from torch import Generator, Tensor, nn

from specdemo.core.protocol import Drafter, Progress, Target
from specdemo.core.sampling import draw
from specdemo.models.checkpoints import Checkpoint
from specdemo.models.packed import dtype_of, pack
from specdemo.training.losses import Trainable

Module = TypeVar("Module", bound=nn.Module)


class Network(nn.Module):
    """The network of a head. An ambiguous checkpoint has several `conventions`, the most likely first."""

    name = ""  # of the checkpoint that it was read from
    note = ""  # what its config states otherwise, the selected convention, and why
    convention: Any = None  # the one in use
    conventions: tuple[object, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return dtype_of(self)

    def fuse(self) -> Self:
        """Fuse and pack the weights for inference. Training afterwards needs a deep copy."""
        return pack(self)

    def load_tensors(self, tensors: Mapping[str, Tensor], checkpoint: Checkpoint, target: Target, hint: str) -> Self:
        """Load tensors into a network on the meta device and move it to the target's device and dtype.

        Raises ValueError when a tensor is missing, unknown or of another shape than in `state_dict`; `hint` is the end
        of the message.
        """
        expected = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items()}
        actual = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        mismatch = next((name for name in sorted(expected | actual) if actual.get(name) != expected.get(name)), None)
        if mismatch:
            raise ValueError(
                f"{checkpoint.name}: tensor {mismatch}: expected shape {expected.get(mismatch, 'none')}, "
                f"found {actual.get(mismatch, 'none')}; {hint}"
            )
        self.load_state_dict(tensors, assign=True)
        return move_to_target(self, target)


def move_to_target(head: Module, target: Target) -> Module:
    """Freeze the head and move it to the target's device and dtype; an outline without weights stays one."""
    device = "meta" if any(weight.is_meta for weight in head.parameters()) else target.device
    return nn.Module.to(head, device, target.dtype).requires_grad_(False).eval()


def untrained(head: Module, target: Target, std: float) -> Module:
    """Draw the matrices of a head from a normal distribution, and move it to the target's device and dtype."""
    for parameter in head.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=std)
    return move_to_target(head, target)


ROWS, COLUMNS = 8, 48  # of the sampled text
MARGIN = 0.02  # smaller differences in agreement may be noise


@torch.no_grad()
def select_convention(head: Network, target: Target, make_drafter: Callable[[], Drafter]) -> None:
    """Set the convention with the highest agreement on a sampled text, and describe it in `head.note`.

    make_drafter: returns a drafter of the head under its current convention.
    """
    taps: set[int] = set()
    for convention in head.conventions:
        head.convention = convention
        taps.update(make_drafter().taps)
    text, scores = sample_target_text(target, tuple(taps)), []
    for convention in head.conventions:
        head.convention = convention
        drafter = make_drafter()
        assert isinstance(drafter, Trainable)
        metrics = drafter.loss(text)[1]
        scores.append(sum(metrics.values()) / len(metrics))
    best = max(range(len(scores)), key=scores.__getitem__)
    convention = head.conventions[best if scores[best] >= scores[0] + MARGIN else 0]
    head.convention = convention
    shares = "; ".join(f"{100 * share:.0f} % with {name}" for share, name in zip(scores, head.conventions, strict=True))
    note = f"Convention: {convention}. The file does not specify it; agreement on a short text was {shares}."
    head.note = " ".join(filter(None, (head.note, note)))


def sample_target_text(target: Target, taps: tuple[int, ...]) -> Progress:
    """Sample texts from the target after a stop token; outputs are its argmax at every position.

    Greedy text would soon repeat itself and not distinguish the conventions.
    """
    rng = Generator().manual_seed(0)  # on the host, because a shared GPU may not be attached yet
    first = target.stop_token_ids[0] if target.stop_token_ids else 0
    tokens = torch.full((ROWS, 1), first, device=target.device)
    forward, texts, argmax_ids = target.start(tokens), [tokens], []
    for _ in range(COLUMNS):
        argmax_ids.append(forward.logits[:, -1].argmax(-1))
        texts.append(draw(forward.logits[:, -1].float().softmax(-1).cpu(), rng)[:, None].to(target.device))
        forward = target.forward(texts[-1], tokens[:, 1:])
        target.commit([[0]] * ROWS)
    inputs = torch.cat(texts[:-1], 1)
    hidden = target.start(inputs, taps).hidden
    target.release()
    return Progress(inputs, torch.stack(argmax_ids, 1), [COLUMNS] * ROWS, hidden)
