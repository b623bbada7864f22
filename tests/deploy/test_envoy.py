"""Envoy's configuration: every field is one that Envoy has, by its own message types, and it fits the picker's defaults."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs PyYAML")
pytest.importorskip("envoy", reason="needs kvyard[epp]")

from envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from envoy.extensions.filters.http.ext_proc.v3 import ext_proc_pb2
from envoy.extensions.filters.http.router.v3 import router_pb2
from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2
from envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2
from google.protobuf.json_format import ParseDict, ParseError
from tests.deploy.support import DEPLOY, documents

from kvyard.server.epp.config import convert
from kvyard.server.epp.messages import DESTINATION, STREAMED
from kvyard.server.epp.service import READY

USED = (ext_proc_pb2, router_pb2, http_connection_manager_pb2, http_protocol_options_pb2)
"""Modules of the types that the file names by URLs: they are found where they were imported."""


def configuration() -> dict[str, Any]:
    (found,) = documents(DEPLOY / "envoy" / "envoy.yaml")
    return found


def test_envoy_takes_it_and_it_fits_the_picker() -> None:
    found = ParseDict(configuration(), Bootstrap()).static_resources
    manager = http_connection_manager_pb2.HttpConnectionManager()
    assert found.listeners[0].filter_chains[0].filters[0].typed_config.Unpack(manager)
    processor = ext_proc_pb2.ExternalProcessor()
    assert manager.http_filters[0].typed_config.Unpack(processor)
    clusters = {one.name: one for one in found.clusters}
    engines, picker = clusters["engines"], clusters[processor.grpc_service.envoy_grpc.cluster_name]
    assert engines.original_dst_lb_config.http_header_name == DESTINATION
    assert processor.processing_mode.request_body_mode == processor.processing_mode.response_body_mode == STREAMED
    (ours,) = [one.endpoint.address.socket_address for one in picker.load_assignment.endpoints[0].lb_endpoints]
    made = convert({}, "the defaults")
    assert (ours.address, ours.port_value) == (made.host, made.port)
    assert picker.health_checks[0].grpc_health_check.service_name in READY
    assert processor.message_timeout.seconds >= made.queue_seconds


def test_a_slip_would_be_found() -> None:
    wrong = copy.deepcopy(configuration())
    chain = wrong["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    chain["http_filters"][0]["typed_config"]["processing_mode"]["request_body_mod"] = "BUFFERED"
    with pytest.raises(ParseError, match="request_body_mod"):
        ParseDict(wrong, Bootstrap())


def test_the_pool_names_the_pickers_port() -> None:
    (pool,) = documents(DEPLOY / "kubernetes" / "epp" / "pool.yaml")
    services = [one for one in documents(DEPLOY / "kubernetes" / "picker" / "epp.yaml") if one["kind"] == "Service"]
    asked = pool["spec"]["endpointPickerRef"]
    assert [one["metadata"]["name"] for one in services] == [asked["name"]]
    assert asked["port"]["number"] in {port["port"] for port in services[0]["spec"]["ports"]}
