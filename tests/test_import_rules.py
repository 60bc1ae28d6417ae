"""Imports go one way: server, pipelines, attention; and only the worker process loads torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
TENSOR_LIBRARIES = frozenset(
    {"accelerate", "diffusers", "peft", "safetensors", "torch", "transformers", "triton"}
)
WEB_LIBRARIES = frozenset({"fastapi", "httpx", "prometheus_client", "sse_starlette", "starlette", "uvicorn"})
PACKAGES = frozenset({"attention", "configs", "pipelines", "server", "benchmarks", "tests"})
IMPLEMENTATIONS = frozenset({"reference", "torch_impl", "triton_impl"})


@dataclass(frozen=True)
class Rule:
    """What the files of one folder may import; the standard library is always allowed."""

    packages: frozenset[str]
    only: frozenset[str] | None = None
    never: frozenset[str] = frozenset()

    def allows(self, name: str) -> bool:
        """Whether the top-level module ``name`` may be imported."""
        if name in sys.stdlib_module_names:
            return True
        if name in PACKAGES:
            return name in self.packages
        return name not in self.never and (self.only is None or name in self.only)


RULES = {
    "configs": Rule(
        frozenset({"configs"}),
        only=frozenset({"ftfy", "huggingface_hub", "pydantic", "pydantic_settings", "tokenizers", "yaml"}),
    ),
    "attention": Rule(frozenset({"attention"}), only=frozenset({"numpy", "torch", "triton"})),
    "pipelines": Rule(frozenset({"attention", "configs", "pipelines"}), never=WEB_LIBRARIES),
    "server": Rule(frozenset({"configs", "server"}), never=TENSOR_LIBRARIES),
}
# Single files that may import more than their folder: the one that knows Diffusers' attention dispatcher, the
# one that runs in the worker process, the ones that run a job or a step without a server, the one that counts
# token pairs (in integers), and the one that draws them.
EXCEPTIONS = {
    "attention/diffusers_door.py": frozenset({"diffusers"}),
    "server/attention_cli.py": frozenset({"attention"}),
    "server/clip_cost.py": frozenset({"attention"}),
    "server/worker_process.py": frozenset({"pipelines", "torch"}),
    "server/generate.py": frozenset({"pipelines"}),
    "server/profile.py": frozenset({"pipelines"}),
}
NEVER_LOAD_TORCH = (
    "configs",
    "configs.prompt_length",
    "configs.resolve",
    "configs.settings",
    "attention",
    "server.app",
    "server.supervisor",
)


@dataclass(frozen=True)
class Import:
    """One imported module, or name from a module: ``torch.nn.functional`` in line 3."""

    module: str
    line: int

    @property
    def top(self) -> str:
        """The top-level module."""
        return self.module.partition(".")[0]


def imports(path: Path, root: Path) -> Iterator[Import]:
    """Every import statement of a file, inside functions too, relative ones made absolute."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno)


def forbidden_imports(root: Path) -> list[str]:
    """``file:line imports module`` for every import that the table does not allow."""
    return [
        f"{name}:{each.line} imports {each.module}"
        for folder, rule in RULES.items()
        for path in sorted((root / folder).rglob("*.py"))
        for name in [path.relative_to(root).as_posix()]
        for each in imports(path, root)
        if each.top not in EXCEPTIONS.get(name, ()) and not rule.allows(each.top)
    ]


def implementations_that_import_each_other(root: Path) -> list[str]:
    """The same for imports of one implementation of an operator by another."""
    return [
        f"{path.relative_to(root).as_posix()}:{each.line} imports {each.module}"
        for path in sorted((root / "attention").rglob("*.py"))
        if path.stem in IMPLEMENTATIONS
        for each in imports(path, root)
        if each.top == "attention" and IMPLEMENTATIONS & set(each.module.split("."))
    ]


def test_imports_go_one_way() -> None:
    assert forbidden_imports(REPOSITORY) == []


def test_no_exception_outlives_its_file() -> None:
    needed = {
        name: {each.top for each in imports(REPOSITORY / name, REPOSITORY)} & modules
        for name, modules in EXCEPTIONS.items()
    }
    assert needed == EXCEPTIONS


def test_implementations_do_not_import_each_other() -> None:
    assert {path.stem for path in (REPOSITORY / "attention").rglob("*.py")} >= IMPLEMENTATIONS
    assert implementations_that_import_each_other(REPOSITORY) == []


@pytest.mark.parametrize(
    ("file", "line", "module"),
    [
        ("configs/a.py", "import torch", "torch"),
        ("configs/a.py", "from server.jobs import Job", "server.jobs.Job"),
        ("attention/a.py", "from configs.job import STAGES", "configs.job.STAGES"),
        ("attention/b/a.py", "import diffusers", "diffusers"),
        ("pipelines/a.py", "import server.app", "server.app"),
        ("pipelines/a.py", "from fastapi import FastAPI", "fastapi.FastAPI"),
        ("server/a.py", "from torch.nn import functional as F", "torch.nn.functional"),
        ("server/routes/a.py", "from ...pipelines import job", "pipelines.job"),
        ("server/worker_process.py", "from attention import swap", "attention.swap"),
    ],
)
def test_a_forbidden_import_is_named(tmp_path: Path, file: str, line: str, module: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(f"def late():\n    {line}\n", encoding="utf-8")
    assert forbidden_imports(tmp_path) == [f"{file}:2 imports {module}"]


@pytest.mark.parametrize(
    "line",
    [
        "from attention.window_sink.reference import f",
        "from attention.window_sink import torch_impl",
        "from .torch_impl import f",
    ],
)
def test_an_implementation_that_imports_another_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "attention/window_sink/triton_impl.py"
    path.parent.mkdir(parents=True)
    path.write_text(f"{line}\nimport torch\n", encoding="utf-8")
    (found,) = implementations_that_import_each_other(tmp_path)
    assert found.startswith("attention/window_sink/triton_impl.py:1 imports attention.window_sink.")


@pytest.mark.parametrize("module", NEVER_LOAD_TORCH)
def test_no_torch_is_loaded_by(module: str) -> None:
    program = f"import sys, {module}; print(*sorted({set(TENSOR_LIBRARIES)} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
