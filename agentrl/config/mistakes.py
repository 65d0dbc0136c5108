"""Describes mistakes in a configuration: the key, the value, what was expected, and the nearest key that exists."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from agentrl.core.errors import ConfigError
from agentrl.core.removed import removed_setting

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_FOREIGN_NAMES = {
    **dict.fromkeys(("num_generations", "rollouts_per_example", "group_samples"), "credit.group_size"),
    **dict.fromkeys(("max_completion_length", "max_new_tokens", "max_completion_tokens"), "sampling.max_tokens"),
    **dict.fromkeys(("max_model_len", "max_seq_len", "max_seq_length", "seq_len"), "engine.max_context"),
    **dict.fromkeys(("max_steps", "total_training_steps", "num_train_steps"), "steps"),
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size"), "policies.<name>.step_size"),
    **dict.fromkeys(("generation_batch_size", "gradient_accumulation_steps"), "policies.<name>.step_size"),
    **dict.fromkeys(("max_async_level", "async_level", "steps_off_policy"), "policies.<name>.max_staleness"),
    **dict.fromkeys(("lora_rank", "lora_r"), "policies.<name>.lora.rank"),
    **dict.fromkeys(("kl_coef", "kl_beta", "beta"), "trainer.loss.kl"),
    **dict.fromkeys(("scale_rewards", "adv_estimator", "advantage_estimator"), "credit.advantage"),
    **dict.fromkeys(("warmup_ratio", "num_warmup_steps"), "trainer.optimizer.warmup_steps"),
    **dict.fromkeys(("env_args", "environment_args"), "environment.options"),
    **dict.fromkeys(("env", "env_id", "environment_factory"), "environment.id"),
    **dict.fromkeys(("model_name", "model_name_or_path", "base_model"), "model.path"),
    **dict.fromkeys(("num_eval_examples", "eval_tasks"), "evaluation.tasks"),
    **dict.fromkeys(("eval_steps", "eval_interval", "eval_every"), "evaluation.every"),
    **dict.fromkeys(("save_steps", "save_interval", "checkpoint_interval"), "checkpoint.every"),
    "entropy_coef": "trainer.entropy_bonus",
    "gpu_memory_utilization": "engine.memory_share",
    "gradient_checkpointing": "trainer.recompute",
    "lora_alpha": "policies.<name>.lora.alpha",
    "loss_type": "trainer.loss.name",
    "output_dir": "directory",
    "report_to": "sinks",
    "rollouts_per_task": "evaluation.attempts",
    "run_name": "name",
}
"""Settings of TRL, verifiers, PRIME-RL and verl, with the setting here that has their purpose."""
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a table",
    list: "a list",
    tuple: "a list",
}
_TYPES = {"bool": bool, "float": float, "int": int, "list": list, "string": str, "tuple": tuple}
"""Types by the first word of pydantic's errors."""
SHOWN = 10
"""Maximum number of mistakes shown at once."""


class _Location(NamedTuple):
    """The location of a mistake in a configuration."""

    path: list[str]
    """Keys that lead there, without the tags that pydantic adds."""
    section: type[BaseModel] | None
    """The section that holds the last key."""
    kinds: list[type[BaseModel]]
    """Sections among which the key `kind` chose this one."""
    annotation: Any
    """The expected type."""
    unnamed: int | None
    """Index of a key that stands where the user must insert a name."""


def config_error(error: ValidationError, source: str, model: type[BaseModel]) -> ConfigError:
    """Turn a pydantic error about a section into a `ConfigError`; its message names the file `source`."""
    return ConfigError(f"{source}: {describe_validation_error(error, model)}")


def describe_validation_error(error: ValidationError, model: type[BaseModel]) -> str:
    """Describe the problems in a pydantic error about a section, one line each."""
    return listed_problems(find_problems(error, model))


def listed_problems(lines: Sequence[str]) -> str:
    return "\n  ".join([*lines[:SHOWN], *([f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else [])])


def find_problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    expectations: dict[str, list[str]] = {}
    """Accepted values by problem: each member of a union adds its own."""
    for detail in error.errors(include_url=False):
        if detail["type"] == "default_factory_not_called":  # follows from another error of the same section
            continue
        problem, expected = _explain(detail, model)
        expectations[problem] = expectations.get(problem, []) + ([expected] if expected else [])
    return [
        f"{problem}: expected {' or '.join(dict.fromkeys(expected))}" if expected else problem
        for problem, expected in expectations.items()
    ]


def converted_values(data: Any, read: Any, path: str = "") -> Iterator[str]:
    """Report values that pydantic converted to another type, such as the text "8" to the number 8: TOML has its own
    syntax for numbers."""
    if isinstance(data, Mapping) and isinstance(read, Mapping):
        by_key = {str(key): value for key, value in read.items()}
        for key, value in data.items():
            yield from converted_values(value, by_key.get(str(key)), f"{path}.{key}" if path else str(key))
    elif isinstance(data, list) and isinstance(read, list | tuple):
        for index, (value, new_value) in enumerate(zip(data, read, strict=False)):
            yield from converted_values(value, new_value, f"{path}.{index}")
    elif isinstance(data, str | bool) != isinstance(read, str | bool) and isinstance(read, int | float):
        remedy = f", without quotes: {format_short(read)}" if isinstance(data, str) else ""
        yield f"{path} = {format_short(data)}: expected {_WORDS[type(read)]}{remedy}"
    elif isinstance(read, bool) and not isinstance(data, bool):
        yield f"{path} = {format_short(data)}: expected true or false: write {format_short(read)}"


def keys_of_error(location: Sequence[str | int], top: type[BaseModel]) -> list[str]:
    """The keys of an error's location."""
    return _locate(location, top).path


def all_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every valid key in dotted form, including all members of unions; `<name>` stands for a name that the user
    chooses."""
    for name, field in model.model_fields.items():
        members, is_table = sections_in_annotation(field.annotation)
        path = f"{prefix}{name}.<name>" if is_table else f"{prefix}{name}"
        yield path
        for member in members:
            yield from all_keys(member, f"{path}.")


def sections_in_annotation(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """Return the sections an annotation can hold, and whether the user names them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return sections_in_annotation(arguments[1])[0], bool(sections_in_annotation(arguments[1])[0])
    if get_origin(annotation) in (Literal, tuple, list):
        return [], False
    return [member for argument in arguments for member in sections_in_annotation(argument)[0]], False


def format_short(value: Any) -> str:
    """Format a value as in a TOML file, shortened."""
    text = repr(value) if not isinstance(value, str | bool) else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- one mistake ------------------------------------------------------------------------------------------------------


def _explain(detail: ErrorDetails, top: type[BaseModel]) -> tuple[str, str]:
    """Return the problem, and the accepted value if the given one has another type."""
    place = _locate(detail["loc"], top, detail["input"])
    dotted_key, kind, value = ".".join(place.path), detail["type"], detail["input"]
    if place.unnamed is not None:
        before, key = place.path[: place.unnamed], place.path[place.unnamed]
        return f"{'.'.join([*before, key])}: a name is missing: {'.'.join([*before, 'NAME', key])}", ""
    if kind == "extra_forbidden":
        return removed_setting(dotted_key) or f"unknown key {dotted_key}{_nearest(place, top)}", ""
    if kind == "missing":
        return f"{dotted_key} is missing", _in_words(place.annotation, dotted_key)
    if kind == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        return (f"{dotted_key}: {message}" if dotted_key else message), ""
    if kind == "too_short":
        return f"{dotted_key} is empty", f"at least {detail['ctx']['min_length']}"
    if kind == "union_tag_invalid":
        tag, expected = detail["ctx"]["discriminator"].strip("'"), detail["ctx"]["expected_tags"]
        return f"{dotted_key}.{tag} = {format_short(detail['ctx']['tag'])}", f"one of {expected}"
    problem = f"{dotted_key} = {format_short(value)}"
    if place.path[-1] == "[key]":
        problem = f"{'.'.join(place.path[:-2])}, key {format_short(value)}"
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        return problem, _in_words(place.annotation, dotted_key)
    type_name = kind.partition("_")[0]
    if kind.endswith(("_type", "_parsing", "_from_float")) and type_name in _TYPES:
        return problem, _WORDS[_TYPES[type_name]]
    message = detail["msg"].removeprefix("Input should be ")
    return problem, f"{message[:1].lower()}{message[1:]}"


def _locate(location: Sequence[str | int], top: type[BaseModel], value: Any = None) -> _Location:
    path: list[str] = []
    section: type[BaseModel] | None = None
    kinds: list[type[BaseModel]] = []
    unnamed: int | None = None
    annotation: Any = top
    for depth, part in enumerate(map(str, location), 1):
        annotation = _bare(annotation)
        members, is_table = sections_in_annotation(annotation)
        if len(_union_members(annotation)) > 1:  # pydantic adds the union member that it tried to the path
            choices: list[Any] = [member for member in members if part in _tags(member)]
            if part.startswith("dict["):
                choices += [choice for choice in map(_bare, _union_members(annotation)) if get_origin(choice) is dict]
            kinds, annotation = members, choices[0] if choices else None
            continue
        path.append(part)
        if members and not is_table:
            section = members[0]
            field = section.model_fields.get(part)
            annotation = None if field is None else field.annotation
        else:
            fields = [member.model_fields[part] for member in members if part in member.model_fields]
            holds_table = depth < len(location) or isinstance(value, Mapping)
            if unnamed is None and fields and (not holds_table or any(_is_table(field.annotation) for field in fields)):
                # a table in place of a plain setting is named like the setting: `scorers.judge`
                unnamed = len(path) - 1
            section, kinds, annotation = None, [], _item(annotation, part)
    return _Location(path, section, kinds, _bare(annotation), unnamed)


def _bare(annotation: Any) -> Any:
    """Strip bounds and `| None` from an annotation."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    choices = _union_members(annotation)
    return _bare(choices[0]) if len(choices) == 1 else annotation


def _is_table(annotation: Any) -> bool:
    """Whether a setting can be a table."""
    choices = [annotation, *_union_members(annotation)]
    return any(sections_in_annotation(choice)[0] or get_origin(_bare(choice)) is dict for choice in choices)


def _union_members(annotation: Any) -> list[Any]:
    """The members of a union except `None`; empty for any other type."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return []
    return [choice for choice in get_args(annotation) if choice is not types.NoneType]


def _item(annotation: Any, part: str) -> Any:
    """The type of the element `part` of a table or a list."""
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1]
    if get_origin(annotation) in (tuple, list) and part.isdecimal():
        index = 0 if Ellipsis in arguments else int(part)
        return arguments[index] if index < len(arguments) else None
    return None


def _in_words(annotation: Any, table: str = "") -> str:
    """Describe the values of a type as a user writes them."""
    bare = _bare(annotation)
    members, is_table = sections_in_annotation(bare)
    if is_table:
        return f"tables [{table}.NAME]"
    if members:
        required_keys = [name for name, field in members[0].model_fields.items() if field.is_required()]
        return "a table { " + ", ".join(f"{name} = ..." for name in required_keys or members[0].model_fields) + " }"
    if get_origin(bare) is dict:
        key, value = map(_in_words, get_args(bare))
        return f"a table {{ {'NAME' if key == 'text' else key} = {value}, ... }}"
    return " or ".join(map(_in_words, _union_members(bare))) or _WORDS.get(get_origin(bare) or bare, "a value")


def _nearest(place: _Location, top: type[BaseModel]) -> str:
    name, section = place.path[-1], place.section
    prefix = "".join(f"{part}." for part in place.path[:-1])
    siblings = [] if section is None else list(section.model_fields)
    for kind in place.kinds:
        if name in kind.model_fields and section is not None:
            return f" for kind = {_tags(section)[0]!r}; {prefix}{name} belongs to {prefix}kind = {_tags(kind)[0]!r}"
    by_name: dict[str, str] = {}
    for key in all_keys(top):
        by_name.setdefault(key.removesuffix(".<name>").rpartition(".")[2], key.removesuffix(".<name>"))
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.85):
        return f"; did you mean {prefix}{close[0]}?"
    if name in by_name:
        return f"; did you mean {by_name[name]}?"
    if name in _FOREIGN_NAMES:
        return f"; did you mean {_FOREIGN_NAMES[name]}?"
    if abbreviations := [key for key in siblings if "".join(word[0] for word in key.split("_")) == name]:
        return f"; did you mean {prefix}{abbreviations[0]}?"
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.6):
        return f"; did you mean {prefix}{close[0]}?"
    if close := difflib.get_close_matches(name, by_name, n=1, cutoff=0.75):
        return f"; did you mean {by_name[close[0]]}?"
    return f"; there are: {', '.join(siblings)}" if siblings else ""


def _tags(section: type[BaseModel]) -> tuple[str, ...]:
    field = section.model_fields.get("kind")
    return get_args(field.annotation) if field is not None else ()
