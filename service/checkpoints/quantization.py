"""What config.json and hf_quant_config.json say of how the weights of modules are quantized.

A weight is read as its tensors say. What is said of it explains why it cannot be read, and must not name
other numbers than they have; what is said of other modules decides nothing. Sources: compressed-tensors 0.20,
ModelOpt 0.47, transformers 5.23, AutoGPTQ 0.7, AutoAWQ 0.2.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from pathlib import Path
from typing import Any

from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints.config import CheckpointError, Config, read_json_object
from expertd.service.checkpoints.encodings import Encoded, Encoding
from expertd.service.util.sentences import all_of, any_of, shown

_FILE = "hf_quant_config.json"
_MIXED = "MIXED_PRECISION"
_FP8 = frozenset({Encoding.BLOCKS, Encoding.ROWS, Encoding.TENSOR, Encoding.MXFP8})
_NVFP4, _MXFP4, _INT4 = (frozenset({one}) for one in (Encoding.NVFP4, Encoding.MXFP4, Encoding.INT4))
_NUMBERS = {(8, "float"): _FP8, (4, "float"): _NVFP4 | _MXFP4, (4, "int"): _INT4}
_ALGORITHMS = {
    **dict.fromkeys(
        ("FP8", "FP8_PB_WO", "FP8_PB_REAL", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_BLOCK_SCALES"), _FP8
    ),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8"), _NVFP4),
    **dict.fromkeys(("MXFP4", "W4A16_MXFP4", "W4A8_MXFP4_FP8"), _MXFP4),
    "MXFP8": frozenset({Encoding.MXFP8}),
}
_METHODS = {
    "fp8": _FP8 | _MXFP4,
    "fbgemm_fp8": _FP8,
    "mxfp4": _MXFP4,
    "mxfp8": _FP8,
    "gptq": _INT4,
    "awq": _INT4,
}
_DTYPES = {"fp8_e4m3": _FP8, "fp4": _NVFP4 | _MXFP4}  # Quark's
_INTEGERS: dict[str, dict[str, tuple[object, ...]]] = {
    "gptq": {"bits": (4,), "sym": (True,), "desc_act": (False,), "checkpoint_format": ("gptq",)},
    "awq": {"bits": (4,), "zero_point": (False,), "version": ("gemm", "GEMM")},
}
"""What these methods must say, where they say something: numbers of four bits, symmetric, packed as usual."""
_EXPERTS = {"fp8": _FP8, "fp4": _MXFP4}
_OTHERS = ("compressed-tensors", "modelopt", "quark")  # other keys say it
_BLOCKS = ([SCALE_BLOCK, SCALE_BLOCK], f"{SCALE_BLOCK}x{SCALE_BLOCK}", [1, 32])
_EXCLUDED = (
    "ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude",
    "llm_int8_skip_modules",
)  # fmt: skip
_IN_WEIGHTS = ("weight_input", "weight_output")  # the locations of transforms that are not made at run time
_LAYER = re.compile(r"(?:^|\.)(layers\.\d+(?:\..*)?)$")
_CLASS = re.compile(r"[A-Z]\w*")
_PATTERN = re.compile(r"[\\^$+|]")  # transformers takes all names for patterns
_SLOW = re.compile(r"[+*}][^()]*\)[+*{]")  # such as (a+)+, which may take longer than anybody waits


@dataclass(frozen=True)
class Stated:
    """What is said of a weight under a key; `allowed`: the encodings that it may mean."""

    key: str
    expected: str
    got: str
    allowed: frozenset[Encoding] = frozenset()


class _Names:
    """Modules by their names, parts of their names, patterns ("re:..." or with *), or classes.

    Layers have other names in some descriptions than in the files: what is before their number is left out.
    """

    def __init__(self, given: object) -> None:
        given = [given] if isinstance(given, str) else given if isinstance(given, (list, dict)) else []
        names = [name for name in given if isinstance(name, str)]
        self._is_class = any(
            _CLASS.fullmatch(name) and (name == "Linear" or "Expert" in name or "MoE" in name)
            for name in names
        )
        patterns = [name for name in names if name.startswith("re:") or _PATTERN.search(name)]
        for pattern in filter(_SLOW.search, patterns):
            raise re.error("a repeated group repeats something", pattern.removeprefix("re:"))
        self._patterns = [re.compile(name.removeprefix("re:")) for name in patterns]
        rest = [name for name in names if name not in patterns]
        if globs := [translate(_shortened(name)) for name in rest if "*" in name]:
            self._patterns.append(re.compile("|".join(globs)))
        short = {_shortened(name) for name in rest if "*" not in name}
        self._layers = {name for name in short if name.startswith("layers.")}
        self._parts = [f".{name}." for name in short - self._layers]

    def precision(self, module: str) -> int:
        """How precisely they name a module: 3 by name, 2 by pattern, 1 by class; 0: not at all."""
        short = _shortened(module)
        if any(part in f".{short}." for part in self._parts) or not self._layers.isdisjoint(_parents(short)):
            return 3
        names = {module, short, f"model.{short}"} if self._patterns else ()
        if any(pattern.match(name) for pattern in self._patterns for name in names):
            return 2
        return int(self._is_class)


@dataclass(frozen=True)
class _Description:
    """What is said of modules: by name, of the rest, and of those that are transformed but for others."""

    excluded: _Names
    named: tuple[tuple[_Names, Stated], ...]
    rest: Stated | None
    transforms: tuple[tuple[_Names, _Names, Stated], ...]

    def of(self, module: str) -> Stated | None:
        if self.excluded.precision(module):
            return None
        found = [(names.precision(module), stated) for names, stated in self.named]
        finest = max((precision for precision, _ in found), default=0)
        if finest == 0:
            return self.rest
        best = [stated for precision, stated in found if precision == finest]  # each may be meant
        return replace(best[0], allowed=best[0].allowed.union(*(one.allowed for one in best)))

    def transform(self, module: str) -> Stated | None:
        matches = (
            stated
            for names, others, stated in self.transforms
            if names.precision(module) and not others.precision(module)
        )
        return next(matches, None)


class Quantization:
    """All that is said of a checkpoint."""

    def __init__(self, descriptions: Collection[_Description] = ()) -> None:
        self._descriptions = descriptions

    def of(self, module: str) -> Stated | None:
        """What is said of the weight of a module; None: nothing, or that it is not quantized."""
        return next(filter(None, (one.of(module) for one in self._descriptions)), None)

    def check(self, module: str, encoded: Encoded | None) -> None:
        """Raise CheckpointError if what is said of a weight is why it cannot be served.

        encoded  what its tensors say, which must not be anything else; None: nothing that is known
        """
        stated = next(filter(None, (one.transform(module) for one in self._descriptions)), None)
        if stated is None and (encoded is None or encoded.encoding is not Encoding.FLOAT):
            stated = self.of(module)
        if stated is None or (stated.allowed if encoded is None else encoded.encoding in stated.allowed):
            return
        expected, got = stated.expected, f"{stated.got} for {module}"
        if encoded is not None:
            expected = encoded.format if stated.allowed else expected
            got += f", whose tensors are {encoded.format}"
        raise CheckpointError(f"{stated.key}: expected {expected}, got {got}")


def read_quantization(configs: tuple[Config, ...]) -> Quantization:
    """What is said of a checkpoint whose config.json has these objects. Raises CheckpointError."""
    found = [
        (f"{config.path}: {name}", config.optional(name))
        for config in configs
        for name in ("quantization_config", "compression_config")
        if config.optional(name) is not None
    ]
    path = configs[0].path.parent / _FILE
    if not found and _is_there(path):
        found.append((f"{path}: quantization", read_json_object(path).get("quantization") or {}))
    dtypes = [(f"{config.path}: expert_dtype", config.optional("expert_dtype")) for config in configs]
    descriptions = []
    for where, given in found:
        if not isinstance(given, dict):
            raise CheckpointError(f"{where}: expected an object, got {shown(given)}")
        try:
            values = {key: value for key, value in given.items() if value is not None}
            descriptions.append(_described(where, values, dtypes))
        except re.error as error:
            raise CheckpointError(
                f"{where}: expected patterns of names, got {shown(error.pattern)}"
            ) from error
    return Quantization(descriptions)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _described(where: str, given: Mapping[str, Any], dtypes: Sequence[tuple[str, Any]]) -> _Description:
    excluded = [name for key in _EXCLUDED for name in _listed(given.get(key))]
    # GPTQModel names them in another way.
    excluded += [f"re:{name[2:]}" for name in _object(given.get("dynamic")) if name.startswith("-:")]
    return _Description(
        _Names(excluded),
        tuple(_named(where, given, dtypes)),
        _of_the_rest(where, given),
        tuple(_transforms(f"{where}.transform_config", given.get("transform_config"))),
    )


def _named(
    where: str, given: Mapping[str, Any], dtypes: Sequence[tuple[str, Any]]
) -> Iterator[tuple[_Names, Stated]]:
    """What is said of modules that are named, the most decisive first."""
    by_algorithm: dict[str, list[str]] = {}
    for name, layer in _object(given.get("quantized_layers")).items():
        if (algorithm := _object(layer).get("quant_algo")) is not None:
            by_algorithm.setdefault(str(algorithm), []).append(name)
    for algorithm, names in by_algorithm.items():
        yield _Names(names), _known(f"{where}.quantized_layers.quant_algo", algorithm, _ALGORITHMS)
    for name, layer in _object(given.get("layer_quant_config")).items():
        if stated := _of_quark(f"{where}.layer_quant_config", layer):
            yield _Names(name), stated
    if given.get("quant_algo") in (None, _MIXED):  # else the groups say the same with fewer words
        for name, group in _object(given.get("config_groups")).items():
            weights = _object(_object(group).get("weights"))
            if weights:
                stated = _of_numbers(f"{where}.config_groups.{name}.weights", weights)
                yield _Names(_object(group).get("targets") or "*"), stated
    if given.get("quant_method") == "fp8":
        for key, dtype in ((f"{where}.expert_dtype", given.get("expert_dtype")), *dtypes):
            if dtype is not None:
                yield _Names("experts"), _known(key, dtype, _EXPERTS)


def _of_the_rest(where: str, given: Mapping[str, Any]) -> Stated | None:
    """What is said of modules that are not named."""
    algorithm, method, block = (given.get(key) for key in ("quant_algo", "quant_method", "weight_block_size"))
    if algorithm not in (None, _MIXED):
        return _known(f"{where}.quant_algo", algorithm, _ALGORITHMS)
    if method == "quark":
        return _of_quark(f"{where}.global_quant_config", given.get("global_quant_config"))
    if block not in (None, *_BLOCKS):
        return Stated(f"{where}.weight_block_size", shown(_BLOCKS[0]), shown(block))
    if method is None or str(method).startswith(_OTHERS):  # modelopt_fp4 and others
        return None
    for key, allowed in _INTEGERS.get(str(method), {}).items():
        if given.get(key, allowed[0]) not in allowed:
            return Stated(f"{where}.{key}", shown(allowed[0]), shown(given[key]))
    return _known(f"{where}.quant_method", method, _METHODS, _OTHERS)


def _of_numbers(key: str, weights: Mapping[str, Any]) -> Stated:
    """What a group of compressed-tensors says of its weights; null is its default."""
    given = {name: value for name, value in weights.items() if value is not None}
    block = given.get("block_structure", _BLOCKS[0])
    if given.get("symmetric") is False:
        return Stated(f"{key}.symmetric", "true", "false")
    if block not in _BLOCKS:
        return Stated(f"{key}.block_structure", shown(_BLOCKS[0]), shown(block))
    numbers = given.get("num_bits", 8), given.get("type", "int")
    allowed = next((allowed for known, allowed in _NUMBERS.items() if known == numbers), frozenset())
    got = all_of([f"{name} {shown(given[name])}" for name in ("num_bits", "type") if name in given])
    return Stated(key, "num_bits 8 and type 'float', or num_bits 4", got or "neither", allowed)


def _of_quark(key: str, given: object) -> Stated | None:
    weight = _object(given).get("weight")
    dtype = _object(weight[0] if isinstance(weight, list) and len(weight) == 1 else weight).get("dtype")
    return None if dtype is None else _known(f"{key}.weight.dtype", dtype, _DTYPES)


def _known(
    key: str, name: object, known: Mapping[str, frozenset[Encoding]], others: Sequence[str] = ()
) -> Stated:
    """What the name of a method, an algorithm or a dtype means; `others` are known, too, and mean nothing."""
    allowed = {one.upper(): allowed for one, allowed in known.items()}.get(str(name).upper(), frozenset())
    return Stated(key, any_of([*known, *others]), shown(name), allowed)


def _transforms(where: str, given: object) -> Iterator[tuple[_Names, _Names, Stated]]:
    """Transforms of activations at run time, which are not made."""
    groups = _object(given).get("config_groups")
    if given and not isinstance(groups, dict):
        yield _Names("*"), _Names(None), Stated(where, "config_groups", shown(given))
    for name, group in _object(groups).items():
        for apply in _listed(_object(group).get("apply")):
            location = _object(apply).get("location")
            if location not in _IN_WEIGHTS:
                key = f"{where}.config_groups.{name}.apply.location"
                stated = Stated(key, any_of(_IN_WEIGHTS), shown(location))
                yield _Names(_object(apply).get("targets")), _Names(_object(apply).get("ignore")), stated


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _listed(value: object) -> list[Any]:
    """A list, or one name as a list of it."""
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def _shortened(name: str) -> str:
    """A module's name from `layers.` and its number on, if it has one."""
    found = _LAYER.search(name)
    return found[1] if found else name


def _parents(module: str) -> Iterator[str]:
    """A module, and the modules that it is in."""
    while module:
        yield module
        module = module.rpartition(".")[0]
