"""What README.md and CONTRIBUTING.md tell people to type exists; the flag table is the code's."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

import jaxinfer
from checkpoints.catalog import CATALOG
from checkpoints.gguf_names import ARCHITECTURES
from jaxinfer.canary.guard import Guard
from jaxinfer.canary.schedule import DEFAULT_STAGES
from jaxinfer.config import EngineConfig, SamplingParams, replace
from jaxinfer.server.flags import FLAGS, Flag
from jaxinfer.server.protocol import ChatRequest, parse
from jaxinfer.server.settings import parse as parse_settings
from jaxinfer.server.startup import ROUTES
from jaxinfer.server.version_wire import LoadVersion
from jaxinfer.version_flags import parse as parse_command

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
BOTH = README + CONTRIBUTING
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
SHELL = "".join(re.findall(r"^```sh\n(.*?)^```", BOTH, re.DOTALL | re.MULTILINE))
MAKES = sorted({*re.findall(r"^make .*", SHELL, re.MULTILINE), *re.findall(r"`(make .*?)`", BOTH)})


def test_the_two_commands_come_first():
    assert README.index("make serve\nmake test\n") < README.index("make serve ARGS")


@pytest.mark.parametrize("command", MAKES)
def test_a_make_command_is_one_that_make_knows(command: str):
    if shutil.which("make") is None:
        pytest.skip("needs make")
    plain = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    words = ["make", "-n", *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=ROOT, env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_flags_of_make_serve_are_flags_of_the_server():
    given = [shlex.split(c)[2].removeprefix("ARGS=") for c in MAKES if "serve ARGS" in c]
    assert len(given) >= 2
    for args in given:
        parse_settings(shlex.split(args), {})  # a bad one would end the process


def test_every_flag_that_the_text_names_exists():
    prose = re.sub(r"^\| `--.*", "", README, flags=re.MULTILINE)
    named = set(re.findall(r"`--([a-z-]*[a-z])`", prose))
    switches = {f"no-{flag.name}" for flag in FLAGS if isinstance(flag.default, bool)}
    assert "dtype" in named
    assert named <= {flag.name for flag in FLAGS} | switches | {"config"}


def row(flag: Flag) -> str:
    default = {True: "on", False: "off", None: "", (): ""}.get(flag.default, flag.default)
    about = f"{flag.help}: {', '.join(flag.choices)}" if flag.choices else flag.help
    return f"| `--{flag.name}` | {default} | {about} |"


def test_the_flag_table_is_that_of_the_code():
    rows = re.findall(r"^\| `--.*", README.split("## Server")[1], re.MULTILINE)
    assert rows == [row(flag) for flag in FLAGS]


def test_the_flags_of_quantizing_are_those_of_the_tool():
    section = README.split("## Quantization")[1].split("## Server")[0]
    names = set(re.findall(r"^\| `(--[\w-]+)", section, re.MULTILINE))
    tool = (ROOT / "checkpoints" / "__main__.py").read_text("utf-8")
    assert len(names) == 8
    assert {name for name in names if f'"{name}"' not in tool} == set()


def test_the_routes_are_those_that_the_server_announces():
    section = README.split("## Server")[1].split(". Every flag")[0]
    assert re.findall(r"`(/.*?)`", section) == ROUTES.split()


def section_of(title: str) -> str:
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_commands_about_versions_are_read():
    words = re.findall(r"^python -m jaxinfer (.*)", section_of("New versions"), re.MULTILINE)
    assert len(words) == 4
    for line in words:
        parse_command(shlex.split(line))  # a bad one would end the process


def test_the_fields_of_a_load_and_the_bounds_are_those_of_the_code():
    loads, bounds = section_of("New versions").split("**The guard**")
    names = {n for row in re.findall(r"^\| (`.*?) \|", loads, re.MULTILINE) for n in ticked(row)}
    assert names == set(LoadVersion.__struct_fields__)
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \|", bounds, re.MULTILINE)
    guard = asdict(Guard())
    assert f"`false_alarm_rate` ({guard.pop('false_alarm_rate')})" in bounds
    assert {n: None if d == "null" else float(d) for n, d in rows} == guard


def test_the_default_schedule_is_that_of_the_code():
    row = re.search(r"^\| `schedule` \| (.*?) \|", README, re.MULTILINE)
    assert row is not None
    shares = ", ".join(f"{100 * stage.share:g}" for stage in DEFAULT_STAGES)
    requests = ", ".join(str(stage.min_requests) for stage in DEFAULT_STAGES)
    assert {stage.hold_s for stage in DEFAULT_STAGES} == {300.0}
    assert row[1] == f"{shares} % for 5 minutes and {requests} requests"


def ticked(text: str) -> list[str]:
    return re.findall(r"`(\w+)`", text)


def test_the_curl_body_is_a_streamed_chat_that_the_server_reads():
    body = re.search(r"-d '(.*?)'", README, re.DOTALL)
    assert body is not None
    request, unknown = parse(body[1].encode(), ChatRequest)
    assert request.stream
    assert not unknown


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_compiles_and_uses_public_names(number: int):
    tree = ast.parse(SNIPPETS[number])
    compile(tree, f"README snippet {number}", "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "jaxinfer":
            assert {alias.name for alias in node.names} <= set(jaxinfer.__all__)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jaxinfer":
            assert node.attr in jaxinfer.__all__


def test_the_snippets_pass_fields_that_exist():
    calls = [n for s in SNIPPETS[:2] for n in ast.walk(ast.parse(s)) if isinstance(n, ast.Call)]
    checked: set[str] = set()
    for call in calls:
        name = ast.unparse(call.func).split(".")[-1]
        if name == "print":
            continue
        fields = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
        if name == "LLM":
            replace(EngineConfig(), **fields)  # raises for a field that no part has
        else:
            SamplingParams(**fields)
        checked.add(name)
    assert checked == {"generate", "LLM", "chat", "stream", "SamplingParams", "score"}


def test_the_models_are_those_of_the_tables_in_the_code():
    from jaxinfer.models.registry import FAMILIES

    section = README.split("## Models")[1].split("## Server")[0]
    assert set(re.findall(r"\w+ForCausalLM", section)) == set(FAMILIES)
    gguf = re.search(r"^\| one GGUF file.*\| (.*) \|$", section, re.MULTILINE)
    assert gguf is not None
    assert gguf[1] == ", ".join(architecture.name for architecture in ARCHITECTURES)
    assert all(f"`{entry.name}`" in section for entry in CATALOG)
