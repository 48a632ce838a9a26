"""The message classes of the protocol, built from the proto files by protoc."""

import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc

__all__ = ["controller_message", "placement_map", "rank_message"]

_PROTO = Path(__file__).parents[3] / "proto"
_PACKAGE = "evenkeel.v1"


@cache
def _pool() -> DescriptorPool:
    """Return the descriptors of all proto files, in a pool that nothing else uses."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "descriptors"
        command = [
            "protoc",
            f"-I{_PROTO}",
            f"-I{files('grpc_tools') / '_proto'}",
            "--include_imports",
            f"--descriptor_set_out={out}",
            *(str(path) for path in sorted(_PROTO.rglob("*.proto"))),
        ]
        if protoc.main(command):
            raise RuntimeError("protoc refused the proto files")
        found = FileDescriptorSet.FromString(out.read_bytes())
    pool = DescriptorPool()
    for file in found.file:
        pool.Add(file)
    return pool


@cache
def rank_message() -> Any:
    """Return the class of the messages that ranks send."""
    return GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.RankMessage"))


@cache
def controller_message() -> Any:
    """Return the class of the messages that controllers send."""
    return GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.ControllerMessage"))


@cache
def placement_map() -> Any:
    """Return the class of the maps that the store keeps."""
    return GetMessageClass(_pool().FindMessageTypeByName(f"{_PACKAGE}.PlacementMap"))
