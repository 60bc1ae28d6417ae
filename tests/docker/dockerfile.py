"""Reads docker/Dockerfile into stages of instructions. Knows its syntax only as far as the tests need it."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DOCKERFILE = REPOSITORY / "docker/Dockerfile"


@dataclass(frozen=True)
class Instruction:
    """One instruction, continuation lines joined: ``COPY``, ``README.md LICENSE ./``."""

    name: str
    arguments: str

    @property
    def json_form(self) -> list[str]:
        """The arguments of an exec-form instruction. Raises ValueError for the shell form."""
        items = json.loads(self.arguments[self.arguments.index("[") :])
        return [str(item) for item in items]


@dataclass(frozen=True)
class Stage:
    """The instructions from one FROM to the next."""

    instructions: tuple[Instruction, ...]

    def all(self, name: str) -> list[Instruction]:
        """Every instruction of that name, in order."""
        return [instruction for instruction in self.instructions if instruction.name == name]

    def only(self, name: str) -> Instruction:
        """The one instruction of that name."""
        (instruction,) = self.all(name)
        return instruction

    def pairs(self, name: str) -> dict[str, str]:
        """The key=value arguments of all ENV or LABEL instructions."""
        words = [word for each in self.all(name) for word in shlex.split(each.arguments)]
        return dict(word.split("=", 1) for word in words)

    def copied(self) -> list[str]:
        """Paths of the build context that COPY brings into this stage."""
        sources: list[str] = []
        for each in self.all("COPY"):
            words = each.arguments.split()
            if not any(word.startswith("--from=") for word in words):
                sources += [word for word in words[:-1] if not word.startswith("--")]
        return sources


def stages() -> list[Stage]:
    """The stages of docker/Dockerfile; the last one is the image."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    found: list[list[Instruction]] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, _, arguments = line.strip().partition(" ")
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append(Instruction(name, arguments.strip()))
    return [Stage(tuple(instructions)) for instructions in found]
