"""Writes docs/reference/ from the comments in protos/: `make_api_docs.py [--check]`."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

ROOT: Final = Path(__file__).resolve().parent.parent
PROTOS: Final = ROOT / "protos"
PAGES: Final = ROOT / "docs" / "reference"

# What a hub writes for itself is not for peers.
_INTERNAL: Final = "astraflow.journal.v1"
_OTHERS: Final = ("recipe.md", "cli.md", "metrics.md")
_Type = FieldDescriptorProto
_NAMES: Final[Mapping[int, str]] = {
    number: name.removeprefix("TYPE_").lower() for name, number in _Type.Type.items()
}
# Numbers of the fields of descriptor.proto, of which paths of comments are made.
_MESSAGES, _ENUMS, _SERVICES, _PARTS = 4, 5, 6, 2
_TEXT_INDENT: Final = "  "


@dataclass(slots=True)
class _Page:
    """What one package has, as sections in the order of its files."""

    services: list[str] = field(default_factory=list[str])
    messages: list[str] = field(default_factory=list[str])

    def text(self, package: str) -> str:
        """Return the page."""
        head = f"# {package}\nMade by `scripts/make_api_docs.py` from the comments in `protos/`."
        return "\n\n".join([head, *self.services, *self.messages]) + "\n"


def pages() -> dict[str, str]:
    """Return the text of each page by its name."""
    found: dict[str, _Page] = {}
    files = [file for file in _files() if file.package != _INTERNAL]
    for file in files:
        page = found.setdefault(file.package, _Page())
        comments = _Comments(file)
        page.services += [
            _service(each, file.package, comments, (_SERVICES, index))
            for index, each in enumerate(file.service)
        ]
        page.messages += [
            _message(each, file.package, comments, (_MESSAGES, index))
            for index, each in enumerate(file.message_type)
        ]
        page.messages += [
            _enum(each, comments, (_ENUMS, index)) for index, each in enumerate(file.enum_type)
        ]
    texts = {_page_of(package): page.text(package) for package, page in sorted(found.items())}
    return {"README.md": _contents(files), **texts}


def _files() -> Sequence[FileDescriptorProto]:
    """Return the protos with their comments, in the order of their names."""
    names = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "set")
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}"]
        options = ["--include_source_info", f"--descriptor_set_out={out}"]
        subprocess.run([*command, *options, *names], check=True)
        files = FileDescriptorSet.FromString(out.read_bytes()).file
    return sorted(files, key=lambda file: file.name)


class _Comments:
    """The comments of a file, by the path of what they stand before."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._by_path = {
            tuple(place.path): place.leading_comments
            for place in file.source_code_info.location
            if place.leading_comments
        }

    def lines(self, path: tuple[int, ...]) -> list[str]:
        """Return a comment without the space that each line begins with."""
        return [line[1:].rstrip() for line in self._by_path.get(path, "").splitlines()]

    def text(self, path: tuple[int, ...]) -> str:
        """Return a comment as paragraphs; what is indented stays as it is."""
        blocks = "\n".join(self.lines(path)).split("\n\n")
        return "\n\n".join(
            f"```text\n{block}\n```" if _is_table(block) else block for block in blocks
        )

    def cell(self, path: tuple[int, ...]) -> str:
        """Return a comment as the cell of a table."""
        return " ".join(" ".join(self.lines(path)).split()).replace("|", "\\|")


def _is_table(block: str) -> bool:
    return any(line.startswith(_TEXT_INDENT) for line in block.splitlines())


def _contents(files: Sequence[FileDescriptorProto]) -> str:
    lines = [
        "# Reference",
        "- [Keys of a recipe](recipe.md), and the options of all that is built in",
        "- [Commands](cli.md)",
        "- [Metrics](metrics.md)",
        "- the contract, below: every service, message and enum of `protos/`, made from its",
        "  comments by `scripts/make_api_docs.py`; [clients.md](../clients.md) says how to begin",
        "",
        "| service | calls |",
        "|---|---|",
    ]
    for file in files:
        for service in file.service:
            calls = ", ".join(
                f"[{method.name}]({_page_of(file.package)}#{_anchor(service, method)})"
                for method in service.method
            )
            lines.append(f"| {service.name} | {calls} |")
    packages = sorted({file.package for file in files})
    lines += ["", "Packages: " + ", ".join(f"[{each}]({_page_of(each)})" for each in packages)]
    return "\n".join(lines) + "\n"


def _service(
    service: ServiceDescriptorProto, package: str, comments: _Comments, path: tuple[int, ...]
) -> str:
    parts = [f"## {service.name}", comments.text(path)]
    for index, method in enumerate(service.method):
        kinds = [
            ("stream " if is_stream else "") + _link(name, package)
            for is_stream, name in (
                (method.client_streaming, method.input_type),
                (method.server_streaming, method.output_type),
            )
        ]
        parts += [
            f"### {service.name}.{method.name}",
            " → ".join(kinds),
            comments.text((*path, _PARTS, index)),
        ]
    return "\n\n".join(parts)


def _message(
    message: DescriptorProto, package: str, comments: _Comments, path: tuple[int, ...]
) -> str:
    parts = [f"## {message.name}", comments.text(path)]
    rows = [
        f"| `{each.name}` | {each.number} | {_kind(each, message, package)} |"
        f" {comments.cell((*path, _PARTS, index))} |"
        for index, each in enumerate(message.field)
    ]
    if rows:
        parts.append("\n".join(["| field | number | type | |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts)


def _kind(part: FieldDescriptorProto, message: DescriptorProto, package: str) -> str:
    for nested in message.nested_type:
        if nested.options.map_entry and part.type_name.endswith(f".{message.name}.{nested.name}"):
            key, value = (_kind(each, nested, package) for each in nested.field)
            return f"map of {key} to {value}"
    name = _link(part.type_name, package) if part.type_name else _NAMES[part.type]
    if part.label == _Type.LABEL_REPEATED:
        return f"repeated {name}"
    if part.proto3_optional:
        return f"optional {name}"
    if part.HasField("oneof_index"):
        return f"{name}, one of `{message.oneof_decl[part.oneof_index].name}`"
    return name


def _enum(enum: EnumDescriptorProto, comments: _Comments, path: tuple[int, ...]) -> str:
    rows = [
        f"| `{each.name}` | {each.number} | {comments.cell((*path, _PARTS, index))} |"
        for index, each in enumerate(enum.value)
    ]
    table = "\n".join(["| value | number | |", "|---|---|---|", *rows])
    return "\n\n".join([f"## {enum.name}", comments.text(path), table])


def _link(type_name: str, package: str) -> str:
    """Return the name of a message or enum, linked to where it is described."""
    home, _, name = type_name.lstrip(".").rpartition(".")
    if not home.startswith("astraflow."):
        return f"{home}.{name}"
    page = "" if home == package else _page_of(home)
    return f"[{name}]({page}#{name.lower()})"


def _anchor(service: ServiceDescriptorProto, method: MethodDescriptorProto) -> str:
    return f"{service.name}{method.name}".lower()


def _page_of(package: str) -> str:
    return f"{package.split('.')[1]}.md"


def _own_pages() -> Sequence[Path]:
    """Return the pages that are there and are not those of make_reference.py."""
    return [path for path in PAGES.glob("*.md") if path.name not in _OTHERS]


def main() -> int:
    """Write the pages, or with --check say whether they are as they would be written."""
    fresh = pages()
    if "--check" in sys.argv:
        held = {path.name: path.read_text(encoding="utf-8") for path in _own_pages()}
        return int(held != fresh)
    PAGES.mkdir(exist_ok=True)
    for path in _own_pages():
        path.unlink()
    for name, text in fresh.items():
        (PAGES / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
