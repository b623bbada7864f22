#!/usr/bin/env python3
"""Write ``src/kvyard/server/epp/ext_proc.binpb``: the descriptions of Envoy's ext_proc messages (Apache-2.0), from xds-protos.

    .venv/bin/python scripts/make_ext_proc.py

Messages that those of the protocol have in them come along; comments, options and all other messages don't. The package itself
is a dependency of our tests alone: it brings parts of ``opentelemetry`` that break OpenTelemetry's exporters and Ray.
"""

from __future__ import annotations

from pathlib import Path

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet

OUT = Path(__file__).resolve().parent.parent / "src/kvyard/server/epp/ext_proc.binpb"


def needed(*roots: Descriptor) -> set[Descriptor | EnumDescriptor]:
    """Outermost messages and enums that ``roots`` have in them, at any depth."""
    descriptors = set[Descriptor | EnumDescriptor]()
    seen, left = set[str](), list(roots)
    while left:
        message = left.pop()
        if message.full_name in seen:
            continue
        seen.add(message.full_name)
        descriptors.add(outermost(message))
        left += message.nested_types
        for field in message.fields:
            if field.message_type is not None:
                left.append(field.message_type)
            if field.enum_type is not None:
                descriptors.add(outermost(field.enum_type))
                if field.enum_type.containing_type is not None:
                    left.append(field.enum_type.containing_type)
    return descriptors


def outermost(described: Descriptor | EnumDescriptor) -> Descriptor | EnumDescriptor:
    while described.containing_type is not None:
        described = described.containing_type
    return described


def bare(message: DescriptorProto) -> None:
    """Drop options, but for what says that a message is an entry of a map."""
    entry = message.options.map_entry
    message.ClearField("options")
    if entry:
        message.options.map_entry = True
    for field in message.field:
        field.ClearField("options")
    for oneof in message.oneof_decl:
        oneof.ClearField("options")
    for enum in message.enum_type:
        bare_enum(enum)
    for nested in message.nested_type:
        bare(nested)


def bare_enum(enum: EnumDescriptorProto) -> None:
    enum.ClearField("options")
    for value in enum.value:
        value.ClearField("options")


def main() -> None:
    by_file: dict[str, list[Descriptor | EnumDescriptor]] = {}
    files: dict[str, FileDescriptor] = {}
    for described in needed(ProcessingRequest.DESCRIPTOR, ProcessingResponse.DESCRIPTOR):
        files[described.file.name] = described.file
        by_file.setdefault(described.file.name, []).append(described)
    made: dict[str, FileDescriptorProto] = {}

    def add(name: str) -> None:
        if name in made:
            return
        whole = FileDescriptorProto.FromString(files[name].serialized_pb)
        file = FileDescriptorProto(name=name, package=whole.package, syntax=whole.syntax)
        kept = {described.name for described in by_file[name]}
        file.message_type.extend(declared for declared in whole.message_type if declared.name in kept)
        file.enum_type.extend(declared for declared in whole.enum_type if declared.name in kept)
        for message in file.message_type:
            bare(message)
        for enum in file.enum_type:
            bare_enum(enum)
        for other in whole.dependency:
            if other in files:
                add(other)
                file.dependency.append(other)
        made[name] = file

    for name in sorted(files):
        add(name)
    OUT.write_bytes(FileDescriptorSet(file=made.values()).SerializeToString(deterministic=True))
    print(f"{OUT.name}: {OUT.stat().st_size} bytes, {len(made)} files")


if __name__ == "__main__":
    main()
