"""NVIDIA's assembler and disassembler, from the pip packages of CUDA 13. No JAX here."""

from __future__ import annotations

import importlib.util
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}
FOLDER = Path("cu13") / "bin"  # below the `nvidia` package


class ToolError(Exception):
    """A tool is not installed, or refused its input."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """What ptxas made of one file."""

    log: str  # of `ptxas -v`: registers and spills of each kernel
    cubin: bytes


@dataclass(frozen=True, slots=True)
class Toolchain:
    """Both tools."""

    ptxas: Path
    nvdisasm: Path

    @classmethod
    def find(cls) -> Toolchain:
        """Of this Python's environment. Raises: ToolError naming the packages that are absent."""
        spec = importlib.util.find_spec("nvidia")
        return cls.below(list(map(Path, spec.submodule_search_locations or ())) if spec else [])

    @classmethod
    def below(cls, folders: Sequence[Path]) -> Toolchain:
        """Of the first of the folders that has each. Raises: ToolError."""
        found = {name: _first(folders, name) for name in PACKAGES}
        if absent := [PACKAGES[name] for name, path in found.items() if path is None]:
            raise ToolError(f"{' and '.join(absent)} must be installed: `make test-aot` does it")
        return cls(**{name: path for name, path in found.items() if path is not None})

    def assemble(self, ptx: str, arch: str) -> Assembly:
        """Raises: ToolError with what ptxas says."""
        with tempfile.TemporaryDirectory() as folder:
            source, result = Path(folder) / "x.ptx", Path(folder) / "x.cubin"
            source.write_text(ptx)
            done = _run([self.ptxas, "-v", "-arch", arch, source, "-o", result])
            return Assembly(done.stderr, result.read_bytes())

    def disassemble(self, cubin: bytes) -> str:
        """The instructions of all its kernels. Raises: ToolError."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "x.cubin"
            source.write_bytes(cubin)
            return _run([self.nvdisasm, "-c", source]).stdout


def _first(folders: Sequence[Path], name: str) -> Path | None:
    paths = (folder / FOLDER / name for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def _run(words: list[str | Path]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolError(f"{Path(words[0]).name} failed: {done.stderr.strip()}")
    return done
