"""A saved folder is enough: with torch and transformers alone it loads as remote code, and can be saved again."""

import ast
import filecmp
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fresh_process import FreshProcess
from safetensors.torch import load_file, save_file
from tiny import tiny_model, tiny_moe_model, tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)
from transformers.dynamic_module_utils import get_imports, get_relative_imports
from ungated import ungated_folder, ungated_model

import gated_qwen
from gated_qwen import modeling_gated_qwen, modeling_gated_qwen_moe
from gated_qwen.configuration import configuration_gated_qwen, configuration_gated_qwen_moe, rope_parameters
from gated_qwen.conversion.convert import convert
from gated_qwen.conversion.create import create

DENSE_FILES = {
    Path(module.__file__).name: Path(module.__file__)
    for module in (configuration_gated_qwen, modeling_gated_qwen, rope_parameters)
}
MOE_FILES = {
    Path(module.__file__).name: Path(module.__file__)
    for module in (configuration_gated_qwen_moe, modeling_gated_qwen_moe)
}
SOURCES = {**DENSE_FILES, **MOE_FILES}
# Auto class -> the end of a class name.
HEADS = {
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
}


@dataclass(frozen=True)
class Family:
    """A model family of the package: what its folders hold, and how to make tiny ones."""

    prefix: str
    model_type: str
    files: dict[str, Path]
    tiny: Callable[..., PreTrainedModel]
    ungated_class: type[PreTrainedModel]
    ungated_name: str
    preset: str

    @property
    def classes(self):
        return {auto_class: self.prefix + head for auto_class, head in HEADS.items()}

    @property
    def auto_map(self):
        return {
            "AutoConfig": f"configuration_{self.model_type}.{self.prefix}Config",
            **{auto_class: f"modeling_{self.model_type}.{name}" for auto_class, name in self.classes.items()},
        }

    @property
    def saved(self):
        return {"config.json", "model.safetensors", *self.files}


DENSE = Family("GatedQwen", "gated_qwen", DENSE_FILES, tiny_model, Qwen3ForCausalLM, "qwen3", "tiny-elementwise")
MOE = Family(
    "GatedQwenMoe", "gated_qwen_moe", SOURCES, tiny_moe_model, Qwen3MoeForCausalLM, "qwen3_moe", "tiny-moe-elementwise"
)
# The folders of the fixture: what each class saves, and what every other writer makes.
EVERY_FOLDER = (*HEADS, "moved", "sharded", "created", "converted")


# The files themselves.


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_imports_are_flat(source):
    """The standard library, torch, transformers, and files beside it: from one dot and one name; never inside try."""
    tree = ast.parse(source.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1 and node.module and "." not in node.module, ast.unparse(node)
            assert f"{node.module}.py" in SOURCES, ast.unparse(node)
            continue
        elif isinstance(node, ast.Try):
            assert not any(isinstance(part, (ast.Import, ast.ImportFrom)) for part in ast.walk(node)), ast.unparse(
                node
            )
            continue
        else:
            continue
        for name in names:
            top = name.split(".")[0]
            assert top in ("torch", "transformers") or top in sys.stdlib_module_names, ast.unparse(node)


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_only_imports_look_like_imports(source):
    """Loaders read import lines with regular expressions, in docstrings and comments too."""
    text = source.read_text()
    real = {node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))}
    looks = {number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*(import|from)\s+\S", line)}
    assert looks == real


def test_the_loader_finds_the_same_imports():
    relative, others = {}, {}
    for name, source in SOURCES.items():
        relative[name.removesuffix(".py")] = set(get_relative_imports(source))
        others[name.removesuffix(".py")] = set(get_imports(source)) - sys.stdlib_module_names
    assert relative == {
        "rope_parameters": set(),
        "configuration_gated_qwen": {"rope_parameters"},
        "configuration_gated_qwen_moe": {"configuration_gated_qwen", "rope_parameters"},
        "modeling_gated_qwen": {"configuration_gated_qwen"},
        "modeling_gated_qwen_moe": {"configuration_gated_qwen_moe", "modeling_gated_qwen"},
    }
    assert others == {
        "rope_parameters": set(),
        "configuration_gated_qwen": {"transformers"},
        "configuration_gated_qwen_moe": {"transformers"},
        "modeling_gated_qwen": {"torch", "transformers"},
        "modeling_gated_qwen_moe": {"torch", "transformers"},
    }


# What is saved. The functions with imports inside run in a process without the package.


def load(folder, auto_class="AutoModelForCausalLM", **options):
    import transformers

    return getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True, **options)


def save_reference(model, file):
    ids = tokens(2, 9)
    with torch.no_grad():
        save_file({"ids": ids, "output": model(ids)[0]}, file)


@pytest.fixture(scope="module", params=[DENSE, MOE], ids=lambda family: family.model_type)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    """The folders of EVERY_FOLDER, and beside each what its model computes."""
    folder = tmp_path_factory.mktemp("saved")
    for auto_class, name in family.classes.items():
        model = family.tiny(getattr(gated_qwen, name), gate_granularity="headwise", pad_token_id=0)
        model.save_pretrained(folder / auto_class)
        save_reference(model, folder / f"{auto_class}.safetensors")

    causal_lm = family.tiny(gate_granularity="headwise", pad_token_id=0)
    causal_lm.save_pretrained(folder / "sharded", max_shard_size="20kB")
    save_reference(causal_lm, folder / "sharded.safetensors")
    causal_lm.save_pretrained(folder / "original")
    shutil.copytree(folder / "original", folder / "moved")
    shutil.rmtree(folder / "original")
    save_reference(causal_lm, folder / "moved.safetensors")

    create(family.preset, folder / "created")
    save_reference(AutoModelForCausalLM.from_pretrained(folder / "created"), folder / "created.safetensors")
    name = family.ungated_name
    convert(ungated_folder(folder / "ungated", name), folder / "converted", gate="headwise")
    save_reference(ungated_model(name), folder / "converted.safetensors")  # the same function, to the bit
    return folder


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    with FreshProcess(tmp_path_factory.mktemp("process"), helpers=(load,)) as process:
        yield process


def test_the_process_has_nothing_of_ours(process):
    """Otherwise the tests below would prove nothing."""

    def importable(*names):
        import importlib

        found = []
        for name in names:
            try:
                importlib.import_module(name)
                found.append(name)
            except ImportError:
                pass
        return found

    assert process.call(importable, "torch", "transformers", "gated_qwen", "accelerate", "peft") == [
        "torch",
        "transformers",
    ]


@pytest.mark.parametrize("auto_class", HEADS)
def test_saved_files(family, folder, auto_class):
    generation = {"generation_config.json"} if auto_class == "AutoModelForCausalLM" else set()
    assert {path.name for path in (folder / auto_class).iterdir()} == family.saved | generation


@pytest.mark.parametrize("name", ["created", "converted"])
def test_written_files(family, folder, name):
    expected = family.saved | {"generation_config.json", "provenance.json"}
    assert {path.name for path in (folder / name).iterdir()} == expected


@pytest.mark.parametrize("name", EVERY_FOLDER)
def test_saved_code_is_the_source(family, folder, name):
    for file, source in family.files.items():
        assert (folder / name / file).read_bytes() == source.read_bytes()
    tree = ast.parse((folder / name / f"configuration_{family.model_type}.py").read_text())
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert f"{family.prefix}Config" in classes, "the re-export beside the model was saved and not the class"


@pytest.mark.parametrize("name", EVERY_FOLDER)
def test_auto_map_is_complete(family, folder, name):
    assert json.loads((folder / name / "config.json").read_text())["auto_map"] == family.auto_map


def resolve_all(folder, auto_classes):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    found = {"AutoConfig": [type(config).__module__.split(".")[0], type(config).__name__]}
    for auto_class in auto_classes:
        model = load(folder, auto_class)
        found[auto_class] = [type(model).__module__.split(".")[0], type(model).__name__]
    return found


@pytest.mark.parametrize("name", EVERY_FOLDER)
def test_every_auto_class_resolves(family, folder, process, name):
    found = process.call(resolve_all, str(folder / name), list(HEADS))
    assert found == {
        "AutoConfig": ["transformers_modules", f"{family.prefix}Config"],
        **{auto_class: ["transformers_modules", name] for auto_class, name in family.classes.items()},
    }


def compare(folder, auto_class, reference, target=None):
    import torch
    from safetensors.torch import load_file

    expected = load_file(reference)
    model, loading = load(folder, auto_class, output_loading_info=True)
    with torch.no_grad():
        difference = (model.eval()(expected["ids"])[0] - expected["output"]).abs().max().item()
    if target is not None:
        model.save_pretrained(target)
    return {"difference": difference, "wrong": {name: list(keys) for name, keys in loading.items() if keys}}


EQUAL = {"difference": 0.0, "wrong": {}}


@pytest.mark.parametrize("name", EVERY_FOLDER)
def test_same_output(folder, process, name):
    auto_class = name if name in HEADS else "AutoModelForCausalLM"
    reference = folder / f"{name}.safetensors"
    assert process.call(compare, str(folder / name), auto_class, str(reference)) == EQUAL


def test_body_of_every_head(folder, process):
    """AutoModel takes the body out of any head's folder, and leaves nothing of it to chance."""

    def body_keys(folder):
        _, loading = load(folder, "AutoModel", output_loading_info=True)
        return {name: list(keys) for name, keys in loading.items()}

    for auto_class in HEADS:
        loading = process.call(body_keys, str(folder / auto_class))
        assert not loading["missing_keys"] and not loading["mismatched_keys"], auto_class


def test_saved_again_and_again(family, folder, process, tmp_path):
    """A remote-code load saves the very same files; they load where neither the first folder nor its cache exists."""
    for auto_class in HEADS:
        reference, target = folder / f"{auto_class}.safetensors", tmp_path / "second" / auto_class
        assert process.call(compare, str(folder / auto_class), auto_class, str(reference), str(target)) == EQUAL
        names = sorted(path.name for path in (folder / auto_class).iterdir())
        assert sorted(path.name for path in target.iterdir()) == names
        assert filecmp.cmpfiles(folder / auto_class, target, names, shallow=False) == (names, [], [])
    with FreshProcess(tmp_path / "process", helpers=(load,)) as another:
        for auto_class in HEADS:
            reference, source = folder / f"{auto_class}.safetensors", tmp_path / "second" / auto_class
            target = tmp_path / "third" / auto_class
            assert another.call(compare, str(source), auto_class, str(reference), str(target)) == EQUAL
            for file, code in family.files.items():
                assert (target / file).read_bytes() == code.read_bytes()


# How it is loaded.


def test_refused_without_trust(folder, tmp_path):
    """Nobody is there to answer a question, so the error says at once what to pass."""

    def refusals(folder):
        import transformers

        said = []
        for auto_class in ("AutoConfig", "AutoModel", "AutoModelForCausalLM"):
            for trust in ({}, {"trust_remote_code": False}):
                try:
                    getattr(transformers, auto_class).from_pretrained(folder, **trust)
                    said.append("loaded")
                except ValueError as error:
                    said.append(str(error))
        return said

    with FreshProcess(tmp_path / "process") as process:
        process.call(refusals, str(folder / "AutoModel"))  # the first call waits for imports
        start = time.monotonic()
        said = process.call(refusals, str(folder / "AutoModel"))
        assert time.monotonic() - start < 5
    assert len(said) == 6
    for message in said:
        assert "custom code" in message and "trust_remote_code=True" in message


def test_pipeline_generates(folder, process, tmp_path):
    """By the folder's name alone, tokenizer included, and without a word that the model is not supported."""

    def generate(folder):
        from transformers import pipeline

        generator = pipeline("text-generation", model=folder, trust_remote_code=True)
        text = generator("w3 w1 w4", max_new_tokens=8, do_sample=False, return_full_text=False)[0]["generated_text"]
        ids = generator.tokenizer("w3 w1 w4", return_tensors="pt")["input_ids"]
        return [type(generator.model).__module__.split(".")[0], text, ids.tolist()]

    shutil.copytree(folder / "AutoModelForCausalLM", tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(tmp_path / "model")
    module, text, ids = process.call(generate, str(tmp_path / "model"))
    assert module == "transformers_modules"
    assert ids == [[3, 1, 4]]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = model.generate(torch.tensor(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 3:].tolist()
    assert [int(word[1:]) for word in text.split()] == expected
    assert "not supported" not in process.output


def gate_values(folder, auto_class, std):
    """The gates of a model loaded from the folder, and of one built from its config; whether the rest was loaded."""
    import torch
    import transformers
    from safetensors.torch import load_file

    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config.gate_initializer_range = std
    loaded = load(folder, auto_class, config=config)
    built = getattr(transformers, auto_class).from_config(config, trust_remote_code=True)
    gates = {}
    for way, model in (("loaded", loaded), ("built", built)):
        state = model.state_dict()
        gates[way] = torch.cat([state[name].flatten() for name in sorted(state) if "g_proj" in name]).tolist()
    state = {name.removeprefix("model."): value for name, value in loaded.state_dict().items()}
    stored = {name.removeprefix("model."): value for name, value in load_file(f"{folder}/state").items()}
    return gates, all(torch.equal(stored[name], value) for name, value in state.items() if name in stored)


@pytest.mark.parametrize("auto_class", ["AutoModel", "AutoModelForCausalLM", "AutoModelForTokenClassification"])
@pytest.mark.parametrize("std", [0.0, 0.5, None])
def test_the_start_of_the_gate_survives(family, process, tmp_path, auto_class, std):
    """A checkpoint without gates under a config with gates: they start as it says, and so do those of a new model."""
    ungated = family.tiny(family.ungated_class)
    ungated.save_pretrained(tmp_path / "ungated")
    gated = family.tiny(gate_positions=["value", "attn_output"], initializer_range=0.1)
    gated.save_pretrained(tmp_path / "model")
    shutil.copyfile(tmp_path / "ungated" / "model.safetensors", tmp_path / "model" / "model.safetensors")
    save_file(ungated.state_dict(), tmp_path / "model" / "state")
    gates, rest_is_loaded = process.call(gate_values, str(tmp_path / "model"), auto_class, std)
    assert rest_is_loaded
    expected = 0.1 if std is None else std
    for way in ("loaded", "built"):
        assert len(gates[way]) == gated.config.num_hidden_layers * (16 + 32) * 32  # rows of both gates; channels
        assert torch.tensor(gates[way]).std().item() == pytest.approx(expected, rel=0.1)
        if std == 0.0:
            assert set(gates[way]) == {0.0}


def test_a_trained_gate_is_kept(folder, process):
    def state(folder, target):
        from safetensors.torch import save_file

        save_file(load(folder).state_dict(), target)

    target = folder / "state.safetensors"
    process.call(state, str(folder / "AutoModelForCausalLM"), str(target))
    stored = load_file(folder / "AutoModelForCausalLM" / "model.safetensors")
    gates = {name: value for name, value in load_file(target).items() if ".g_proj" in name}
    assert gates.keys() == {name for name in stored if ".g_proj" in name} != set()
    assert all(torch.equal(stored[name], value) for name, value in gates.items())


# Beside the package.


def test_with_the_package(family, folder, tmp_path):
    """Importing twice and registering twice is harmless; no question is asked; remote code works all the same."""

    def with_the_package(folder, reference, target, class_name):
        import importlib
        import sys

        import torch
        import transformers
        from safetensors.torch import load_file

        import gated_qwen

        gated_qwen.register_auto_classes()
        importlib.reload(gated_qwen).register_auto_classes()
        for name in [name for name in sys.modules if name.split(".")[0] == "gated_qwen"]:
            del sys.modules[name]
        import gated_qwen  # noqa: F811

        expected = load_file(reference)
        found = []
        for trust in ({}, {"trust_remote_code": True}):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **trust).eval()
            with torch.no_grad():
                found.append((model(expected["ids"])[0] - expected["output"]).abs().max().item())
            model.save_pretrained(target)
        found.append(
            type(transformers.AutoModelForCausalLM.from_pretrained(folder)) is getattr(gated_qwen, class_name)
        )
        return found

    model, reference = folder / "AutoModelForCausalLM", folder / "AutoModelForCausalLM.safetensors"
    with FreshProcess(tmp_path / "process", blocked=()) as process:
        arguments = (model, reference, tmp_path / "saved", f"{family.prefix}ForCausalLM")
        assert process.call(with_the_package, *map(str, arguments)) == [0.0, 0.0, True]
    for file, source in family.files.items():
        assert (tmp_path / "saved" / file).read_bytes() == source.read_bytes()


@pytest.mark.parametrize("mark", ["headwise_attn_output_gate", "elementwise_attn_output_gate"])
def test_the_official_layout_must_be_converted(tmp_path, mark):
    """Its gate sits inside q_proj: loaded as it is, the model would talk nonsense."""
    tiny_model(Qwen3ForCausalLM).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, mark: True}))
    assert config["model_type"] == "qwen3"
    for cls in (gated_qwen.GatedQwenConfig, gated_qwen.GatedQwenForCausalLM, gated_qwen.GatedQwenModel):
        with pytest.raises(ValueError, match=rf"{mark}=True.*official.*must be converted"):
            cls.from_pretrained(tmp_path)


def test_the_model_type_is_nobody_elses():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    names = [gated_qwen.GatedQwenConfig.model_type, gated_qwen.GatedQwenMoeConfig.model_type]
    assert names == ["gated_qwen", "gated_qwen_moe"]
    assert not set(names) & set(CONFIG_MAPPING_NAMES)
