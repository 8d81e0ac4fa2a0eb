"""Forward passes of an unmodified transformers model, with hidden states on request. Holds no history, so that
histories can hold a runner.

B rows, S slots, V vocabulary.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from specdemo.core.protocol import Forward
from specdemo.kv.masks import AttentionMask
from specdemo.kv.store import cache_argument
from specdemo.models.fused import FusedDecoder


class Runner:
    """Callable that runs one forward pass of a model.

    fused: decoder that replaces the model's own, if set.
    """

    fused: FusedDecoder | None = None

    def __init__(self, model: PreTrainedModel, layers: int, name: str) -> None:
        """layers: number of decoder layers. Raises ValueError for a model whose forward takes no cache."""
        self.model, self._num_layers, self._name = model, layers, name
        self.device: torch.device = model.get_input_embeddings().weight.device  # type: ignore[assignment]
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model.forward)
        if not self._cache_argument:
            kind = model.config.model_type
            raise ValueError(f"a {kind} model stores its history where it cannot be rolled back; choose another model")
        self._takes_last = "logits_to_keep" in parameters
        text_config = model.config.get_text_config(decoder=True)
        self._shares_kv = bool(getattr(text_config, "num_kv_shared_layers", 0))
        self.takes_positions = "position_ids" in parameters
        # modules that get the indices of the chosen experts with their input
        self.experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
        self._truncated_models: dict[int, nn.Module] = {}  # number of layers -> model that ends after them

    def __call__(
        self,
        tokens: Tensor,
        cache: Cache,
        positions: Tensor | None = None,
        mask: AttentionMask = None,
        taps: tuple[int, ...] = (),
        last: bool = False,
        layers: int | None = None,
    ) -> Forward:
        """Run one forward pass. layers: run only the first `layers` layers."""
        if self.fused is not None:
            assert positions is not None and not isinstance(mask, dict)
            return Forward(*self.fused(tokens, cache, positions, mask, taps, last, layers))
        model = self.model if layers is None else self._truncated_model(layers)
        arguments: dict[str, object] = {
            self._cache_argument: cache,
            "attention_mask": mask,
            "use_cache": True,
            **(self._last_arguments(taps) if last else {}),
        }
        if positions is not None:
            arguments["position_ids"] = positions
        with self._watched(taps, experts=not last and layers is None) as (hidden, expert_ids):
            output = model(tokens, **arguments)
        states = {tap: hidden[tap].to(self.device) for tap in taps}
        return Forward(self._logits(output, last), states, self._stacked(expert_ids, tokens.shape))

    def _last_arguments(self, taps: tuple[int, ...]) -> dict[str, object]:
        """Return the arguments for logits of the last position only.

        With a number, Gemma 4 also skips the other positions in layers that share a cache, and their hidden states.
        """
        if not self._takes_last:
            return {}
        indices = taps and self._shares_kv
        return {"logits_to_keep": torch.tensor([-1], device=self.device) if indices else 1}

    def _truncated_model(self, layers: int) -> nn.Module:
        if layers not in self._truncated_models:
            self._truncated_models[layers] = _truncate(self.model, self._layers, layers)
        return self._truncated_models[layers]

    def _logits(self, output: Any, last: bool) -> Tensor:
        logits: Tensor = output.logits
        if last and logits.shape[1] > 1:
            logits = logits[:, -1:]
        return logits if logits.device == self.device else logits.to(self.device)

    @contextmanager
    def _watched(self, taps: tuple[int, ...], experts: bool) -> Iterator[tuple[dict[int, Tensor], list[Tensor]]]:
        """Collect tap -> hidden state while the model runs, and expert indices [B S, K] of every layer."""
        hidden: dict[int, Tensor] = {}
        expert_ids: list[Tensor] = []

        def read_input(module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            hidden[0] = inputs[0] if inputs else named["hidden_states"]

        def read_output(tap: int, module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            hidden[tap] = output if isinstance(output, Tensor) else output[0]

        def read_indices(module: nn.Module, inputs: tuple[object, ...]) -> None:
            expert_ids.extend(x for x in inputs[1:] if isinstance(x, Tensor) and not x.is_floating_point())

        with ExitStack() as hooks:
            for tap in taps:
                if tap == 0:
                    hook = self._layers[0].register_forward_pre_hook(read_input, with_kwargs=True)
                else:
                    module = self._decoder if tap == -1 else self._layers[tap - 1]
                    hook = module.register_forward_hook(partial(read_output, tap))
                hooks.enter_context(hook)
            for module in self.experts if experts else ():
                hooks.enter_context(module.register_forward_pre_hook(read_indices))
            yield hidden, expert_ids

    def _stacked(self, expert_ids: list[Tensor], shape: torch.Size) -> Tensor | None:
        """Return the expert indices as [B, S, L, K]. None if a layer does not show its choice."""
        if not expert_ids or len(expert_ids) != len(self.experts) or len({tuple(x.shape) for x in expert_ids}) > 1:
            return None
        if expert_ids[0].ndim != 2 or len(expert_ids[0]) != shape.numel():
            return None
        experts: Tensor = torch.stack([x.to(self.device) for x in expert_ids], 1).unflatten(0, shape)
        return experts

    @cached_property
    def _decoder(self) -> nn.Module:
        """Return the module between the token ids and lm_head: the one that owns the list of layers."""
        module: nn.Module
        for module in self.model.modules():
            if any(isinstance(m, nn.ModuleList) and len(m) == self._num_layers for m in module.children()):
                return module
        raise ValueError(f"{self._name} has no list of {self._num_layers} layers to take hidden states from")

    @cached_property
    def _layers(self) -> nn.ModuleList:
        lists = (m for m in self._decoder.children() if isinstance(m, nn.ModuleList))
        return next(m for m in lists if len(m) == self._num_layers)


def _truncate(module: nn.Module, layers: nn.ModuleList, count: int) -> nn.Module:
    """Return a copy of `module` with the first `count` of `layers`. Modules that do not contain them are shared."""
    if module is layers:
        return layers[:count]
    twin = copy(module)
    twin.__dict__.pop("forward", None)  # the wrapper of accelerate would run the original
    twin._modules = {
        name: _truncate(part, layers, count) if part and any(m is layers for m in part.modules()) else part
        for name, part in module._modules.items()
    }
    return twin
