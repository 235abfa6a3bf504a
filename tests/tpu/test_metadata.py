"""What a TPU VM's metadata server says of other hosts, by a stand-in; its silence is an error, not a host alone."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from data_pipelines.errors import PassingError
from tpu import cluster

HOSTS = "a:8470:10.0.0.2,b:8470:10.0.0.3"


class Metadata(BaseHTTPRequestHandler):
    def do_GET(self):
        _, _, attribute = self.path.rpartition("/")
        assert self.path == f"/computeMetadata/v1/instance/attributes/{attribute}"
        assert self.headers["Metadata-Flavor"] == "Google"
        answers = self.server.answers[attribute]
        status, text = answers.pop(0) if len(answers) > 1 else answers[0]
        self.server.asked.append(attribute)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_): ...


@pytest.fixture
def server(monkeypatch):
    """Its `answers`: attribute -> (status, text) of each request, the last one repeated. `asked`: attributes."""
    monkeypatch.setattr(cluster, "has_tpus", lambda: True)
    monkeypatch.setattr(cluster, "METADATA_PAUSE", 0.001)
    with HTTPServer(("127.0.0.1", 0), Metadata) as server:
        server.asked, server.answers = [], {"worker-network-endpoints": [(200, HOSTS)], "tpu-env": [(200, "")]}
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    "endpoints, settings, workers",
    [
        ("a:8470:10.0.0.2", "", 1),
        (HOSTS, "ACCELERATOR_TYPE: 'v5litepod-16'\n", 2),
        ("10.0.0.2", "WORKER_ID: '0'\nMEGASCALE_NUM_SLICES: '2'\n", 2),  # two slices of one host each
        (HOSTS, "MEGASCALE_NUM_SLICES: '4'", 8),
    ],
)
def test_it_tells_how_many_hosts_there_are(server, endpoints, settings, workers):
    server.answers = {"worker-network-endpoints": [(200, endpoints)], "tpu-env": [(200, settings)]}
    assert cluster.cloud_tpu_workers() == workers


def test_a_failure_that_passes_is_asked_again_as_often_as_jax_does(server):
    server.answers["worker-network-endpoints"] = [(503, ""), (404, ""), (500, ""), (503, ""), (503, ""), (200, HOSTS)]
    assert cluster.cloud_tpu_workers() == 2 and server.asked.count("worker-network-endpoints") == 6


def test_an_attribute_that_is_missing_for_good_means_one_host(server):
    server.answers = {"worker-network-endpoints": [(404, "")], "tpu-env": [(404, "")]}
    assert cluster.cloud_tpu_workers() == 1


def test_a_server_that_does_not_say_is_an_error_with_a_cure_that_a_supervisor_tries_again(server):
    server.answers["worker-network-endpoints"] = [(503, "")]
    with pytest.raises(PassingError, match="not say .*503.*; start again, or give .*MDS") as one:
        cluster.cloud_tpu_workers()
    assert one.value.status == 134 and len(server.asked) == 6


def test_outside_of_google_cloud_a_host_is_alone(server, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert cluster.cloud_tpu_workers() == 1


def test_without_tpus_nobody_is_asked(server, monkeypatch):
    monkeypatch.setattr(cluster, "has_tpus", lambda: False)
    assert cluster.cloud_tpu_workers() == 1 and server.asked == []
