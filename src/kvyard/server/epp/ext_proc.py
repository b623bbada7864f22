"""Envoy's ext_proc messages, made from their descriptions in ``ext_proc.binpb`` (``scripts/make_ext_proc.py``).

They are in a pool of their own, so that a process may load Envoy's own modules too.
"""

from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_pool: Any = DescriptorPool()
for _file in FileDescriptorSet.FromString(Path(__file__).with_name("ext_proc.binpb").read_bytes()).file:
    _pool.Add(_file)


def _message(name: str) -> Any:
    return GetMessageClass(_pool.FindMessageTypeByName(name))


_V3 = "envoy.service.ext_proc.v3."
BodyResponse = _message(f"{_V3}BodyResponse")
CommonResponse = _message(f"{_V3}CommonResponse")
HeaderMutation = _message(f"{_V3}HeaderMutation")
HeadersResponse = _message(f"{_V3}HeadersResponse")
ImmediateResponse = _message(f"{_V3}ImmediateResponse")
ProcessingRequest = _message(f"{_V3}ProcessingRequest")
ProcessingResponse = _message(f"{_V3}ProcessingResponse")
TrailersResponse = _message(f"{_V3}TrailersResponse")
HeaderValue = _message("envoy.config.core.v3.HeaderValue")
HeaderValueOption = _message("envoy.config.core.v3.HeaderValueOption")
HttpStatus = _message("envoy.type.v3.HttpStatus")
ProcessingMode = _message("envoy.extensions.filters.http.ext_proc.v3.ProcessingMode")
Struct = _message("google.protobuf.Struct")
