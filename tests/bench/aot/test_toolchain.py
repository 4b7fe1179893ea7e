"""Tools that are absent, and tools that refuse; stand-ins are small shell scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.aot.toolchain import FOLDER, Toolchain, ToolError

PTXAS = """\
#!/bin/sh
# -v -arch ARCH SOURCE -o RESULT
grep -q entry "$4" || { echo "no entry" >&2; exit 255; }
echo "info for $3" >&2
printf cubin > "$6"
"""
NVDISASM = '#!/bin/sh\ncat "$2"\n'


def install(folder: Path, **scripts: str) -> Path:
    (folder / FOLDER).mkdir(parents=True)
    for name, text in scripts.items():
        path = folder / FOLDER / name
        path.write_text(text)
        path.chmod(0o755)
    return folder


def test_absent_tools_are_named_by_their_packages(tmp_path: Path):
    with pytest.raises(ToolError, match="nvidia-cuda-nvcc and nvidia-cuda-nvdisasm must be"):
        Toolchain.below([])
    only_one = install(tmp_path, ptxas=PTXAS)
    with pytest.raises(ToolError, match=r"^nvidia-cuda-nvdisasm must be installed"):
        Toolchain.below([only_one])


def test_tools_may_lie_in_different_folders(tmp_path: Path):
    first = install(tmp_path / "a", nvdisasm=NVDISASM)
    second = install(tmp_path / "b", ptxas=PTXAS, nvdisasm="other")
    found = Toolchain.below([tmp_path / "none", first, second])
    assert found.ptxas == second / FOLDER / "ptxas"
    assert found.nvdisasm == first / FOLDER / "nvdisasm"


def test_a_file_goes_through_both_tools(tmp_path: Path):
    tools = Toolchain.below([install(tmp_path, ptxas=PTXAS, nvdisasm=NVDISASM)])
    assembly = tools.assemble(".visible .entry k()", "sm_80")
    assert assembly.log == "info for sm_80\n"
    assert tools.disassemble(assembly.cubin) == "cubin"


def test_what_the_assembler_refuses_is_an_error_with_its_words(tmp_path: Path):
    tools = Toolchain.below([install(tmp_path, ptxas=PTXAS, nvdisasm=NVDISASM)])
    with pytest.raises(ToolError, match="ptxas failed: no entry"):
        tools.assemble("nothing", "sm_80")
