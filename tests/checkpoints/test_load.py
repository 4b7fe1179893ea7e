"""Filling a model's parameters: completeness, shapes before allocation, dtypes, no aliasing."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from checkpoints import aligned
from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFSource
from checkpoints.load import WeightSpec, load_params, read_params
from checkpoints.safetensors import SafetensorsSource
from checkpoints.source import TensorInfo


class DictSource:
    """A `TensorSource` in memory that counts what it reads."""

    def __init__(self, **tensors: np.ndarray) -> None:
        self.tensors = tensors
        self.num_read = 0

    def names(self) -> list[str]:
        return list(self.tensors)

    def info(self, name: str) -> TensorInfo:
        tensor = self.tensors[name]
        return TensorInfo(name, tensor.shape, tensor.dtype, tensor.nbytes)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> np.ndarray:
        self.num_read += 1
        return self.tensors[name] if slices is None else self.tensors[name][slices]

    def close(self) -> None: ...


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def spec(name: str, *shape: int, path: tuple[str | int, ...] | None = None) -> WeightSpec:
    return WeightSpec(path or (name,), (name,), shape)


def load_all(source, specs, **options):
    defaults: dict[str, Any] = {"dtype": np.float32, "file": "f"}
    return load_params(source, specs, **(defaults | options))


def test_paths_become_nested_dicts_and_lists():
    source = DictSource(a=ones(2), b=ones(3), c=ones(4))
    params = load_all(
        source,
        [
            spec("b", 3, path=("layers", 1, "w")),
            spec("a", 2, path=("layers", 0, "w")),
            spec("c", 4, path=("norm",)),
        ],
    )
    assert list(params) == ["layers", "norm"]
    assert [layer["w"].shape for layer in params["layers"]] == [(2,), (3,)]
    assert isinstance(params["norm"], jax.Array)


def test_the_first_accepted_name_that_is_there_is_used():
    source = DictSource(old=ones(2) * 7)
    params = load_all(source, [WeightSpec(("w",), ("new", "old"), (2,))])
    assert params["w"].tolist() == [7.0, 7.0]
    both = DictSource(old=ones(2), new=ones(2))
    with pytest.raises(CheckpointError, match="found also 1 tensor 'old'"):
        load_all(both, [WeightSpec(("w",), ("new", "old"), (2,))])


def test_missing_tensors_are_listed_up_to_five():
    specs = [spec(f"t{i}", 2) for i in range(7)]
    with pytest.raises(CheckpointError) as caught:
        load_all(DictSource(t0=ones(2)), specs)
    assert str(caught.value) == (
        "f: expected 6 tensors 't1', 't2', 't3', 't4', 't5' ..., found 1 tensors without"
    )


def test_left_over_tensors_are_listed_unless_ignored():
    source = DictSource(a=ones(2), extra=ones(1), rotary_0=ones(1), rotary_1=ones(1))
    with pytest.raises(CheckpointError, match=r"found also 1 tensor 'extra'$"):
        load_all(source, [spec("a", 2)], ignore=["rotary_*"])
    assert list(load_all(source, [spec("a", 2)], ignore=["rotary_*", "extra"])) == ["a"]


def test_every_shape_is_checked_before_anything_is_read_or_put():
    source = DictSource(a=ones(2, 3), z=ones(4, 5))
    put = []
    with pytest.raises(CheckpointError) as caught:
        load_all(source, [spec("a", 2, 3), spec("z", 5, 4)], put=put.append)
    assert str(caught.value) == "f: tensor 'z' has shape (4, 5), the model needs (5, 4)"
    assert source.num_read == 0
    assert put == []


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_])
def test_a_tensor_of_integers_is_refused(dtype):
    with pytest.raises(CheckpointError, match=r"has dtype .*, the model needs a floating one"):
        load_all(DictSource(a=np.zeros(2, dtype)), [spec("a", 2)])


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_each_tensor_is_converted_to_the_wanted_dtype(stored, wanted):
    values = np.linspace(-3, 3, 24).reshape(4, 6).astype(stored)
    params = load_all(
        DictSource(a=values, s=np.array(1.5, stored)), [spec("a", 4, 6), spec("s")], dtype=wanted
    )
    assert params["a"].dtype == params["s"].dtype == wanted
    np.testing.assert_array_equal(np.asarray(params["a"]), values.astype(wanted))
    assert float(params["s"]) == 1.5


@pytest.mark.parametrize("chunk_bytes", [1, 100, 300, 1 << 20])
def test_the_size_of_a_chunk_changes_nothing(monkeypatch, chunk_bytes: int):
    monkeypatch.setattr(aligned, "CHUNK_BYTES", chunk_bytes)
    values = np.arange(70, dtype=np.float32).reshape(7, 10)
    source = DictSource(a=values, none=np.zeros((0, 3), np.float32))
    params = load_all(source, [spec("a", 7, 10), spec("none", 0, 3)])
    np.testing.assert_array_equal(np.asarray(params["a"]), values)
    assert params["none"].shape == (0, 3)


@pytest.mark.parametrize(
    ("value", "dtype"), [(np.nan, np.float32), (-np.inf, np.float32), (3.4e38, ml_dtypes.bfloat16)]
)
def test_a_number_that_is_not_finite_is_refused_where_it_must_be(value: float, dtype: Any):
    tensor = ones(3, 2)
    tensor[2, 1] = value
    source = DictSource(a=tensor)
    load_all(source, [spec("a", 3, 2)], dtype=dtype)
    with pytest.raises(CheckpointError, match="f: tensor 'a': expected finite numbers of"):
        load_all(source, [spec("a", 3, 2)], dtype=dtype, must_be_finite=True)


def test_without_threads_nothing_is_read_ahead():
    source = DictSource(a=ones(2), b=ones(3))
    read = read_params(
        source, [spec("a", 2), spec("b", 3)], dtype=np.float32, num_threads=0, file="f"
    )
    arrays, num_bytes = next(read)
    assert (list(arrays), num_bytes, source.num_read) == ([("a",)], 8, 1)
    assert [list(arrays) for arrays, _ in read] == [[("b",)]]


def test_progress_adds_up_to_the_bytes_of_the_source():
    source = DictSource(a=ones(2, 3), b=ones(5))
    done = []
    load_all(source, [spec("a", 2, 3), spec("b", 5)], progress=done.append, dtype=jnp.bfloat16)
    assert done == [24, 20]


def test_put_gets_one_fresh_host_array_at_a_time():
    source = DictSource(a=ones(2, 3), b=ones(5))
    seen = []

    def put(array: np.ndarray) -> str:
        assert not any(np.shares_memory(array, tensor) for tensor in source.tensors.values())
        assert array.ctypes.data % 64 == 0
        seen.append(array.shape)
        return f"#{len(seen)}"

    assert load_all(source, [spec("a", 2, 3), spec("b", 5)], put=put) == {"a": "#1", "b": "#2"}
    assert seen == [(2, 3), (5,)]


# With files


def specs_of(source) -> list[WeightSpec]:
    return [WeightSpec((name,), (name,), source.info(name).shape) for name in source.names()]


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_params_do_not_change_when_the_file_does(tmp_path: Path, tiny, form: str):
    model = tiny.model()
    if form == "gguf":
        path = tiny.gguf(tmp_path / "m.gguf", model)
        source = GGUFSource(path)
    else:
        path = tiny.folder(tmp_path, model) / "model.safetensors"
        source = SafetensorsSource(tmp_path)
    params = load_all(source, specs_of(source))
    with path.open("r+b") as file:  # the same inode, so a mapping would see it
        file.write(b"\xff" * path.stat().st_size)
    source.close()
    for name, tensor in model.tensors.items():
        np.testing.assert_array_equal(np.asarray(params[name]), tensor)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_both_formats_load_to_the_same_params(tmp_path: Path, tiny, family: str):
    model = tiny.model(family)
    sources = [
        GGUFSource(tiny.gguf(tmp_path / "m.gguf", model)),
        SafetensorsSource(tiny.folder(tmp_path / "hf", model)),
    ]
    first, second = (load_all(source, specs_of(source), dtype=jnp.bfloat16) for source in sources)
    assert first.keys() == second.keys()
    for name in first:
        assert np.asarray(first[name]).tobytes() == np.asarray(second[name]).tobytes()


def test_quantized_rows_load_as_their_dequantization(tmp_path: Path, tiny, monkeypatch):
    monkeypatch.setattr(aligned, "CHUNK_BYTES", 1000)
    path = tiny.gguf(tmp_path / "m.gguf", tiny.model(), quantization=GGMLQuantizationType.Q8_0)
    source = GGUFSource(path)
    params = load_all(source, specs_of(source))
    for name in source.names():
        np.testing.assert_array_equal(np.asarray(params[name]), source.read(name))


def tie_specs(tied: bool) -> list[WeightSpec]:
    head = [] if tied else [spec("lm_head.weight", 320, 64, path=("head",))]
    return [spec("model.embed_tokens.weight", 320, 64, path=("embed",)), *head]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_a_head_is_used_only_if_untied_and_missed_only_if_absent(tiny, tied: bool, present: bool):
    tensors = tiny.model(tied=not present).tensors
    kept = {
        n: t for n, t in tensors.items() if n in ("model.embed_tokens.weight", "lm_head.weight")
    }
    source = DictSource(**kept)
    ignore = ["lm_head.weight"] if tied else []
    if not tied and not present:
        with pytest.raises(CheckpointError, match=r"expected 1 tensor 'lm_head\.weight'"):
            load_all(source, tie_specs(tied), ignore=ignore)
        return
    params = load_all(source, tie_specs(tied), ignore=ignore)
    assert ("head" in params) is not tied
    if not tied:
        np.testing.assert_array_equal(np.asarray(params["head"]), tensors["lm_head.weight"])


def test_only_this_file_of_the_package_imports_jax():
    code = (
        "import sys, checkpoints, checkpoints.checkpoint, checkpoints.resolve; "
        "assert 'jax' not in sys.modules; assert 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(aligned.__file__).parents[1])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_change_nothing_and_the_caller_puts_in_order(num_threads: int):
    tensors = {f"t{i}": np.full((3, 4), i, np.float32) for i in range(20)}
    specs = [spec(name, 3, 4) for name in tensors]
    own, seen = threading.get_ident(), list[float]()

    def put(array: np.ndarray) -> np.ndarray:
        assert threading.get_ident() == own
        seen.append(float(array[0, 0]))
        return array

    params = load_all(DictSource(**tensors), specs, put=put, num_threads=num_threads)
    assert seen == list(range(20))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(params[name], tensor)


def test_what_fails_in_a_thread_is_raised_and_no_more_is_read():
    class Failing(DictSource):
        def read(self, name: str, slices: tuple[slice, ...] | None = None) -> np.ndarray:
            if name == "t2":
                raise CheckpointError("f: tensor 't2' is damaged")
            return super().read(name, slices)

    source = Failing(**{f"t{i}": ones(3) for i in range(50)})
    with pytest.raises(CheckpointError, match="'t2' is damaged"):
        load_all(source, [spec(name, 3) for name in source.tensors], num_threads=2)
    assert source.num_read < 10
