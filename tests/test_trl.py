"""TRL's SFTTrainer takes a saved model as it is, packed samples included."""

import pytest
import torch
from datasets import Dataset
from small_tokenizers import tokenizer_of
from tiny import tiny_model
from trl import SFTConfig, SFTTrainer

SAMPLES = [
    {"prompt": "What is the secret number?", "completion": " 7"},
    {"prompt": "What is it according to the text?", "completion": " The number is 0123456789."},
    {"prompt": "Is there a secret?", "completion": " No."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    torch.manual_seed(0)
    tokenizer = tokenizer_of("byte-level BPE")
    model = tiny_model(gate_granularity="headwise", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def first_losses(folder, **options):
    arguments = SFTConfig(
        output_dir=str(folder / "out"),
        max_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        max_length=128,
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
        **options,
    )
    trainer = SFTTrainer(str(folder / "model"), args=arguments, train_dataset=Dataset.from_list(SAMPLES))
    trainer.train()
    assert type(trainer.model).__name__ == "GatedQwenForCausalLM"
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_supervised_fine_tuning_learns_and_packing_does_not_change_its_loss(folder):
    apart = first_losses(folder, per_device_train_batch_size=3)
    packed = first_losses(folder, per_device_train_batch_size=1, packing=True)
    assert apart[-1] < apart[0] - 0.2
    assert packed == pytest.approx(apart, abs=1e-3)  # one row with three samples that do not see each other
