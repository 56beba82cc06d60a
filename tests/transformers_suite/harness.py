"""Builds transformers' own test classes over a family of model classes and runs single tests of them."""

import functools
import re
import unittest
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, set_seed
from transformers.models.auto import modeling_auto
from transformers.testing_utils import torch_device

from .obtain import FILES, load
from .outcome import Outcome, Recorder

# The end of each class name, and the table of class names in which transformers' tests look up what the class is for.
HEADS = {
    "Model": "MODEL_MAPPING_NAMES",
    "ForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "ForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "ForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
}


@dataclass(frozen=True)
class Family:
    """The classes of one model, and the configuration values that set it apart."""

    module: ModuleType
    prefix: str
    config_values: tuple[tuple[str, Any], ...] = ()

    def named(self, ending: str) -> Any:
        """The class of this family whose name has this ending."""
        return getattr(self.module, self.prefix + ending)

    @property
    def model_classes(self) -> tuple[type[PreTrainedModel], ...]:
        return tuple(self.named(head) for head in HEADS)

    @property
    def model_type(self) -> str:
        return self.named("Config").model_type

    @property
    def has_experts(self) -> bool:
        return "num_local_experts" in dict(self.config_values)

    def neutral(self, text: str) -> str:
        """`text` with the names of this family replaced by Qwen3's, to compare what the tests say."""
        text = re.sub(r"<class '[\w.]*?(\w+)'>", r"\1", text)
        # The attribute that holds the body: `transformer` in Qwen3's question answering head, `model` elsewhere.
        for prefix in {model_class.base_model_prefix for model_class in self.model_classes}:
            text = re.sub(rf"\b{prefix}\.", "body.", text)
        return text.replace(self.prefix, "Qwen3").replace(self.model_type, "qwen3")


EXPERTS = (
    ("num_local_experts", 8),  # the name under which Qwen3-MoE's config keeps it
    ("num_experts_per_tok", 2),
    ("moe_intermediate_size", 24),
    ("norm_topk_prob", True),
)
QWEN3 = Family(transformers, "Qwen3")
QWEN3_MOE = Family(transformers, "Qwen3Moe", EXPERTS)


class ModelTester:
    """What the tests ask of a model: a tiny configuration, and inputs for it."""

    batch_size, seq_length = 4, 7
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
    is_training = True

    def __init__(self, family: Family):
        self.family = family
        self.causal_lm_class = family.named("ForCausalLM")

    def config_values(self) -> dict[str, Any]:
        """Sizes that differ from one another wherever they may, so that a mixed-up dimension shows."""
        return {
            "vocab_size": 99,
            "hidden_size": self.hidden_size,
            "intermediate_size": 48,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **dict(self.family.config_values),
        }

    def get_config(self) -> PreTrainedConfig:
        return self.family.named("Config")(**self.config_values())

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
        """Random tokens without the special ones, the last rows padded on the right."""
        config = self.get_config()
        input_ids = torch.randint(3, config.vocab_size, (self.batch_size, self.seq_length))
        lengths = torch.tensor([self.seq_length, self.seq_length, self.seq_length - 1, self.seq_length - 3])
        attention_mask = (torch.arange(self.seq_length) < lengths[:, None]).long()
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return config, {name: value.to(torch_device) for name, value in inputs.items()}


@functools.cache
def build(family: Family) -> type[unittest.TestCase]:
    """transformers' test classes put together as it does for its own Qwen3, over the classes of `family`."""
    configuration, common, training = (load(file) for file in FILES)
    fsdp, tensor_parallel = load("test_fsdp_mixin.py"), load("test_tensor_parallel_mixin.py")
    distributed: list[type] = []
    # The lists name the model types that the library spends multi-process tests on; `None` is its "all of them".
    if tensor_parallel:
        tensor_parallel.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
        distributed.append(tensor_parallel.TensorParallelTesterMixin)
    if fsdp:
        fsdp.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None
        distributed.append(fsdp.FSDPTesterMixin)
    expert_parallel = load("test_expert_parallel_mixin.py") if family.has_experts else None
    if expert_parallel:
        expert_parallel.EP_DISTRIBUTED_TEST_MODEL_TYPES = None
        distributed.append(expert_parallel.ExpertParallelTesterMixin)

    class CommonTests(common.ModelTesterMixin, training.TrainingTesterMixin, *distributed, unittest.TestCase):
        model_tester: Any = None
        all_model_classes = family.model_classes
        # The library spares models by the copyright year in their source file, which says nothing here.
        test_can_init_all_missing_weights_before_2023 = True

        def setUp(self) -> None:
            super().setUp()
            self.model_tester = ModelTester(family)
            # Seeded, so that a test near its tolerance gives the same answer in every run and order.
            set_seed(0)
            common.global_rng.seed(0)
            # The tests tell a classifier from a language model by tables that hold only classes of transformers
            # itself. Without these entries they would silently pass over the heads of any other package.
            stack = ExitStack()
            for head, table in HEADS.items():
                names = getattr(modeling_auto, table)
                stack.enter_context(mock.patch.dict(names, {family.model_type: family.prefix + head}))
            self.addCleanup(stack.close)

        def test_config(self) -> None:
            config_class = family.named("Config")
            configuration.ConfigTester(self, config_class, **self.model_tester.config_values()).run_common_tests()

    return CommonTests


def run(family: Family, name: str) -> Outcome:
    """Run one test of one family in this process."""
    recorder = Recorder(family.neutral)
    with warnings.catch_warnings(record=True):
        # Some tests look for a warning: it has to be given whatever filters the run was started with.
        warnings.simplefilter("always")
        # Through a suite, because only a suite runs `setUpClass` and `tearDownClass`.
        unittest.TestSuite([build(family)(name)]).run(recorder)
    return recorder.outcome


def reference_of(family: Family) -> Family:
    """The family of transformers that a family must not fall behind."""
    return QWEN3_MOE if family.has_experts else QWEN3


@functools.cache
def reference_outcome(family: Family, name: str) -> Outcome:
    """What the test does with the reference; run once, however many families are compared with it."""
    return run(reference_of(family), name)


def all_names(family: Family) -> list[str]:
    """The names of all tests, the same for every family with the same reference."""
    return list(unittest.TestLoader().getTestCaseNames(build(reference_of(family))))
