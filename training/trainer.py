"""transformers' Trainer with a parameter group for the gates, a loss in chunks, and router losses that accumulate."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import Trainer
from transformers.integrations import is_deepspeed_zero3_enabled

from gated_qwen.training.chunked_loss import check_chunked_loss, loss_in_chunks
from gated_qwen.training.parameter_groups import parameter_groups
from gated_qwen.training.recipe import GateSection, LossSection


class GatedTrainer(Trainer):
    """transformers' Trainer; everything that is not said here is its own.

    Args:
        gate: learning rate and weight decay of the gates.
        loss: whether the loss is computed in chunks.
        kwargs: the Trainer's own arguments.

    Raises:
        ValueError: the loss cannot be computed in chunks for this model, or a gate's setting has no gate to act on.
    """

    def __init__(self, *, gate: GateSection, loss: LossSection, **kwargs: Any) -> None:
        self._gate, self._chunk = gate, loss.chunk
        super().__init__(**kwargs)
        if self._chunk is not None:
            if is_deepspeed_zero3_enabled():
                raise ValueError("loss.chunk: ZeRO-3 gathers the head for its own call only; shard with FSDP2 instead")
            check_chunked_loss(self.model)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The Trainer's optimizer, over `parameter_groups`."""
        model = self.model if model is None else model
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            if not _makes_groups(optimizer_class, options):
                groups = parameter_groups(
                    model,
                    learning_rate=self.args.learning_rate,
                    weight_decay=self.args.weight_decay,
                    gate_learning_rate=self._gate.learning_rate,
                    gate_weight_decay=self._gate.weight_decay,
                )
                self.optimizer_cls_and_kwargs = (optimizer_class, {**options, "params": groups})
            elif self._gate.learning_rate is not None or self._gate.weight_decay is not None:
                raise ValueError(f"gate.learning_rate: trainer.optim={self.args.optim} makes its own parameter groups")
        return super().create_optimizer(model)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The Trainer's loss; in chunks, the outputs hold hidden states in place of logits."""
        plain = self.accelerator.unwrap_model(model)
        parts = self.current_gradient_accumulation_steps if model.training else 1
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            parts *= self.accelerator.num_processes // self.get_tp_size()
        in_chunks = nullcontext() if self._chunk is None else loss_in_chunks(plain, self._chunk)
        with in_chunks, router_losses_over(plain, parts):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def check_optimizer(arguments: Any, model: Any) -> None:
    """Makes the optimizer once, of nothing: the Trainer would make it after the data were read.

    Raises:
        ValueError: a package that it needs is not installed, or an option is not understood.
    """
    try:
        optimizer_class, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
        if not _makes_groups(optimizer_class, options):
            optimizer_class([torch.nn.Parameter(torch.zeros(1))], **options)
    except (ImportError, ValueError, TypeError) as error:
        raise ValueError(f"trainer.optim: {' '.join(str(error).split())}") from error


def _makes_groups(optimizer_class: Any, options: dict[str, Any]) -> bool:
    """Whether transformers gives an optimizer its parameters in groups of its own, or as a whole model."""
    ready = {"params", "model", "optimizer_dict"} & options.keys()
    return bool(ready) or not issubclass(optimizer_class, torch.optim.Optimizer)


@contextmanager
def router_losses_over(model: Any, parts: int) -> Iterator[None]:
    """Divides the weights of a mixture's router losses by the number of batches whose gradients are added up.

    The Trainer divides the cross-entropy by the tokens of all batches of a step, those of other processes too, and
    nothing by their number; the balancing and z-losses, means over one batch, would count that many times.

    Args:
        model: a causal LM, with experts or not.
        parts: batches in a step, over all processes.
    """
    owners = {"router_aux_loss_coef": model, "router_z_loss_coef": getattr(model, "config", None)}
    weights = {name: getattr(owner, name) for name, owner in owners.items() if hasattr(owner, name)}
    for name, weight in weights.items():
        setattr(owners[name], name, weight / parts)
    try:
        yield
    finally:
        for name, weight in weights.items():
            setattr(owners[name], name, weight)
