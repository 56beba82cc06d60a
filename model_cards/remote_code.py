"""The code that travels with a model: which files it is made of, and whether a folder holds the current ones."""

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gated_qwen.conversion.checkpoint import read_config
from gated_qwen.conversion.folder import atomic_file
from gated_qwen.conversion.writer import write_json


def remote_code(config_class: type) -> tuple[dict[str, str], dict[str, Path]]:
    """What makes a folder load where this package is not installed.

    Args:
        config_class: one of this package's, such as `GatedQwenConfig`.

    Returns:
        The `auto_map` of config.json, and the source of every code file by its name in the folder.

    Example:
        >>> from gated_qwen import GatedQwenConfig
        >>> auto_map, files = remote_code(GatedQwenConfig)
        >>> auto_map["AutoConfig"], "configuration_gated_qwen.py" in files, "modeling_gated_qwen.py" in files
        ('configuration_gated_qwen.GatedQwenConfig', True, True)
    """
    auto_map = config_class().to_dict()["auto_map"]
    return auto_map, _with_imports(place.split(".")[0] for place in auto_map.values())


def every_code_file() -> set[str]:
    """The names of the code files of all models of this package."""
    import gated_qwen

    folder = Path(gated_qwen.__file__).parent
    return set(_with_imports(path.stem for path in folder.glob("modeling_*.py")))


def check_remote_code(folder: Path, config_class: type) -> None:
    """Refuses a folder whose code is not byte for byte this package's, or whose auto_map is not complete.

    Raises:
        ValueError: naming the file or the entry, and the mend.
    """
    auto_map, files = remote_code(config_class)
    for name, source in files.items():
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: missing, so the model does not load elsewhere; pass --refresh-code")
        if (folder / name).read_bytes() != source.read_bytes():
            raise ValueError(
                f"{folder / name}: not the code of this version of gated-qwen; pass --refresh-code to replace it"
            )
    found = read_config(folder).get("auto_map") or {}
    for name, place in auto_map.items():
        if found.get(name) != place:
            raise ValueError(
                f"{folder / 'config.json'}: auto_map has {found.get(name)!r} for {name}, and it takes {place!r}; pass "
                "--refresh-code"
            )


def refresh_remote_code(folder: str | os.PathLike[str], config_class: type) -> list[str]:
    """Writes this package's current code and auto_map into a folder; returns the names of the files that it changed.

    Example:
        >>> from gated_qwen.conversion.create import create
        >>> from gated_qwen import GatedQwenConfig
        >>> folder = create("tiny-headwise", tmp / "old")
        >>> _ = (folder / "modeling_gated_qwen.py").write_text("# of an older version")
        >>> refresh_remote_code(folder, GatedQwenConfig)
        ['modeling_gated_qwen.py']
    """
    folder = Path(folder)
    auto_map, files = remote_code(config_class)
    changed = []
    for name, source in files.items():
        content = source.read_bytes()
        if not (folder / name).is_file() or (folder / name).read_bytes() != content:
            with atomic_file(folder / name) as temporary:
                temporary.write_bytes(content)
            changed.append(name)
    config: dict[str, Any] = read_config(folder)
    if {**(config.get("auto_map") or {}), **auto_map} != config.get("auto_map"):
        config["auto_map"] = {**(config.get("auto_map") or {}), **auto_map}
        with atomic_file(folder / "config.json") as temporary:
            write_json(temporary, config)
        changed.append("config.json")
    return changed


def _with_imports(names: Iterable[str]) -> dict[str, Path]:
    """The files of the named modules, and of those that they import with a dot, by file name."""
    from transformers.dynamic_module_utils import get_relative_imports

    found: dict[str, Path] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if f"{name}.py" not in found:
            found[f"{name}.py"] = _source(name)
            waiting += get_relative_imports(found[f"{name}.py"])
    return dict(sorted(found.items()))


def _source(name: str) -> Path:
    # What lies beside the model under a config's name is a re-export; the real file lies in `configuration/`.
    for package in ("gated_qwen.configuration", "gated_qwen"):
        spec = find_spec(f"{package}.{name}")
        if spec is not None and spec.origin:
            return Path(spec.origin)
    raise ValueError(f"{name}.py: named by the model's code, and not part of this package")
