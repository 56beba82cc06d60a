"""Which checkpoint of a run can be trusted: the last one that was written completely."""

import json
import re
from pathlib import Path

STATE = "trainer_state.json"
SHARDS = "pytorch_model_fsdp_0"  # where accelerate keeps FSDP2's


def last_complete_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a Trainer whose writing ended; one that a kill or a full disk cut short is passed over.

    The Trainer writes its state last, and a safetensors file that is shorter than its header says does not
    open.

    Args:
        folder: with the Trainer's `checkpoint-N` folders.

    Returns:
        The folder, or None when there is none.

    Example:
        >>> (tmp / "checkpoint-5").mkdir()
        >>> print(last_complete_checkpoint(tmp))
        None
    """
    numbered = []
    for path in folder.glob("checkpoint-*"):
        if number := re.fullmatch(r"checkpoint-(\d+)", path.name):
            numbered.append((int(number[1]), path))
    return next((path for step, path in sorted(numbered, reverse=True) if _is_complete(path, step)), None)


def check_resumable(checkpoint: Path, processes: int) -> None:
    """Refuses a checkpoint from which a run would not go on exactly.

    Args:
        checkpoint: a folder that the Trainer wrote.
        processes: how many there are now. Each one draws its own rows and leaves its own random state.

    Raises:
        ValueError: the optimizer's state is missing, or another number of processes wrote it.
    """
    # Sharded, the optimizer's state is a folder; DeepSpeed's lies in global_step*.
    if not any(found for name in ("optimizer*", "global_step*") for found in checkpoint.glob(name)):
        raise ValueError(
            f"{checkpoint}: no state of the optimizer (trainer.save_only_model keeps none), so the run cannot go on; "
            "train on from its weights as a model.source"
        )
    before = len(list(checkpoint.glob("rng_state*.pth")))
    if before != processes:
        raise ValueError(
            f"{checkpoint}: written by {before} process(es), and now there are {processes}, which get other rows; "
            f"start {before}"
        )


def has_ended(checkpoint: Path) -> bool:
    """Whether a checkpoint was made after a run's last step; the Trainer would take one step more from there.

    Only of weights that are there in one piece or in FSDP2's shards; DeepSpeed's are left to the Trainer.
    """
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    readable = (checkpoint / SHARDS).is_dir() or any(checkpoint.glob("model*.safetensors"))
    return bool(state["global_step"] >= state["max_steps"]) and readable


def _is_complete(checkpoint: Path, step: int) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        for file in checkpoint.glob("*.safetensors"):
            with safe_open(file, framework="pt"):
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    return bool(state.get("global_step") == step)
